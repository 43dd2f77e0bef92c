"""Gated delta nets: the chunked form against the recurrence, documents, parts, meshes, and refusals."""

import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_mesh import create_mesh
from flax_mesh.models import DecoderConfig, make_decoder
from flax_mesh.models.delta import DeltaNet
from flax_mesh.models.ops.delta import CHUNK, Tokens, delta_step, gated_delta, runs_of, unit
from flax_mesh.tree import named_leaves

pytestmark = pytest.mark.usefixtures("quick_compilation")
CONFIG = DecoderConfig(
    vocab_size=32,
    hidden_size=16,
    num_layers=4,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    mlp_size=24,
    layer_pattern="delta,global",
    attention_gate=True,
    delta_key_heads=2,
    delta_value_heads=4,
    delta_key_dim=8,
    delta_value_dim=4,
    delta_conv=3,
)


def tokens_of(length: int, seed: int = 0) -> Tokens:
    rng = np.random.default_rng(seed)
    q, k = (unit(jnp.asarray(rng.standard_normal((2, length, 3, 8)))) for _ in range(2))
    v, g = rng.standard_normal((2, length, 3, 4)), -rng.exponential(0.3, (2, length, 3))
    k = k.at[:, 5:20].set(k[:, 5:6])  # equal keys, whose system is the worst to invert
    return Tokens(q, k, *(jnp.asarray(x, jnp.float32) for x in (v, g, rng.uniform(0, 1, (2, length, 3)))))


def recurrence(tokens: Tokens, runs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Token by token in float64."""
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in tokens)
    state, y = np.zeros((2, 3, 8, 4)), []
    for i in range(q.shape[1]):
        is_first = i > 0 and runs[:, i] != runs[:, i - 1]
        state = np.where(np.reshape(is_first, (-1, 1, 1, 1)), 0, state) * np.exp(g[:, i])[..., None, None]
        change = beta[:, i, :, None] * (v[:, i] - np.einsum("bhc,bhcv->bhv", k[:, i], state))
        state = state + k[:, i, :, :, None] * change[:, :, None]
        y.append(np.einsum("bhc,bhcv->bhv", q[:, i], state))
    return np.stack(y, axis=1), state


@pytest.mark.parametrize(("length", "parts"), [(5, 1), (CHUNK + 36, 1), (CHUNK + 36, 4), (4 * CHUNK, 2)])
@pytest.mark.parametrize("packed", [False, True], ids=["row", "documents"])
def test_chunks_equal_the_recurrence_in_float64(length, parts, packed):
    tokens, rng = tokens_of(length), np.random.default_rng(1)
    ids = np.cumsum(rng.random((2, length)) < 0.1, axis=1) % 3 if packed else np.zeros((2, length), int)
    runs = np.asarray(runs_of(jnp.asarray(ids)))
    want, state = recurrence(tokens, runs)
    chunked = jax.jit(gated_delta, static_argnames="parts")
    y, after = chunked(tokens, jnp.asarray(runs) if packed else None, parts=parts)
    assert np.abs(y - want).max() < 3e-6 * np.abs(want).max()
    assert np.abs(after - state).max() < 3e-6 * np.abs(state).max()


def test_one_token_at_a_time_equals_chunks():
    tokens = tokens_of(30)
    y, state, step = jnp.zeros(()), jnp.zeros((2, 3, 8, 4)), jax.jit(delta_step)
    for i in range(30):
        y, state = step(Tokens(*(x[:, i : i + 1] for x in tokens)), state)
    want, after = jax.jit(gated_delta)(tokens)
    np.testing.assert_allclose(y[:, 0], want[:, -1], atol=1e-6)
    np.testing.assert_allclose(state, after, atol=1e-6)


def values(config, shape):
    """Outputs, and gradients, of a layer on a mesh."""
    mesh = create_mesh(shape, devices=jax.devices()[: int(np.prod(shape))])
    with jax.set_mesh(mesh):
        model = DeltaNet(config, rngs=nnx.Rngs(0))
        x = np.random.default_rng(0).standard_normal((4, 32, 16)).astype(np.float32)
        step = nnx.jit(nnx.value_and_grad(lambda model, x: (model(x) ** 2).sum()))
        text = step.lower(model, x).compile().as_text() or ""
        loss, gradients = step(model, x)
    return float(loss), {path: np.asarray(value) for path, value in named_leaves(gradients)}, text


def test_a_layer_is_equal_on_every_mesh_and_gathers_no_tokens_over_sp():
    loss, gradients, _ = values(CONFIG, (1, 1, 1, 1, 1))
    for shape in ((1, 2, 1, 2, 1), (1, 1, 1, 2, 2)):
        found, of_mesh, text = values(CONFIG, shape)
        assert abs(found - loss) < 1e-5 * loss
        for path, want in gradients.items():
            assert np.abs(of_mesh[path] - want).max() < 2e-5 * np.abs(want).max(), (shape, path)
        if shape[-1] > 1:
            assert "collective-permute" in text
            gathered = re.findall(r"f32\[([\d,]+)\]\S* all-gather", text)
            assert all(math.prod(map(int, dims.split(","))) < 4 * 32 * 16 for dims in gathered), gathered


def test_documents_of_a_row_are_as_rows_and_stacks_equal_lists():
    model, stack = (make_decoder(replace(CONFIG, scan=scan), nnx.Rngs(0)) for scan in (False, True))
    tokens = np.random.default_rng(0).integers(0, 32, (1, 20)).astype(np.int32)
    ids = np.repeat([[1, 2]], [12, 8], axis=1).astype(np.int32)
    run = nnx.jit(lambda model, tokens, ids: model(tokens, segment_ids=ids))
    whole, of_stack = run(model, tokens, ids), run(stack, tokens, ids)
    # Logits of up to 3, whose rounding differs between CPUs.
    np.testing.assert_allclose(whole, of_stack, atol=1e-5)
    np.testing.assert_allclose(whole[:, 12:], run(model, tokens[:, 12:], ids[:, 12:]), atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 3}, "must be a multiple of the 2 layers of model.layer_pattern=delta,global"),
        ({"layer_pattern": "delta"}, "must have layers with attention beside delta layers"),
        ({"layer_pattern": ""}, "model.delta_conv has no effect without delta layers"),
        ({"delta_conv": 0}, "model.delta_conv must be above 0 with delta layers"),
        ({"delta_value_heads": 3}, "must be a multiple of model.delta_key_heads=2"),
        ({"scan": True, "remat": "full:1,none"}, "runs must have a multiple of 2 layers"),
        ({"num_experts": 4, "router_balance": True}, "model.router_balance is not supported with delta layers"),
    ],
)
def test_settings_that_delta_layers_cannot_have_are_refused(change, message):
    config = replace(CONFIG, **change)
    assert any(message in str(problem) for problem in config.problems()), config.problems()
