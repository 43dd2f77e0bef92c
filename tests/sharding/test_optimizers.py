"""Optimizer states are sharded as their parameters, for any optax transformation, and steps have the same result."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, PartitionSpec

import flax_mesh as fm
from flax_mesh.sharding import sharding_fingerprint
from flax_mesh.sharding.optimizer import _dims, _grown, split_over
from flax_mesh.train import init_train_state, make_train_step
from flax_mesh.tree import map_named

pytestmark = pytest.mark.usefixtures("quick_compilation")

P = PartitionSpec
# No rule matches a leaf of the optimizer by itself.
RULES = [("^(square|out|layers)/kernel$", ("embed", "mlp")), ("^(square|out|layers)/bias$", ("mlp",))]
SPEC = {"square/kernel": P("fsdp", "tp"), "out/kernel": P("fsdp", "tp"), "square/bias": P("tp"), "out/bias": P("tp")}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.square, self.out = nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, 32, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.tanh(self.square(x)))


def loss_fn(model, batch):
    return jnp.sum((model(batch) - 1.0) ** 2), jnp.float32(batch.shape[0])


def of_kernels(params):
    return map_named(lambda path, _: path.endswith("kernel"), params)


def label(params):
    return map_named(lambda path, _: "matrices" if path.endswith("kernel") else "vectors", params)


# name -> a transformation with that kind of state. The learning rates are large, so that a wrong update shows.
OPTIMIZERS = {
    "adam": lambda: optax.adamw(1e-2),
    "chained": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2), optax.ema(0.9)),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8, momentum=0.9),
    "muon": lambda: optax.contrib.muon(1e-2),
    "masked": lambda: optax.chain(optax.masked(optax.trace(0.9), of_kernels), optax.sgd(1e-2)),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "partition": lambda: optax.partition({"matrices": optax.adamw(1e-2), "vectors": optax.sgd(1e-2, 0.9)}, label),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-2),
    "sm3": lambda: optax.sm3(1e-2),
}


def maker(name):
    def make():
        model = Net(nnx.Rngs(0))
        return model, nnx.Optimizer(model, OPTIMIZERS[name](), wrt=nnx.Param)

    return make


def specs_of(state):
    return {path: leaf.sharding.spec for path, leaf in fm.named_leaves(state)}


def after_steps(name, mesh, **kinds):
    """(abstract state, train state after three steps)."""
    abstract = fm.abstract_state(maker(name), mesh, RULES, **kinds)
    state = init_train_state(maker(name), abstract)
    step = make_train_step(loss_fn, state)
    batch = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    for _ in range(3):
        state, _ = step(state, batch)
    return abstract, state


def assert_close(a, b):
    for (path, x), (_, y) in zip(fm.named_leaves(a), fm.named_leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6, err_msg=path)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_arrays_are_sharded_and_the_explanation_agrees(name):
    mesh = AbstractMesh((2, 2, 2), ("dp", "fsdp", "tp"))
    report = fm.analyze_sharding_strategy(fm.abstract_state(maker(name), mesh, RULES))
    sizable = [leaf for leaf in report.leaves if leaf.kind == "optimizer" and max(leaf.shape, default=0) >= 16]
    assert sizable and all(leaf.copies < 8 for leaf in sizable)
    for leaf in sizable:
        owner = next(path for path in SPEC if path in leaf.path)
        factored = owner.endswith("kernel") and len(leaf.shape) == 1
        assert leaf.spec == SPEC[owner] or (factored and any(leaf.spec or ())), leaf
    explanation = fm.explain_sharding(maker(name), mesh, RULES)
    assert not explanation.findings
    explained = {x.path: x.spec for x in explanation.report.leaves}
    assert explained == {x.path.removeprefix("model/"): x.spec for x in report.leaves}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_are_sharded_as_their_parameters_and_steps_equal_one_device(name):
    mesh = fm.create_mesh((2, 2, 1, 2, 1))
    abstract, state = after_steps(name, mesh)
    for expected, have in zip(jax.tree.leaves(abstract), state.leaves, strict=True):
        assert have.sharding == expected.sharding
    _, alone = after_steps(name, fm.create_mesh((1, 1, 1, 1, 1), devices=jax.devices()[:1]))
    start = fm.gather(fm.init_state(maker(name), abstract))
    change = np.abs(start["model"]["out"]["kernel"][...] - state.merge()[0].out.kernel[...]).max()
    assert change > 1e-3
    assert_close(fm.gather(state.to_nnx()), fm.gather(alone.to_nnx()))


def test_factored_moments_take_the_axes_of_their_dims():
    abstract = fm.abstract_state(maker("adafactor"), fm.create_mesh((2, 2, 1, 2, 1)), RULES)
    specs = specs_of(abstract["optimizer"]["opt_state"])
    # Row and column statistics of the square kernel have the same shape, but belong to different dims.
    assert specs["0/v_row/square/kernel"] == specs["0/v_row/out/kernel"] == P("fsdp")
    assert specs["0/v_col/square/kernel"] == specs["0/v_col/out/kernel"] == P("tp")
    assert specs["0/v/square/kernel"] == P() and specs["0/v/square/bias"] == P("tp")
    sm3 = specs_of(fm.abstract_state(maker("sm3"), fm.create_mesh((2, 2, 1, 2, 1)), RULES)["optimizer"]["opt_state"])
    assert (sm3["0/mu/square/kernel/0"], sm3["0/mu/square/kernel/1"]) == (P("fsdp"), P("tp"))


def test_factored_moments_of_a_stack_keep_the_layer_dim_in_front():
    def make():
        stack = nnx.vmap(lambda key: nnx.Linear(16, 16, rngs=nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 3))
        model = nnx.Dict(layers=stack)
        return model, nnx.Optimizer(model, optax.adafactor(1e-2, min_dim_size_to_factor=8), wrt=nnx.Param)

    rules = fm.PartitionRules([*RULES], layers="layers")
    specs = specs_of(fm.abstract_state(make, AbstractMesh((2, 2), ("fsdp", "tp")), rules)["optimizer"]["opt_state"])
    assert specs["0/v_row/layers/kernel"] == P(None, "fsdp") and specs["0/v_col/layers/kernel"] == P(None, "tp")
    assert specs["0/v/layers/bias"] == P(None, "tp")


shapes = st.lists(st.integers(1, 9), max_size=5).map(tuple)


@settings(max_examples=100, deadline=None)
@given(shapes, st.data())
def test_any_choice_of_dims_is_recovered_from_the_sizes_after_growing(shape, data):
    grown = _grown(shape)
    assert len(set(grown)) == len(grown) and all(a < b for a, b in zip(shape, grown, strict=True))
    assert np.argsort(shape, kind="stable").tolist() == np.argsort(grown).tolist()
    # None: not a dim of the parameter.
    chosen = data.draw(st.lists(st.sampled_from([None, *range(len(shape))]), max_size=4))
    before, after = ([7 if dim is None else sizes[dim] for dim in chosen] for sizes in (shape, grown))
    assert _dims(tuple(before), tuple(after), shape) == tuple(chosen)
    assert _dims(tuple(before), (*after, 1), shape) == (None,) * len(chosen)  # another rank: unknown


def abstract_of(init, rules=RULES, **kinds):
    """The state of an optax transformation that does not change the updates."""

    def make():
        model = Net(nnx.Rngs(0))
        transformation = optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))
        return model, nnx.Optimizer(model, transformation, wrt=nnx.Param)

    return fm.abstract_state(make, fm.create_mesh((2, 2, 1, 2, 1)), rules, **kinds)["optimizer"]["opt_state"]


def test_dims_are_recovered_by_structure_and_not_by_size():
    def gram(x):  # statistics of Shampoo, and an array with a dim of equal size that is not a dim of the parameter
        first, last = x.shape[0], x.shape[-1]
        shapes = {"left": (first, first), "right": (last, last), "history": (16, 3, last)}
        return {name: jnp.zeros(shape) for name, shape in shapes.items()}

    specs = specs_of(abstract_of(lambda params: jax.tree.map(gram, params)))
    assert specs["out/kernel/left"] == P("fsdp") and specs["out/kernel/right"] == P("tp")
    assert specs["out/kernel/history"] == P(None, None, "tp")
    assert specs["square/kernel/left"] == P("fsdp", "tp")  # has the shape of the parameter, and so its spec


def test_replicated_arrays_as_large_as_their_parameter_are_findings():
    flat = lambda params: jax.tree.map(lambda x: jnp.zeros(x.size), params)  # noqa: E731
    message = r"(?s)opt_state/out/kernel: \(512,\).*opt_state/square/kernel: \(256,\) would be replicated"
    with pytest.raises(fm.ShardingError, match=message):
        abstract_of(flat)
    with pytest.warns(UserWarning, match="would be replicated"):
        abstract_of(flat, on_mismatch="warn")


def test_leaves_without_a_parameter_follow_the_table_and_may_lack_a_rule_if_small():
    state = lambda params: {"table": jnp.zeros((8, 4)), "list": jnp.zeros(3)}  # noqa: E731
    assert specs_of(abstract_of(state)) == {"list": P(), "table": P()}
    assert specs_of(abstract_of(state, rules=[*RULES, ("opt_state/table", P("tp"))]))["table"] == P("tp")
    with pytest.raises(fm.ShardingError, match="Partition rule not found for param: opt_state/large"):
        abstract_of(lambda params: {"large": jnp.zeros((4096, 1024))})


def test_an_optimizer_may_be_annotated_differently_from_its_parameters():
    def make_with(names, optimizer=OPTIMIZERS["adam"]):
        def make():
            model = Net(nnx.Rngs(0))
            own = {"optimizer_sharding": names} if names else {}
            model.out.kernel.set_metadata(out_sharding=("embed", "tp"), **own)
            return model, nnx.Optimizer(model, optimizer(), wrt=nnx.Param)

        return make

    mesh = fm.create_mesh((2, 2, 1, 2, 1))
    specs = specs_of(fm.abstract_state(make_with(None, OPTIMIZERS["adafactor"]), mesh)["optimizer"]["opt_state"])
    assert (specs["0/v_row/out/kernel"], specs["0/v_col/out/kernel"]) == (P("fsdp"), P("tp"))
    abstract = fm.abstract_state(make_with(("tp", "dp")), mesh)
    assert fm.explain_sharding(make_with(("tp", "dp")), mesh).fingerprint == sharding_fingerprint(abstract)
    specs = specs_of(abstract)
    assert specs["model/out/kernel"] == P("fsdp", "tp")
    assert specs["optimizer/opt_state/0/mu/out/kernel"] == P("tp", "dp")
    split = fm.abstract_state(make_with(("tp", None)), mesh, shard_optimizer_over="dp")
    assert specs_of(split)["optimizer/opt_state/0/nu/out/kernel"] == P(("tp", "dp"), None)
    with pytest.raises(fm.ShardingError, match=r"opt_state/0/mu/out/kernel: its annotation .* names 'nowhere'"):
        fm.abstract_state(make_with(("nowhere", None)), mesh)
    assert len(fm.explain_sharding(make_with(("nowhere", None)), mesh).findings) == 2  # of both moments
    by_table = specs_of(fm.abstract_state(make_with(("tp", "dp")), mesh, RULES))  # a table overrides the annotations
    assert by_table["optimizer/opt_state/0/mu/out/kernel"] == P("fsdp", "tp")


# --- ZeRO-1 ---


def bytes_per_device(state):
    moments = [leaf for path, leaf in fm.named_leaves(state) if "opt_state" in path and leaf.size > 1]
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in moments)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adam", "adafactor", "multi_steps"])
def test_sharding_moments_over_dp_divides_their_bytes_and_keeps_the_results(name):
    mesh = fm.create_mesh((4, 2, 1, 1, 1))
    _, plain = after_steps(name, mesh)
    abstract, zero = after_steps(name, mesh, shard_optimizer_over="dp")
    assert bytes_per_device(plain.to_nnx()) == 4 * bytes_per_device(zero.to_nnx()) > 0
    for expected, have in zip(jax.tree.leaves(abstract), zero.leaves, strict=True):
        assert have.sharding == expected.sharding  # also after a step
    report = fm.analyze_sharding_strategy(abstract)
    assert report.memory_per_device == fm.analyze_sharding_strategy(zero.to_nnx()).memory_per_device
    assert report.optimizer_bytes < report.parameter_bytes
    assert specs_of(zero.to_nnx()["model"]) == specs_of(plain.to_nnx()["model"])
    _, alone = after_steps(name, fm.create_mesh((1, 1, 1, 1, 1), devices=jax.devices()[:1]))
    assert_close(fm.gather(zero.to_nnx()), fm.gather(alone.to_nnx()))


def test_the_first_divisible_dim_is_split_further():
    mesh = AbstractMesh((4, 2, 2), ("dp", "fsdp", "tp"))

    def split(*shape, spec=None):
        return split_over("x", shape, spec or P(), mesh, ("dp",))

    assert split(16, 8, spec=P("fsdp", "tp")) == (P(("fsdp", "dp"), "tp"), [])
    assert split(6, 8, spec=P("fsdp", "tp")) == (P("fsdp", ("tp", "dp")), [])
    assert split(3, 5, 8) == (P(None, None, "dp"), [])
    assert split(8, spec=P("dp")) == (P("dp"), [])  # already sharded over dp
    assert split(3) == split() == (P(), [])  # fewer elements than devices
    assert split_over("x", (8,), P(), mesh, ("dp", "fsdp")) == (P(("dp", "fsdp")), [])
    assert split_over("x", (6,), P(), mesh, ("dp",), min_size=7) == (P(), [])


def test_moments_that_cannot_be_split_further_are_findings():
    def make():
        model = nnx.Linear(6, 10, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    mesh, findings, rules = fm.create_mesh((8, 1, 1, 1, 1)), [], [("kernel", ("embed", "mlp")), ("bias", ("mlp",))]
    message = r"(?s)mu/kernel: no dim of \(6, 10\) with spec .* by 8.*nu/bias: no dim of \(10,\).*min_size=61"
    with pytest.raises(fm.ShardingError, match=message):
        fm.abstract_state(make, mesh, rules, shard_optimizer_over="dp")
    odd = fm.abstract_state(make, mesh, rules, shard_optimizer_over="dp", on_mismatch="drop", dropped=findings)
    found = [finding.path.rsplit("/", 2)[-2:] for finding in findings]
    assert found == [[m, p] for m in ("mu", "nu") for p in ("bias", "kernel")]
    assert specs_of(odd)["optimizer/opt_state/0/mu/kernel"] == P("fsdp", "tp")  # the spec of its parameter
    small = fm.abstract_state(make, mesh, rules, shard_optimizer_over="dp", min_size=61)
    assert set(specs_of(small).values()) == {P()}
    message = r"opt_state/0/\S+: must be split over axes of the mesh .*, which lacks \['data'\]"
    with pytest.raises(fm.ShardingError, match=message):
        fm.abstract_state(make, mesh, rules, shard_optimizer_over="data")
    with pytest.raises(fm.ShardingError, match=r"cannot be split over \['dp'\] twice: axes \('dp', 'dp'\)"):
        fm.abstract_state(make, mesh, rules, shard_optimizer_over=("dp", "dp"))
