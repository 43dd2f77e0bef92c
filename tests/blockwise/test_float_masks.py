"""Masks that are made as numbers before all layers: kernels that compute them, and data with which they do not."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from flax_mesh import jax_compat
from flax_mesh.blockwise import guard
from tests.blockwise.attentions import LENGTH, assert_near, cast, distance, mesh_of, operands
from tests.blockwise.compare import apart, difference, gradients, largest_square, rewritten, with_kernel
from tests.blockwise.programs import by_hand

MIN = np.finfo(np.float32).min
# 1 for the keys that a row has. Only the first are right for cuDNN; "none" and "left" have queries without a key.
DATA = {
    "right": np.arange(LENGTH) < np.asarray([[77], [128]]),
    "left": np.arange(LENGTH) >= np.asarray([[30], [0]]),
    "none": np.arange(LENGTH) < np.asarray([[0], [100]]),
    "holes": np.arange(LENGTH) % np.asarray([[3], [50]]) < 2,
}
DATA = {name: x.astype(np.int32) for name, x in DATA.items()} | {"two": 2 * DATA["right"].astype(np.int32)}


def causal():
    return jnp.tril(jnp.ones((LENGTH, LENGTH)))


def layers(q, k, v, mask, count=2):
    """Each adds the same mask."""
    for _ in range(count):
        q = q + by_hand(q, k, v, lambda s: s + mask)
    return q


def positions_only(q, k, v, keep):
    return layers(q, k, v, (1.0 - causal()) * -1e9)


def of_keys(q, k, v, keep):
    return layers(q, k, v, (1.0 - keep[:, None, None].astype(jnp.float32)) * -1e9)


def of_booleans(q, k, v, keep):
    mask = nnx.make_causal_mask(keep, dtype=bool) & (keep > 0)[:, None, None]
    return layers(q, k, v, jnp.where(mask, jnp.float32(0), MIN))


def multiplied(q, k, v, keep):
    return layers(q, k, v, (1.0 - causal() * keep[:, None, None]) * -1e9)


def two_masks(q, k, v, keep):
    mask = (1.0 - keep[:, None, None].astype(jnp.float32)) * MIN
    return by_hand(q, k, v, lambda s: jnp.where(causal()[None, None] > 0, s, -1e9) + mask)


def torch_style(q, k, v, keep):
    hidden = ~(keep > 0)
    return by_hand(q, k, v, lambda s: jnp.where(hidden[:, None, None], MIN, s))


def in_a_carry(q, k, v, keep):
    """The mask is a variable of the loop."""

    def layer(carry, _):
        q, mask = carry
        return (layers(q, k, v, mask, 1), mask), None

    mask = jnp.where(causal() * keep[:, None, None] > 0, jnp.zeros((), q.dtype), -1e9)
    return jax.lax.scan(jax.checkpoint(layer), (q, mask), None, length=2)[0][0]


NUMBERS, KEYS, ORDER = guard.TEXTS.values()
# name -> (function, the mask in the line, what a kernel needs of the data)
CASES = {
    "positions": (positions_only, "causal", ()),
    "keys": (of_keys, "every key, keys by a mask", (NUMBERS, KEYS)),
    "booleans": (of_booleans, "causal, keys by a mask", (KEYS,)),
    "multiplied": (multiplied, "causal, keys by a mask", (NUMBERS, KEYS)),
    "two masks": (two_masks, "causal, keys by a mask", (NUMBERS, KEYS)),
    "torch": (torch_style, "every key, keys by a mask", ()),
    "carry": (in_a_carry, "causal, keys by a mask", (NUMBERS, KEYS)),
}
PAIRS = [(name, data) for name in CASES for data in DATA if name != "positions" or data == "right"]
FAST = {("two masks", "none")}


def given(name, dtype=jnp.float32):
    return (*cast(operands(), dtype), DATA[name])


@pytest.mark.parametrize("name", CASES)
def test_the_line_has_the_mask_and_what_the_kernel_needs_of_the_data(name):
    fn, seen, needs = CASES[name]
    for kernel, more in (("splash", ()), ("cudnn", (ORDER,) * bool(seen != "causal"))):
        if (kernel, name) == ("cudnn", "carry"):  # of float32
            continue
        narrow = kernel == "cudnn"
        cut = lambda *x: fn(*x).astype(x[0].dtype)  # noqa: E731
        line = rewritten(cut, given("right", jnp.bfloat16 if narrow else jnp.float32), kernel).lines[0]
        text, _, found = line.partition("; in blocks if ")
        assert f", {seen}, probabilities in" in text and found == " or ".join([*needs, *more])


@pytest.mark.parametrize(
    ("name", "data"), [x if x in FAST else pytest.param(*x, marks=pytest.mark.slow) for x in PAIRS]
)
def test_values_and_gradients_are_those_of_the_program_as_written_for_any_data(name, data):
    fn = CASES[name][0]
    assert difference(fn, with_kernel(fn, "splash"), given(data)) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize(("name", "data"), [("keys", "right"), ("keys", "left"), ("multiplied", "right")])
def test_with_the_function_of_cudnn_they_are_as_near_to_float64(name, data):
    fn = CASES[name][0]
    assert_near(fn, with_kernel(fn, "cudnn"), given(data, jnp.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("data", ["none", "two"])
def test_without_the_check_of_the_data_results_are_others(data, monkeypatch):
    monkeypatch.setattr(guard.Fused, "_guards", lambda _: ())
    fn = CASES["keys"][0]
    assert difference(fn, with_kernel(fn, "splash"), given(data)) > 0.1


def grows(low):
    see = (distance(causal()) >= 0) & (distance(causal()) <= 20 + (jnp.arange(LENGTH) > 64))
    return jnp.where(see, 0.0, low)


OTHERS = {
    "one element more": (
        lambda x: (1.0 - causal().at[70, 101].set(1)) * -1e9,
        None,
        "its mask is neither causal nor a window",
    ),
    "one element less": (
        lambda x: (1.0 - causal().at[101, 70].set(0)) * -1e9,
        None,
        "its mask is neither causal nor a window",
    ),
    "a window that grows": (lambda x: grows(-1e9), None, "its mask is neither causal nor a window"),
    "a number that is not low": (lambda x: (1.0 - causal()) * -1.0, None, "numbers are added to its scores"),
    "padding that is not low": (lambda x: (1.0 - x) * -1.0, DATA["right"], "its mask depends on data other than"),
    "a number for each key": (
        lambda x: (1.0 - x) * -1e9 - jnp.arange(1.0, LENGTH + 1),
        DATA["right"],
        "an array is added, which may need a gradient",
    ),
    "a number for each head": (
        lambda x: (1.0 - x) * -1e9 + jnp.asarray([0, 0.1])[:, None, None],
        DATA["right"],
        "an array is added, which may need a gradient",
    ),
    "a gradient": (
        lambda x: (1.0 - x) * -1e9,
        DATA["right"].astype(np.float32),
        "an array is added, which may need a gradient",
    ),
    "a mask of queries": (
        lambda x: (1.0 - jnp.swapaxes(x, 2, 3)) * -1e9,
        DATA["right"],
        "a padded query has weights of its scores: replace hidden scores by one number",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_numbers_are_no_kernel_and_the_line_has_the_reason(name):
    make, x, reason = OTHERS[name]
    fn = lambda q, k, v, x: layers(q, k, v, make(x if x is None else x[:, None, None]))  # noqa: E731
    (line,) = rewritten(fn, (*operands(), x), "splash").lines
    assert re.search(rf" blocks(?: by data)?; no kernel: {reason}", line)


# Without devices


def test_the_program_for_gpus_has_calls_of_cudnn_and_blocks():
    with jax.sharding.use_abstract_mesh(mesh_of("gpu", dp=1)), jax_compat.kernels_without_devices():
        fused = with_kernel(two_masks, "cudnn", platform="gpu")
        loss = lambda *x: fused(*x).astype(jnp.float32).sum()  # noqa: E731
        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*given("right", jnp.bfloat16))
    text = jax_compat.lower_without_devices(traced, "cuda").as_text()
    found = re.findall(rf'@{jax_compat.ATTENTION}.*backend_config = "([^"]*)"', text)
    assert found == [f"{x} MaskType.PADDING_CAUSAL 0" for x in ("forward", "backward")]
    assert largest_square(traced.jaxpr, LENGTH) == 0


def test_the_program_for_tpus_has_splash_attention():
    with jax.sharding.use_abstract_mesh(mesh_of("tpu", dp=2)), jax_compat.kernels_without_devices():
        fused = with_kernel(two_masks, "splash", platform="tpu")
        traced = jax.jit(jax.grad(lambda *x: fused(*x).sum(), (0, 1, 2))).trace(*given("right"))
    assert jax_compat.lower_without_devices(traced, "tpu").as_text().count(jax_compat.KERNEL) == 3


# On devices


@pytest.mark.slow
@pytest.mark.parametrize("data", ["right", "none"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh_one_check_decides_for_all_devices(kind, data):
    mesh = jax.make_mesh((2, 2), ("dp", "sp"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    args, rows = given(data), PartitionSpec("dp")
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(args, (PartitionSpec("dp", "sp"), rows, rows, rows), strict=True)
    ]
    with jax.set_mesh(mesh):
        found = gradients(with_kernel(two_masks, "splash"), placed)[0]
    assert apart(found, gradients(two_masks, args)[0]) < 2e-6
