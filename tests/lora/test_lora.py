"""Adapters of any model: a model with adapters computes the same as a model with the weights W + alpha / rank * A B."""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from flax_mesh import abstract_state, create_mesh, named_leaves
from flax_mesh.errors import ConfigError
from flax_mesh.lora import add_lora, merge_lora, with_lora
from flax_mesh.models import next_token_loss
from flax_mesh.mpmd import MpmdMesh, Pipeline, split_stages
from flax_mesh.program.program import bodies
from flax_mesh.step.loss import sums_of
from flax_mesh.train import abstract_train_state, init_train_state, make_eval_step, make_train_step
from tests.lora.models import CASES, TOKENS, WIDTH, Mlp, X, decoder, loss_fn

pytestmark = pytest.mark.usefixtures("quick_compilation")
RANK, ALPHA = 3, 6.0
SLOW = ("attention", "list", "stack", "decoder", "delta nets", "scanned decoder")


def adapted(make: Any, function: Any, batch: Any, patterns: Any) -> Callable[[], Any]:
    """A function that returns a model with adapters whose B is not zero."""
    with_adapters = add_lora(lambda: make(rngs=nnx.Rngs(0)), function, batch, rank=RANK, alpha=ALPHA, modules=patterns)

    def make_adapted() -> Any:
        model = with_adapters()
        for at, (_, x) in enumerate(nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))):
            x[...] = jnp.asarray(np.random.default_rng(at).normal(size=x.shape) / 4, x.dtype)
        return model

    return make_adapted


def loss_and_gradients(model: Any, scalar: Callable[[Any], jax.Array]) -> list[jax.Array]:
    """The loss, the gradients of the adapters, and the variables after the call that no optimizer changes."""
    graphdef, params, others = nnx.split(model, nnx.LoRAParam, ..., graph=True)

    def loss_of(params: nnx.State) -> tuple[jax.Array, Any]:
        called = nnx.merge(graphdef, params, others, copy=True)
        return scalar(called), nnx.state(called, (nnx.BatchStat, nnx.RngCount))

    return jax.tree.leaves(jax.value_and_grad(loss_of, has_aux=True)(params))


def total(function: Callable[..., Any], batch: Any) -> Callable[[Any], jax.Array]:
    def scalar(model: Any) -> jax.Array:
        loss, weight, _ = sums_of(function(model, batch))
        return loss / weight

    return scalar


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES])
def test_a_model_with_adapters_computes_what_the_merged_model_does(case: str):
    """Loss, gradients of A and B, and variables that the call changes; the second loop of a stack has adapters too."""
    _, function, batch, _ = CASES[case]
    make = adapted(*CASES[case])

    @jax.jit
    def run() -> Any:
        model = make()
        found = loss_and_gradients(model, total(with_lora(function), batch))
        expected = loss_and_gradients(model, lambda model: total(function, batch)(merge_lora(model)))
        return found, expected, total(function, batch)(model)

    found, expected, without = run()
    assert abs(found[0] - without) > 1e-4, "the test requires adapters that change the loss"
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=3e-5 * max(1e-3, float(jnp.abs(y).max())))


@pytest.mark.slow
def test_half_precision_is_as_exact_as_merged_weights():
    def loss_of(dtype: str, function: Callable[..., Any], change: Callable[[Any], Any]) -> float:
        make = adapted(decoder(scan=True, dtype=dtype), next_token_loss, TOKENS, "(q|v|o)/kernel")
        return float(jax.jit(lambda: total(function, TOKENS)(change(make())))())

    exact = loss_of("float32", next_token_loss, merge_lora)
    found = loss_of("bfloat16", with_lora(next_token_loss), lambda model: model)
    assert abs(found - exact) <= max(abs(loss_of("bfloat16", next_token_loss, merge_lora) - exact), 0.01)


def shapes_of_products(jaxpr: Any) -> set[tuple[int, ...]]:
    """The sorted shapes of all results of matrix products, those in calls and loops included."""
    found = {tuple(sorted(v.aval.shape)) for e in jaxpr.eqns if e.primitive.name == "dot_general" for v in e.outvars}
    return found.union(*(shapes_of_products(body) for eqn in jaxpr.eqns for body in bodies(eqn)))


@pytest.mark.parametrize(("wrt", "has_gradient"), [(nnx.LoRAParam, False), (nnx.Param, True)])
def test_no_product_computes_the_gradient_of_a_weight(wrt: Any, has_gradient: bool):
    make = adapted(*CASES["list"])

    def gradients() -> nnx.State:
        graphdef, params, others = nnx.split(make(), wrt, ..., graph=True)
        call = lambda params: with_lora(loss_fn)(nnx.merge(graphdef, params, others, copy=True), X)  # noqa: E731
        return jax.grad(call)(params)

    assert ((WIDTH, 24) in shapes_of_products(jax.make_jaxpr(gradients)().jaxpr)) == has_gradient


def test_at_the_start_the_model_is_unchanged_and_stacks_have_the_values_of_lists():
    def factors(scan: bool) -> dict[str, jax.Array]:
        make = lambda: decoder(scan=scan)(rngs=nnx.Rngs(0))  # noqa: E731
        adapted = add_lora(make, next_token_loss, TOKENS, rank=2, modules="layers/.*(q|down)/kernel")
        return dict(named_leaves(jax.jit(lambda: nnx.state(adapted(), nnx.LoRAParam))()))

    listed, stacked = factors(scan=False), factors(scan=True)
    assert not any(x.any() for path, x in (listed | stacked).items() if path.endswith("_lora_b"))
    limit = 1 / np.sqrt(24)  # the size that the product contracts
    first = listed["layers/1/mlp/down/kernel_lora_a"]
    assert first.shape == (24, 2) and 0.8 * limit < jnp.abs(first).max() <= limit
    np.testing.assert_array_equal(stacked["layers/mlp/down/kernel_lora_a"][1], first)


def test_the_factors_are_split_as_their_weight_by_tables_axes_and_annotations():
    make = add_lora(lambda: decoder(scan=True)(rngs=nnx.Rngs(0)), next_token_loss, TOKENS, rank=2, modules="q/kernel")
    mesh = create_mesh("fsdp:2,tp:2", devices=jax.devices()[:4])
    specs = {path: x.sharding.spec for path, x in named_leaves(abstract_state(make, mesh))}
    assert specs["layers/attention/q/kernel"] == P(None, "fsdp", "tp", None)
    assert specs["layers/attention/q/kernel_lora_a"] == P(None, "fsdp")
    assert specs["layers/attention/q/kernel_lora_b"] == P(None, None, "tp")

    def annotated() -> nnx.Linear:
        init = nnx.with_partitioning(nnx.initializers.ones_init(), ("fsdp", "tp"))
        return nnx.Linear(8, 16, kernel_init=init, use_bias=False, rngs=nnx.Rngs(0))

    for rules, expected in (("fsdp+tp", (P(), P(None, ("fsdp", "tp")))), (None, (P("fsdp"), P(None, "tp")))):
        state: Any = abstract_state(add_lora(annotated, loss_fn, X, rank=2, modules="kernel"), mesh, rules)
        assert tuple(state[name].get_value().sharding.spec for name in ("kernel_lora_a", "kernel_lora_b")) == expected


class Embedded(nnx.Module):
    """Weights that cannot be adapted, each for a different reason."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(16, WIDTH, rngs=rngs)
        self.both, self.cut, self.split = (
            nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH))) for _ in range(3)
        )
        self.items = nnx.List([nnx.Param(jnp.ones((WIDTH, WIDTH)))])
        self.unused = nnx.Param(jnp.ones((2, 2)))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.embed(jnp.zeros((), jnp.int32))
        x = x @ self.both[...] + x @ self.both[...].T
        heads = jnp.einsum("bshc,hcd->bsd", x.reshape(*x.shape[:-1], 2, -1), self.split.reshape(2, -1, WIDTH))
        x += jax.lax.scan(lambda x, w: (x + x[..., :4] @ w, None), heads, self.split.reshape(2, -1, WIDTH))[0]
        return x @ self.items[0][...] + (x @ self.cut[:, :4]).sum()


def test_everything_that_cannot_be_adapted_is_an_error_with_all_weights():
    patterns = ["embed", "both", "cut", "split", "items", "unused", "nothing"]
    with pytest.raises(ConfigError) as error:
        add_lora(lambda: Embedded(nnx.Rngs(0)), loss_fn, X, rank=2, modules=patterns)
    for found in (
        r"embed/embedding \(16, 8\) is used by gather",
        r"both \(8, 8\) is used by products that contract different dims of it",
        r"cut \(8, 8\) is used by dot_general .*test_lora.py:\d+.*, which is no product with whole rows of it",
        r"split \(8, 8\) is used by dot_general .*test_lora.py:\d+.*, dot_general .*test_lora.py:\d+",
        "items/0 must be an attribute of a module",
        "'unused' matches unused, which no product uses",
        "'nothing' matches none of both, cut, embed/embedding",
    ):
        assert error.match(f"(?s).*{found}")
    with pytest.raises(ConfigError, match="'bias' matches down/bias, up/bias, which no product uses"):
        add_lora(lambda: Mlp(nnx.Rngs(0)), loss_fn, X, rank=2, modules="bias")
    with pytest.raises(ConfigError, match=r"(?s)rank must be.*got 0.*alpha must be.*got -1.*'\(' is not a regular"):
        add_lora(lambda: Mlp(nnx.Rngs(0)), loss_fn, X, rank=0, alpha=-1, modules="(")
    for wrong, error, message in (
        ({"batch": "x"}, ConfigError, "batch '' is of type str; it must be an array of numbers"),
        ({"loss_fn": lambda: 0.0}, ConfigError, r"loss_fn.*must be callable with the arguments \(model, batch\)"),
        ({"modules": iter([1])}, ConfigError, "modules: 1 is not a regular expression"),
        ({"rank": "x"}, TypeError, "add_lora: rank must be an integer, got 'x'"),
    ):
        given: Any = {"make": lambda: Mlp(nnx.Rngs(0)), "loss_fn": loss_fn, "batch": X, "rank": 2, "modules": "up"}
        with pytest.raises(error, match=message):
            add_lora(**given | wrong)
    for function, name in ((merge_lora, "model"), (with_lora, "function")):
        with pytest.raises(TypeError, match=f"{function.__name__}: {name} must be .*, got 3"):
            function(cast(Any, 3))


def trace_adapted(function: Callable[..., Any]) -> None:
    """Trace a loss of a model with adapters of its weight `up`."""
    make = add_lora(lambda: Mlp(nnx.Rngs(0)), loss_fn, X, rank=2, modules="up/kernel")
    jax.eval_shape(lambda: with_lora(function)(make(), X))


def test_another_use_of_an_adapted_weight_in_another_loss_is_an_error_and_not_lost():
    with pytest.raises(ValueError, match="up/kernel must be used by matrix products only, but it is used by"):
        trace_adapted(lambda model, x: loss_fn(model, x) + (model.up.kernel[...] ** 2).sum())


def lost(model: Any, x: jax.Array, how: str) -> jax.Array:
    """A loss in which a loop, a branch, a remat or a custom derivative returns the weight in another form."""
    up = model.up.kernel[...]
    forms: dict[str, Callable[[], jax.Array]] = {
        "scan": lambda: jax.lax.scan(lambda c, w: (c, w.astype(jnp.bfloat16)), 0, up)[1].astype(jnp.float32),
        "scan of a carry": lambda: jax.lax.scan(lambda c, _: ((c[1], c[0]), None), (up, jnp.ones(up.shape)), length=2)[
            0
        ][0],
        "while": lambda: jax.lax.while_loop(
            lambda c: c[2] < 2, lambda c: (c[1], c[0], c[2] + 1), (up, jnp.ones(up.shape), 0)
        )[0],
        "cond": lambda: jax.lax.cond(x.sum() > 0, lambda: up, lambda: jnp.ones(up.shape)),
        "remat": lambda: jax.checkpoint(lambda w: w.T)(up).T,
        "custom": lambda: identity(up),
    }
    return (x @ forms[how]()).sum()


@jax.custom_vjp
def identity(w: jax.Array) -> jax.Array:
    return w


identity.defvjp(lambda w: (w, None), lambda _, g: (g,))


@pytest.mark.parametrize("how", ["scan", "scan of a carry", "while", "cond", "remat", "custom"])
def test_a_weight_that_comes_back_in_another_form_is_an_error_and_not_lost(how: str):
    message = f"up/kernel must be used by matrix products only, but it is used by .*{how.split()[0]}"
    with pytest.raises(ValueError, match=message):
        trace_adapted(lambda model, x: lost(model, x, how))


def test_the_low_rank_part_is_added_once():
    adapted = with_lora(loss_fn)
    assert with_lora(adapted) is adapted


@pytest.mark.slow
def test_steps_stages_and_adapters_of_a_chain_of_5000_operations_are_traced():
    class Deep(Mlp):
        def __call__(self, x: jax.Array) -> jax.Array:
            x = super().__call__(x)
            for _ in range(5000):
                x = x + 1e-6
            return x

    function = lambda model, batch: ((model(batch) ** 2).sum(), 1.0)  # noqa: E731

    def make() -> Any:
        model = Deep(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    x = jnp.concatenate([X] * 4)
    state = init_train_state(make, abstract_state(make, create_mesh((8,), ("fsdp",)), rules="fsdp"))
    assert make_train_step(function, state).eval_shape(state, x)[1]["loss"].shape == ()
    assert make_eval_step(function, state).eval_shape(state, x)["loss"].shape == ()
    stages = split_stages(function, lambda: Deep(nnx.Rngs(0)), X, layers=("up", "down"), num_stages=2)
    assert stages.num_stages == 2
    model = add_lora(lambda: Deep(nnx.Rngs(0)), function, X, rank=2, modules="up/kernel")()
    assert nnx.eval_shape(with_lora(function), model, X)[0].shape == ()


def test_changes_of_modules_in_further_arguments_are_kept():
    model = add_lora(lambda: Mlp(nnx.Rngs(0)), loss_fn, X, rank=2, modules="up/kernel")()
    rngs, norm = nnx.Rngs(1), nnx.BatchNorm(X.shape[-1], rngs=nnx.Rngs(2))

    def call(model, x, *more, norm):
        return model(norm["norm"](x + more[0][0].normal(x.shape))).sum()

    results = [with_lora(call)(model, X, [rngs], norm={"norm": norm}) for _ in range(2)]
    assert rngs.default.count[...] == 2 and results[0] != results[1]
    assert jnp.abs(norm.mean[...]).min() > 0


def test_a_loss_of_adapters_that_does_not_use_them_is_an_error():
    adapted = add_lora(lambda: Mlp(nnx.Rngs(0)), loss_fn, X, rank=2, modules="up/kernel")

    def make() -> Any:
        model = adapted()
        return model, nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.LoRAParam)

    state = abstract_train_state(make, abstract_state(make, create_mesh("fsdp:1", devices=jax.devices()[:1]), "fsdp"))
    text = r"none of up/kernel_lora_a, up/kernel_lora_b\. Adapters are used by with_lora\(loss_fn\)"
    for make_step in (make_train_step, make_eval_step):
        with pytest.raises(ValueError, match=text):
            make_step(loss_fn, state).eval_shape(state, X)
        make_step(with_lora(loss_fn), state).eval_shape(state, X)
    with pytest.raises(ValueError, match=text):
        split_stages(loss_fn, make, X, layers=("up", "down"), num_stages=2)


def losses(make: Callable[[], Any], shape: str, **axes: Any) -> list[float]:
    devices = jax.devices()[: 1 if shape == "fsdp:1" else 8]
    state = init_train_state(make, abstract_state(make, create_mesh(shape, devices=devices, **axes)))
    step, found = make_train_step(with_lora(next_token_loss), state), []
    for _ in range(3):
        state, metrics = step(state, TOKENS)
        found.append(float(metrics["loss"]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_every_mesh_explicit_axes_and_pipelines_train_the_same_adapters(scan: bool):
    patterns = "(q|v|o|up|down|gate)/kernel"
    adapted = add_lora(
        lambda: decoder(scan=scan, layer_pattern="local,global", sliding_window=4)(rngs=nnx.Rngs(0)),
        *(next_token_loss, TOKENS),
        **{"rank": 3, "alpha": 6, "modules": patterns},
    )

    def make() -> Any:
        model = adapted()
        return model, nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.LoRAParam)

    expected = losses(make, "fsdp:1")
    assert expected[0] > expected[1] > expected[2]
    shape, explicit = "dp:2,fsdp:2,tp:2", (AxisType.Explicit,) * 3
    np.testing.assert_allclose(losses(make, shape), expected, rtol=1e-5)
    np.testing.assert_allclose(losses(make, shape, axis_types=explicit), expected, rtol=1e-5)
    groups = MpmdMesh(create_mesh("pp:2,fsdp:2,tp:2"), "pp")
    staged = split_stages(with_lora(next_token_loss), make, TOKENS, mesh=groups, schedule="1f1b", num_microbatches=2)
    pipeline = Pipeline(staged)
    state, found = pipeline.init_state(), []
    for _ in range(3):
        state, metrics = pipeline.step(state, TOKENS)
        found.append(float(metrics["loss"]))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
