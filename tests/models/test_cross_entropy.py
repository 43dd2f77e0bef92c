"""The chunked cross-entropy equals the plain one; its residuals, products and collectives."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_mesh import PartitionAxis, create_mesh
from flax_mesh.models import make_decoder, next_token_loss
from flax_mesh.models.cross_entropy import cross_entropy, token_losses
from flax_mesh.models.ops.matmul import dot_float32
from tests.models.reference import SMALL, small
from tests.mpmd.runtime.pipelines import build, decoder_batch, groups

pytestmark = pytest.mark.usefixtures("quick_compilation")

AXES = PartitionAxis(hidden_state_axis=None)
LAST = (((2,), (0,)), ((), ()))


def example(batch=4, seq=12, hidden=16, vocab=64, dtype="float32"):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((batch, seq, hidden), (hidden, vocab)))
    return x, w, jnp.asarray(rng.integers(-1, vocab, (batch, seq)), jnp.int32)


def with_gradients(chunk):
    return jax.jit(jax.value_and_grad(lambda *args: cross_entropy(*args, axes=AXES, chunk=chunk), (0, 1)))


def assert_close(have, want, rtol):
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max())


@pytest.mark.sampled
@pytest.mark.parametrize("chunk", [7, 1, 16, 1000])
def test_chunks_of_any_size_have_equal_sum_and_gradients(chunk):
    """Also without gradients, scaled by a cotangent, and for tokens without target, which have none."""
    x, w, targets = example()
    loss, grads = with_gradients(0)(x, w, targets)
    assert_close(with_gradients(chunk)(x, w, targets), (loss, grads), 1e-6)
    doubled = jax.jit(lambda x: 2 * cross_entropy(x, w, targets, axes=AXES, chunk=chunk))
    assert_close((doubled(x), jax.jit(jax.grad(doubled))(x)), (2 * loss, 2 * grads[0]), 1e-6)
    loss, grads = with_gradients(chunk)(x, w, jnp.full_like(targets, -1))
    assert loss == 0 and all((g == 0).all() for g in grads)


@pytest.mark.sampled
@pytest.mark.parametrize("dims", [(2, 2, 1, 2, 1), (1, 1, 1, 4, 2), (1, 4, 1, 1, 2)], ids=str)
def test_on_a_mesh_results_are_equal_and_weight_gradients_are_reduced_once(dims):
    x, w, targets = example(vocab=80)  # 80, 40 or 20 per device: no other dim has that size
    mesh = create_mesh(dims)
    names = ("batch", "sequence", None), ("embed", "vocab"), ("batch", "sequence")
    shardings = [NamedSharding(mesh, AXES.resolve(each)) for each in names]
    args = [jax.device_put(x, sharding) for x, sharding in zip((x, w, targets), shardings, strict=True)]
    with jax.set_mesh(mesh):
        compiled = with_gradients(3).lower(*args).compile()
    assert_close(compiled(*args), with_gradients(0)(x, w, targets), 1e-6)
    computations = re.split(r"\n(?=%|ENTRY)", compiled.as_text() or "")
    loop = [c for c in computations if "dynamic-update-slice" in c and not c.startswith("ENTRY")]
    assert loop
    # Collectives in the loop: logsumexp, target logit and gradient of x over tp; none of the size of the weights.
    sent = [shape for c in loop for shape in re.findall(r"= (.*?) (?:all-\w+|reduce-scatter|collective-\w+)\(", c)]
    columns = w.shape[1] // mesh.shape["tp"]
    assert all(str(columns) not in re.findall(r"\d+", shape.split("{")[0]) for shape in sent), sent
    assert bool(sent) == (mesh.shape["tp"] > 1)


def test_rows_that_do_not_divide_over_the_mesh_are_not_split():
    x, w, targets = example(batch=3)
    with jax.set_mesh(create_mesh((2, 2, 1, 2, 1))):
        have = with_gradients(5)(x, w, targets)
    assert_close(have, with_gradients(0)(x, w, targets), 1e-6)


@pytest.mark.parametrize("chunk", [0, 5])
def test_a_target_outside_of_the_vocabulary_gives_nan_and_every_negative_one_is_ignored(chunk):
    x, w, targets = example()
    mesh = create_mesh((1, 2, 1, 4, 1))
    with jax.set_mesh(mesh):
        run, w = with_gradients(chunk), jax.device_put(w, NamedSharding(mesh, P(None, "tp")))
        found = {bad: run(x, w, targets.at[1, 3].set(bad)) for bad in (64, 2**31 - 1, -1, -100, -(2**31))}
    for bad, (loss, grads) in found.items():
        assert jnp.isnan(loss) == (bad >= 64) == jnp.isnan(grads[0][1, 3]).all()
        assert bad >= 64 or float(loss) == float(found[-1][0]) != 0


def by_jax(x, w, targets, cap):
    """Losses by `jax.nn.log_softmax`."""
    logits = cap * jnp.tanh(x @ w / cap)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(targets, 0)[..., None], axis=-1)
    return -jnp.where(targets >= 0, chosen[..., 0], 0)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("chunk", "dims"), [(5, (2, 2, 1, 2, 1)), (5, None), (0, None), (5, (1, 4, 1, 1, 2)), (0, (1, 1, 1, 4, 2))], ids=str
)
def test_losses_of_tokens_and_their_gradients_equal_jax(chunk, dims):
    """Each token has another cotangent; some have 0, and some no target."""
    x, w, targets = example()
    g = jnp.asarray(np.random.default_rng(1).normal(size=targets.shape), jnp.float32).at[0].set(0)

    def run(losses_of, *args):
        def total(x, w):
            losses = losses_of(x, w, targets)
            return jnp.sum(g * losses), losses

        return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(*args)

    want = run(lambda x, w, targets: by_jax(x, w, targets, 3.0), x, w)
    with jax.set_mesh(create_mesh(dims) if dims else create_mesh((1, 1, 1, 1, 1), devices=jax.devices()[:1])):
        have = run(lambda *args: token_losses(*args, axes=AXES, chunk=chunk, cap=3.0), x, w)
    assert_close(jax.device_get(have), want, 2e-6)


def test_chunks_use_a_fraction_of_the_memory():
    args = example(batch=4, seq=256, hidden=8, vocab=2048)
    logits = 4 * 256 * 2048 * 4
    found: Any = {c: with_gradients(c).lower(*args).compile().memory_analysis() for c in (0, 64)}
    temp = {c: memory.temp_size_in_bytes for c, memory in found.items()}
    assert temp[0] >= logits and temp[64] < logits / 4, temp


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "change"),
    [("zb-h1", {"fsdp": 2, "tp": 2}, {"tied": False}), ("1f1b", {"ep": 2}, {"num_experts": 4, "scan": True})],
)
def test_a_pipelined_decoder_saves_no_logits_with_chunks(name, sizes, change):
    losses, saved = [], []
    for chunk in (0, 6):
        config, shapes = dataclasses.replace(SMALL, loss_chunk=chunk, **change), set()
        make = lambda config=config: make_decoder(config, nnx.Rngs(0))  # noqa: E731
        layout: dict[str, Any] = {"name": name, "mesh": groups(pp=2, **sizes), "rules": [(".*", ())], "axes": AXES}
        pipeline = build(make, next_token_loss, decoder_batch(8), 4, optax.sgd(1.0), **layout)
        pipeline.on_action = lambda action, kept, shapes=shapes: shapes.update(map(np.shape, jax.tree.leaves(kept)))
        _, metrics = pipeline.step(pipeline.init_state(), decoder_batch(8))
        losses.append([metrics["loss"], metrics["grad_norm"]])
        saved.append((2, 16, 64) in shapes)  # the logits of a microbatch
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert saved == [True, False]


def test_half_precision_has_no_float32_products():
    tokens: Any = {"inputs": example(2)[2] % 64, "targets": example(2)[2]}
    for chunk in (0, 5):
        graphdef, state = nnx.split(small(dtype="bfloat16", loss_chunk=chunk))
        loss_of = lambda state, graphdef=graphdef: next_token_loss(nnx.merge(graphdef, state), tokens)[0]  # noqa: E731
        text = jax.jit(jax.grad(loss_of)).lower(state).as_text()
        operands = re.findall(r"stablehlo.dot_general.*?: \((.*?)\)", text)
        attention = [o for o in operands if re.search("x12x(2x)?12x", o)]  # the scores of XLA's attention
        assert len(operands) > 20 and attention
        assert not [o for o in operands if o not in attention and "f32" in o]


def test_half_precision_rounds_only_the_cotangent():
    x, w, _ = example(dtype="bfloat16")
    g = jnp.asarray(np.random.default_rng(1).normal(size=(4, 12, 64)), jnp.bfloat16).astype(jnp.float32)
    dot = lambda x, w: jax.lax.dot_general(x, w, LAST, preferred_element_type=jnp.float32)  # noqa: E731
    want, want_vjp = jax.vjp(dot, x, w)
    have, have_vjp = jax.vjp(lambda x, w: dot_float32(x, w, LAST), x, w)
    assert have.dtype == jnp.float32
    np.testing.assert_array_equal(have, want)
    assert_close(have_vjp(g), want_vjp(g), 4e-3)  # one unit in the last place of bf16, due to the order of sums
    x, w, _ = example()
    assert jax.jvp(lambda x: dot_float32(x, w, LAST), (x,), (x,))[1].shape == (4, 12, 64)
