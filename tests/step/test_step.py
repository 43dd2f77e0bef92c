"""The train step against a plain Flax and optax loop on one device, for models and losses of the tests."""

import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from flax_mesh import abstract_state, create_mesh, explain_sharding, partitioned
from flax_mesh.errors import ConfigError
from flax_mesh.step.batch import put_batch
from flax_mesh.step.loss import reseed
from flax_mesh.train import abstract_train_state, make_eval_step, make_train_step
from flax_mesh.tree import named_leaves
from tests.step.net import Net, batch, layout, make, run, start

pytestmark = pytest.mark.usefixtures("quick_unless_slow")


def weighted_loss(model, batch):
    error = jnp.mean((model(batch["x"]) - 1.0) ** 2, axis=-1)
    return jnp.sum(error * batch["w"]), jnp.sum(batch["w"]), {"errors": jnp.sum(error > 0.5, where=batch["w"] > 0)}


@pytest.mark.sampled
@pytest.mark.parametrize("parts", [4, 2])
def test_accumulation_is_correct_for_microbatches_of_different_weight(parts):
    live = np.array([1] * 4 + [1, 0, 0, 0] + [0] * 4 + [0, 1, 1, 0], np.float32)  # weights 4, 1, 0, 2
    full, rows = run(weighted_loss, start(make()), [batch(live=live)] * 2)
    split, split_rows = run(weighted_loss, start(make()), [batch(live=live)] * 2, num_microbatches=parts)
    for a, b in zip(rows, split_rows, strict=True):
        for name in ("loss", "grad_norm", "weight", "errors"):
            np.testing.assert_allclose(a[name], b[name], rtol=1e-5, err_msg=name)
    # `seen` is carried from one microbatch to the next.
    assert [int(s.merge()[0].seen[...]) for s in (full, split)] == [2, 2 * parts]

    def mean_of_means(model, b):  # a common mistake: the mean over each microbatch
        loss, weight, _ = weighted_loss(model, b)
        return loss / jnp.maximum(weight, 1.0)

    with pytest.warns(UserWarning, match="divides by a number that depends on the batch: 'loss'"):
        _, wrong = run(mean_of_means, start(make()), [batch(live=live)], num_microbatches=parts)
    assert abs(wrong[0]["loss"] - rows[0]["loss"]) > 1e-2


def test_a_batch_of_weight_zero_has_a_zero_gradient():
    state, rows = run(weighted_loss, start(make()), [batch(live=np.zeros(16, np.float32))])
    assert rows[0]["loss"] == rows[0]["grad_norm"] == 0
    assert all(np.isfinite(x).all() for x in as_numbers(state))


@pytest.mark.slow
def test_dropout_masks_depend_on_seed_step_and_microbatch_but_not_on_the_mesh():
    def masks(model, b):
        kept = model.drop(jnp.ones_like(b["x"])) > 0
        return jnp.sum((model(b["x"]) - 1.0) ** 2), 1.0, {"mask": jnp.sum(kept * 2.0 ** jnp.arange(8))}

    def seen(mesh=None, **kinds):
        b = jax.device_put(batch(), NamedSharding(mesh, PartitionSpec("fsdp"))) if mesh else batch()
        return [float(row["mask"]) for row in run(masks, start(make(rate=0.5), mesh), [b] * 2, **kinds)[1]]

    one = seen()
    assert one == seen(create_mesh((2, 2, 1, 2, 1)))
    assert one[0] != one[1]  # different steps have different masks
    assert one != seen(seed=1) and one != seen(num_microbatches=2)


def test_every_microbatch_has_a_dropout_mask_of_its_own():
    def signed(model, b):
        return jnp.sum(model(jnp.ones((1, 8))) * b["sign"]), 1.0  # zero over both microbatches if the masks are equal

    _, (row,) = run(signed, start(make(rate=0.5)), [{"sign": np.array([1.0, -1.0])}], num_microbatches=2)
    assert row["loss"] != 0


def test_a_scanned_stack_has_the_same_streams_as_the_list_of_its_layers():
    rngs, keys = nnx.Rngs(0), jax.random.split(jax.random.key(0), 3)
    listed = nnx.List([nnx.Dropout(0.5, rngs=rngs) for _ in range(3)])
    stacked = nnx.vmap(lambda key: nnx.Dropout(0.5, rngs=nnx.Rngs(key)))(keys)

    def streams(layers):
        found = dict(named_leaves(reseed(nnx.state(nnx.Dict(layers=layers)), (1, 2, 3), ["layers"])))
        return {path: jax.random.key_data(x).tolist() for path, x in found.items() if path.endswith("key")}

    of_list = [streams(listed)[f"layers/{i}/rngs/key"] for i in range(3)]
    assert of_list == streams(stacked)["layers/rngs/key"]
    assert len(set(map(tuple, of_list))) == 3


def test_layers_default_to_the_table_of_the_model_and_an_argument_overrides_them():
    @partitioned([(".*", ())], layers="layers")
    class Drops(nnx.Module):
        def __init__(self):
            keys = jax.random.split(jax.random.key(0), 3)
            self.layers = nnx.vmap(lambda key: nnx.Dropout(0.5, rngs=nnx.Rngs(key)))(keys)
            self.scale = nnx.Param(jnp.ones(()))

        def __call__(self, x):
            return nnx.vmap(lambda drop: drop(x))(self.layers) * self.scale

    create = lambda: (model := Drops(), nnx.Optimizer(model, optax.sgd(0.0), wrt=nnx.Param))  # noqa: E731
    mask = lambda model, b: (  # noqa: E731
        *(model.scale[...], 1.0),
        {"mask": jnp.sum(model(jnp.ones(64)) * 2.0 ** jnp.arange(3)[:, None])},
    )
    state = layout(create)

    def program(**kinds):
        jaxpr = make_train_step(mask, state, **kinds).trace(state, batch()).jaxpr
        return str(jaxpr), [np.asarray(x).tolist() for x in jaxpr.consts]  # the numbers of the streams

    assert program() == program(layers="layers") == program(layers=["layers"])
    assert program() != program(layers=())


def test_a_scalar_loss_has_weight_one_per_microbatch():
    scalar = lambda model, b: jnp.mean((model(b["x"]) - 1.0) ** 2)  # noqa: E731
    full = run(scalar, start(make()), [batch()])[1][0]
    split = run(scalar, start(make()), [batch()], num_microbatches=4)[1][0]
    np.testing.assert_allclose(full["loss"], split["loss"], rtol=1e-6)
    np.testing.assert_allclose(full["grad_norm"], split["grad_norm"], rtol=1e-5)
    with pytest.raises(ValueError, match=r"16 rows is not divisible by 3 \(num_microbatches=3\)"):
        run(scalar, start(make()), [batch()], num_microbatches=3)


def test_frozen_parameters_do_not_change():
    def create():
        model = Net(nnx.Rngs(0))
        only_first = nnx.All(nnx.Param, nnx.PathContains(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-2, weight_decay=0.1), wrt=only_first)

    state, _ = run(weighted_loss, start(create), [batch()] * 2)
    before, after = ([layer.kernel[...] for layer in s.merge()[0].layers] for s in (start(create), state))
    assert [np.array_equal(a, b) for a, b in zip(before, after, strict=True)] == [False, True]


def test_a_model_without_variables_has_a_layout_and_a_step():
    class Doubled(nnx.Module):
        def __call__(self, x):
            return 2 * x

    create = lambda: (model := Doubled(), nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param))  # noqa: E731
    mesh, loss_fn = create_mesh((8,), ("fsdp",)), lambda model, b: model(b["x"]).sum()
    explain_sharding(create, mesh, rules="fsdp")
    cases: list[dict[str, Any]] = [{"shard_optimizer_over": "fsdp"}, {"optimizer_memory": "pinned_host"}]
    for options in cases:
        state = abstract_train_state(create, abstract_state(create, mesh, "fsdp", **options))
    _, metrics = jax.eval_shape(make_train_step(loss_fn, state)._jitted, state, {"x": np.ones((8, 2), np.float32)})
    assert metrics["grad_norm"].shape == ()


@pytest.mark.slow
def test_the_state_is_donated_and_nothing_recompiles(compilations):
    state = start(make(rate=0.5, norm=True))
    step = make_train_step(weighted_loss, state, num_microbatches=2)
    old = state.leaves
    state, _ = step(state, batch())
    assert all(x.is_deleted() for x in old if x.size > 1)
    compilations.clear()
    for i in range(4):
        state, _ = step(state, batch(seed=i))
    assert not compilations
    step(state, batch(rows=32))
    assert compilations  # the fixture does count compilations


def test_evaluation_has_no_dropout_and_does_not_change_the_state():
    state = start(make(rate=0.9, norm=True))
    evaluate = make_eval_step(weighted_loss, state)
    a, b = evaluate(state, batch()), evaluate(state, batch())
    assert a["loss"] == b["loss"] and a["weight"] == batch()["w"].sum()
    model, _ = state.merge()
    model.eval()
    np.testing.assert_allclose(a["loss"], weighted_loss(model, batch())[0], rtol=1e-6)


def scaled_loss(model, batch):
    error = jnp.mean((model(batch["x"]) - 1.0) ** 2, axis=-1)
    return jnp.sum(error * batch["w"]), jnp.float32(error.size)


def loss_with_a_pole(model, batch):
    """The loss is finite; its gradient is not, if a weight is above 1: the slope of the root at 0 is infinite."""
    total, weight = scaled_loss(model, batch)
    return total + jnp.sqrt(jnp.where(jnp.max(batch["w"]) > 1, 0.0 * total, 1.0)), weight


BAD_STEPS = {
    "a NaN loss": (scaled_loss, np.nan, ()),
    "an infinite loss": (scaled_loss, np.inf, ()),
    "a gradient that is not finite": (loss_with_a_pole, 2, ()),
    "a loss above its limit": (scaled_loss, 9, (5.0, 1e9)),
    "a gradient norm above its limit": (scaled_loss, 9, (1e9, 5.0)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("loss_fn", "weight", "limits"), BAD_STEPS.values(), ids=BAD_STEPS)
def test_a_skipped_step_changes_no_leaf_and_the_next_equals_the_first(loss_fn, weight, limits):
    """Statistics of the forward pass and all counts are compared too; dropout masks depend on the count."""
    good, bad = (batch(live=np.full(16, live, np.float32)) for live in (1, weight))
    make_noisy = make(norm=True, rate=0.3)
    step = make_train_step(loss_fn, start(make_noisy), num_microbatches=2, skip_nonfinite=True)
    state = start(make_noisy)
    before = [np.asarray(x) for x in as_numbers(state)]
    state, metrics = step(state, bad, *[limits] * bool(limits))
    assert float(metrics["skipped"]) == 1
    if not limits:
        assert np.isfinite(metrics["loss"]) == (loss_fn is loss_with_a_pole)
        assert not (np.isfinite(metrics["loss"]) and np.isfinite(metrics["grad_norm"]))
    assert [x.tobytes() for x in before] == [np.asarray(x).tobytes() for x in as_numbers(state)]
    state, metrics = step(state, good, *[limits] * bool(limits))
    want, wanted = make_train_step(loss_fn, state, num_microbatches=2)(start(make_noisy), good)
    assert float(metrics.pop("skipped")) == 0
    for old, new in zip(as_numbers(want), as_numbers(state), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-6, atol=1e-7)
    assert metrics.keys() == wanted.keys()
    assert float(metrics["loss"]) == pytest.approx(float(wanted["loss"]), rel=1e-6)


def as_numbers(state):
    """The leaves of a state, with random keys as numbers."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [jax.random.key_data(x) if is_key(x) else x for x in state.leaves]


def test_by_default_a_step_that_is_not_finite_is_applied():
    state = start(make())
    state, metrics = make_train_step(scaled_loss, state)(state, batch(live=np.full(16, np.nan, np.float32)))
    assert "skipped" not in metrics and any(np.isnan(x).any() for x in as_numbers(state))
    named = lambda model, b: (*scaled_loss(model, b), {"skipped": 1.0})  # noqa: E731
    with pytest.raises(ValueError, match=r"metrics of loss_fn must not be named skipped"):
        run(named, start(make()), [batch()], skip_nonfinite=True)


def test_limits_that_change_compile_nothing(compilations):
    state = start(make())
    step = make_train_step(scaled_loss, state, skip_nonfinite=True)
    state, _ = step(state, batch(), (np.float32(1e9), np.float32(1e9)))
    compilations.clear()
    state, metrics = step(state, batch(), (np.float32(1e8), np.float32(0)))
    assert float(metrics["skipped"]) == 1 and not compilations


# --- callbacks that raise an exception: no device may wait for the one that ran the callback ---


class Host:
    """The functions that callbacks of the losses below call: they count their calls, and raise an error if `fails`."""

    def __init__(self, fails: bool | str = False):
        self.calls, self.fails = 0, fails

    def double(self, x):
        self.calls += 1
        return (np.ones(3, np.float32) if self.fails == "shape" else 2 * np.asarray(x)) / self.divisor()

    def divisor(self):
        if self.fails is True:
            raise KeyError("no such metric")
        return np.float32(1)

    def note(self, *values):
        self.calls += 1
        self.divisor()


def printing(host, model, x):
    jax.debug.callback(host.note, x)
    jax.debug.print("mean {}", x.mean())
    return model(x)


def nested(host, model, x):
    def body(x, _):
        jax.debug.callback(host.note, x.sum())
        return jax.lax.cond(x.sum() < 1e9, lambda x: pure(host, model, x), jnp.tanh, x), None

    return jax.lax.scan(jax.remat(body), model(x), length=2)[0]


def pure(host, model, x):
    return jax.lax.stop_gradient(jax.pure_callback(host.double, jax.typeof(x), jax.lax.stop_gradient(x))) + x


def beside_the_model(host, model, x):
    return pure(host, model, model(x))


def in_a_rule(host, model, x):
    """Only the rules of the gradient contain callbacks."""
    same = jax.custom_vjp(lambda x: x)
    same.defvjp(lambda x: (x, None), lambda _, g: (jax.pure_callback(host.double, jax.typeof(g), g),))
    return same(model(x))


def read(host, model, x):
    return model(io_callback(host.double, jax.typeof(x), x))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "parts", "axis_type"),
    [
        (printing, 2, AxisType.Auto),
        (printing, 1, AxisType.Explicit),
        (beside_the_model, 1, AxisType.Auto),
        (nested, 1, AxisType.Explicit),
        (in_a_rule, 2, AxisType.Auto),
        (read, 1, AxisType.Auto),
    ],
)
def test_a_step_with_callbacks_computes_what_jax_computes(call, parts, axis_type):
    host = Host()
    loss_fn = lambda model, b: jnp.mean(call(host, model, b["x"]) ** 2)  # noqa: E731
    mesh = create_mesh((8,), ("fsdp",), axis_types=(axis_type,))
    state = start(make(), mesh)
    step, copy, b = make_train_step(loss_fn, state, num_microbatches=parts), jax.tree.map(jnp.copy, state), batch()
    placed = put_batch(b, mesh, state.definition.axes)
    expected = jax.block_until_ready(step.lower(copy, placed).compile()(copy, placed))
    calls, host.calls = host.calls, 0
    found = jax.block_until_ready(step(state, b))
    assert host.calls == calls == parts or call is not printing  # JAX may call a pure callback any number of times
    assert found[1] == expected[1]
    jax.tree.map(np.testing.assert_array_equal, as_numbers(found[0]), as_numbers(expected[0]))


@pytest.mark.sampled
@pytest.mark.parametrize("call", [nested, printing, beside_the_model, in_a_rule, read])
def test_the_next_call_raises_the_exception_of_a_callback_on_8_devices(call):
    host = Host()
    loss_fn = lambda model, b: jnp.mean(call(host, model, b["x"]) ** 2)  # noqa: E731
    state = start(make(), create_mesh((8,), ("fsdp",)))
    step, host.fails = make_train_step(loss_fn, state), True
    state, _ = jax.block_until_ready(step(state, batch()))
    line = Host.divisor.__code__.co_firstlineno + 2
    place = re.escape(f"{__file__}, line {line}: KeyError: 'no such metric'")
    with pytest.raises(ConfigError, match=f"^a callback of the step: {place}$"):
        step(state, batch())
    host.fails = False
    state, _ = jax.block_until_ready(step(state, batch()))  # it is raised once, and the state was not donated
    step(state, batch())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("callback", "problem"),
    [
        (Host("shape").double, r"\): it must return float32\[16, 8\], but it returned float32\[3\]"),
        (np.linalg.cholesky, r"\): Last 2 dimensions of the array must be square"),
        (lambda x: sys.exit("the data is wrong"), "SystemExit: the data is wrong"),
    ],
)
def test_wrong_results_of_a_callback_are_raised_by_the_next_evaluation(callback, problem):
    def loss_fn(model, b):
        return jnp.mean(model(b["x"]) ** 2) + jnp.sum(jax.pure_callback(callback, jax.typeof(b["x"]), b["x"]))

    state = start(make(), create_mesh((8,), ("fsdp",)))
    evaluate = make_eval_step(loss_fn, state)
    jax.block_until_ready(evaluate(state, batch()))
    with pytest.raises(ConfigError, match=f"^a callback of the step: .*{problem}$"):
        evaluate(state, batch())


def test_a_step_without_callbacks_is_traced_once():
    traced = []

    def loss_fn(model, b):
        traced.append(b)
        return jnp.mean(model(b["x"]) ** 2)

    run(loss_fn, start(make()), [batch()] * 2)
    assert len(traced) == 1
