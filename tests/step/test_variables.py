"""Valid variables of a trained model: arrays of modules, metadata, narrow dtypes; valid changes in a call."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import flax_mesh as fm
from flax_mesh.checkpoint import Checkpointer
from flax_mesh.jax_compat import reproducible_cpu_options
from flax_mesh.train import abstract_train_state, init_train_state, make_eval_step, make_train_step
from flax_mesh.tree import map_named

pytestmark = [
    pytest.mark.usefixtures("quick_unless_slow"),
    pytest.mark.filterwarnings("ignore:rules=.fsdp."),  # tp has no work here
]


@pytest.fixture(scope="module")
def mesh():
    return fm.create_mesh((2, 4), ("fsdp", "tp"))


class Odd(nnx.Module):
    """Variables and arrays of many kinds, of which only floating parameters are trained."""

    def __init__(self, rngs):
        self.scale, self.empty = nnx.Param(jnp.ones(8), rngs=rngs), nnx.Param(jnp.ones((0, 8)))
        both: dict[str, Any] = {"w": jnp.eye(8), "b": [jnp.zeros(8)]}
        self.both = nnx.Param(both, rngs=rngs)
        self.int8, self.int4 = (nnx.Variable(jnp.eye(8, dtype=kind)) for kind in (jnp.int8, jnp.int4))
        self.float8, self.mask = nnx.Variable(jnp.eye(8, dtype=jnp.float8_e4m3fn)), nnx.Variable(jnp.ones(8, bool))
        self.normed = nnx.WeightNorm(nnx.Linear(8, 8, rngs=rngs), rngs=rngs)
        self.freqs, self.tables = jnp.linspace(0.0, 1.0, 8), nnx.data([jnp.ones(8), {"more": np.ones(8, np.float32)}])
        self.last = jnp.zeros(())

    def __call__(self, x):
        self.last = jax.lax.stop_gradient(x.mean())  # an array that the call changes
        for kernel in (self.int8, self.int4, self.float8):
            x = x @ (kernel[...].astype(jnp.float32) * self.scale[...])
        both = self.both.get_value()
        x = self.normed(x + self.freqs + self.tables[0] + self.tables[1]["more"]) @ both["w"] + both["b"][0]
        return jnp.where(self.mask[...], x, 0) + self.empty[...].sum()


ADAM = optax.adam(1e-2)


def maker(module, wrt: Any = nnx.Param):
    def make():
        model = module(nnx.Rngs(0))
        return model, nnx.Optimizer(model, ADAM, wrt=wrt)

    return make


def loss_fn(model, batch):
    return ((model(batch) - 1) ** 2).sum(), batch.size


def batch():
    return np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)


@pytest.mark.slow
def test_arrays_of_all_kinds_train_and_are_restored(mesh, tmp_path, compilations):
    make = maker(Odd)
    state = init_train_state(make, fm.abstract_state(make, mesh, "fsdp"))
    before = dict(fm.named_leaves(fm.gather(state.to_nnx()["model"])))
    step, losses = make_train_step(loss_fn, state, num_microbatches=2), []
    for _ in range(3):
        state, metrics = step(state, batch())
        losses.append(float(metrics["loss"]))
    after = dict(fm.named_leaves(fm.gather(state.to_nnx()["model"])))
    changed = {path for path, x in after.items() if not np.array_equal(x, before[path])}
    trained = {"scale", "both/w", "both/b/0", "normed/layer_instance/kernel", "normed/layer_instance/bias"}
    # Since Flax 0.12.9 the scales of WeightNorm are Params too.
    trained |= {path for path, _ in fm.named_leaves(nnx.state(Odd(nnx.Rngs(0)), nnx.Param)) if "scales" in path}
    assert changed == trained | {"last"} and losses[-1] < losses[0]
    np.testing.assert_allclose(after["last"], batch()[4:].mean(), rtol=1e-5)

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, state)
    other = abstract_train_state(make, fm.abstract_state(make, mesh, "tp"))
    assert other.definition == state.definition
    with Checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.restore(other)
    for (path, x), (_, y) in zip(fm.named_leaves(state.to_nnx()), fm.named_leaves(restored.to_nnx()), strict=True):
        assert x.dtype == y.dtype, path
        np.testing.assert_array_equal(x, y, err_msg=path)
    expected = make_eval_step(loss_fn, state)(state, batch())
    found = make_eval_step(loss_fn, other)(restored, batch())
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)


class WithStreams(nnx.Module):
    def __init__(self, rngs):
        self.kernel = nnx.Param(jnp.eye(8), rngs=rngs)

    def __call__(self, x):
        return x @ self.kernel


def test_a_step_for_a_layout_takes_states_from_another_call_of_make(mesh, compilations):
    make = maker(WithStreams)
    abstract = fm.abstract_state(make, mesh, "fsdp")
    step = make_train_step(loss_fn, abstract_train_state(make, abstract))
    for _ in range(2):
        state, _ = step(init_train_state(make, abstract), batch())
        compilations.clear()
        step(state, batch())
        assert not compilations


def test_a_state_with_other_functions_than_the_layout_is_an_error_that_names_them(mesh):
    def make():
        model = WithStreams(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    layout, other = (abstract_train_state(make, fm.abstract_state(make, mesh, "fsdp")) for _ in range(2))
    step = make_train_step(loss_fn, layout)
    with pytest.raises(ValueError, match=r"definition of the one .*\noptimizer: attribute 'tx' was .*\nEvery call"):
        jax.eval_shape(step, other, batch())
    jax.eval_shape(step, layout.with_state(other.to_nnx()), batch())


def kernel_of(kind, dtype):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Dict(kernel=kind(jnp.eye(8, dtype=dtype))) for _ in range(3)])
            self.scale = nnx.Param(jnp.ones(8))

        def __call__(self, x):
            for layer in self.layers:
                x = x @ (layer.kernel[...].astype(jnp.float32) * self.scale[...])
            return x

    return Net


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int4, jnp.uint8, jnp.bool_, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_narrow_parameters_may_be_frozen_and_not_trained(dtype, mesh):
    make = maker(kernel_of(nnx.Param, dtype))
    layout = abstract_train_state(make, fm.abstract_state(make, mesh, "fsdp"))
    with pytest.raises(ValueError, match=r"layers/{0..2}/kernel \(\w+\)\. Make them Variables of another type"):
        jax.eval_shape(make_train_step(loss_fn, layout), layout, batch())
    for kind, wrt in ((nnx.Variable, nnx.Param), (nnx.Param, nnx.PathContains("scale"))):
        make = maker(kernel_of(kind, dtype), wrt)
        layout = abstract_train_state(make, fm.abstract_state(make, mesh, "fsdp"))
        jax.eval_shape(make_train_step(loss_fn, layout), layout, batch())


class Changing(nnx.Module):
    def __init__(self, rngs, change):
        self.layers = nnx.List([nnx.Dropout(0.1, rngs=rngs) for _ in range(3)])
        self.kernel, self.stat = nnx.Param(jnp.eye(8)), nnx.BatchStat(jnp.zeros(()), kind="a")
        self.calls, self.cache, self.change = 0, None, change

    def __call__(self, x):
        self.change(self, x)
        return x @ self.kernel


CHANGES = {
    r"layers/{0..2}: attribute 'deterministic' was False, is True\n.*call train\(\) or eval\(\)": lambda m, x: m.eval(),
    "\nthe model: attribute 'calls' was 0, is 1\n": lambda m, x: setattr(m, "calls", 1),
    "\nthe model: attribute 'cache' was None, is .*Tracer": lambda m, x: setattr(m, "cache", x.sum()),
    "\nstat: metadata 'kind' was 'a', is 'b'\n": lambda m, x: m.stat.set_metadata(kind="b"),
    "\nmore: the call added this variable\n": lambda m, x: setattr(m, "more", nnx.BatchStat(x)),
    "\nstat: the call removed this variable\n": lambda m, x: delattr(m, "stat"),
    r"\nmodel/stat: f32\[\] becomes i32\[\]\n": lambda m, x: m.stat.set_value(jnp.int32(0)),
    r"\nmodel/stat: f32\[\] becomes f32\[8\]\n": lambda m, x: m.stat.set_value(jnp.zeros(8)),
}


@pytest.mark.parametrize("message", CHANGES)
def test_forbidden_changes_of_a_call_are_named(message, mesh):
    make = maker(lambda rngs: Changing(rngs, CHANGES[message]))
    layout = abstract_train_state(make, fm.abstract_state(make, mesh, "fsdp"))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(make_train_step(loss_fn, layout), layout, batch())


def test_a_state_of_the_optimizer_must_keep_its_dtype(mesh):
    def make():
        model = nnx.Linear(8, 8, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
        init: Any = lambda parameters: {"sum": jax.tree.map(jnp.zeros_like, parameters)}  # noqa: E731
        update: Any = lambda g, s, p=None: (g, jax.tree.map(lambda x: x + np.float32(1), s))  # noqa: E731
        cast = optax.GradientTransformation(init, update)
        return model, nnx.Optimizer(model, cast, wrt=nnx.Param)

    layout = abstract_train_state(make, fm.abstract_state(make, mesh, "fsdp"))
    problem = r"optimizer/opt_state/sum/bias: bf16\[8\] becomes f32\[8\]\n.*sum/kernel: bf16\[8,8\] becomes f32\[8,8\]"
    with pytest.raises(ValueError, match=problem):
        jax.eval_shape(make_train_step(loss_fn, layout), layout, batch())


def test_a_call_may_create_an_annotated_variable_anew(mesh):
    def change(model, x):
        model.stat = nnx.BatchStat(x.sum(), kind="a", out_sharding=PartitionSpec())

    class Anew(Changing):
        def __init__(self, rngs):
            super().__init__(rngs, change)
            self.stat = nnx.BatchStat(jnp.zeros(()), kind="a", out_sharding=PartitionSpec())

    layout = abstract_train_state(maker(Anew), fm.abstract_state(maker(Anew), mesh, "fsdp"))
    jax.eval_shape(make_train_step(loss_fn, layout), layout, batch())


def test_a_train_state_needs_model_and_optimizer(mesh):
    make = lambda: WithStreams(nnx.Rngs(0))  # noqa: E731
    abstract = fm.abstract_state(make, mesh, "fsdp")
    with pytest.raises(fm.ShardingError, match=r"make\(\) must return \(model, nnx.Optimizer\).* of type WithStreams"):
        init_train_state(make, abstract)
    for create in (make_train_step, make_eval_step):
        with pytest.raises(TypeError, match="state must be a TrainState, got State"):
            create(loss_fn, abstract)  # pyright: ignore[reportArgumentType]


def make_eleven():
    model = nnx.Dict(layers=nnx.List([nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(11)]))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


@pytest.fixture(scope="module")
def abstract():
    return fm.abstract_state(make_eleven, fm.create_mesh((1,), ("fsdp",), devices=jax.devices()[:1]), [(".*", ())])


@pytest.mark.parametrize("kind", [lambda state: state, nnx.State.to_pure_dict])
def test_with_state_takes_the_leaves_and_keeps_the_definition(kind, abstract):
    layout, state = abstract_train_state(make_eleven, abstract), fm.init_state(make_eleven, abstract)
    got = layout.with_state(kind(state))
    assert got.definition is layout.definition
    named = layout.with_state(map_named(lambda path, _: path, layout.to_nnx()))
    assert named.leaves[0] == "model/layers/0/bias"
    kernels = [layer.kernel[...] for layer in got.merge()[0].layers]  # more than ten layers: as text, 10 sorts before 2
    expected = dict(fm.named_leaves(state))
    assert len(kernels) == 11
    assert all(np.array_equal(kernel, expected[f"model/layers/{i}/kernel"]) for i, kernel in enumerate(kernels))


def test_with_state_names_every_path_that_differs(abstract):
    layout = abstract_train_state(make_eleven, abstract)
    other = {"model": abstract["model"], "more": 1, "optimizer": {"step": 0}}
    with pytest.raises(ValueError, match="must have the same paths as `to_nnx\\(\\)`") as error:
        layout.with_state(other)
    lines = str(error.value).splitlines()[1:]
    moments = [f"optimizer/opt_state/0/{m}/layers/{{0..10}}/{p}" for m in ("mu", "nu") for p in ("bias", "kernel")]
    missing = ["optimizer/opt_state/0/count", *moments]
    assert lines == ["  more: unknown", *(f"  {path}: missing" for path in missing)]


def test_leaves_with_the_same_path_are_refused_before_anything_compiles(compilations):
    """Both would get the value of one of them."""

    def make():
        model = nnx.Dict({"a/b": nnx.Param(jnp.zeros(2)), "a": nnx.Dict(b=nnx.Param(jnp.ones(2)))})
        return model, nnx.Optimizer(model, optax.sgd(1e-3), wrt=nnx.Param)

    abstract = fm.abstract_state(make, fm.create_mesh(), [(".*", ())])
    reproducible_cpu_options()  # compiles a program once
    compilations.clear()
    with pytest.raises(ValueError, match="  model/a/b: 2 leaves have this path"):
        init_train_state(make, abstract)
    assert not compilations
