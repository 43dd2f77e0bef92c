"""Gated delta nets: the chunked form against the recurrence, documents, parts, meshes, and refusals."""

import math
import re
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from flax_mesh.models import DecoderConfig, make_decoder
from flax_mesh.models.delta import DeltaNet
from flax_mesh.models.ops.delta import CHUNK, Tokens, delta_step, gated_delta, runs_of
from flax_mesh.tree import named_leaves
from tests.models.reference import make_mesh, with_random_parameters

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


def tokens_of(length: int) -> Tokens:
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((2, length, 3, 8)) for _ in range(2))
    v, g = rng.standard_normal((2, length, 3, 4)), -rng.exponential(0.3, (2, length, 3))
    k[:, 5:20] = k[:, 5:6]  # equal keys, whose system is the worst to invert
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    arrays: Any = (x.astype(np.float32) for x in (q, k, v, g, rng.uniform(0, 1, (2, length, 3))))
    return Tokens(*arrays)


def recurrence(tokens: Tokens, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Token by token in float64."""
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in tokens)
    state, y = np.zeros((2, 3, 8, 4)), []
    for i in range(q.shape[1]):
        is_first = i > 0 and ids[:, i] != ids[:, i - 1]
        state = np.where(np.reshape(is_first, (-1, 1, 1, 1)), 0, state) * np.exp(g[:, i])[..., None, None]
        change = beta[:, i, :, None] * (v[:, i] - np.einsum("bhc,bhcv->bhv", k[:, i], state))
        state = state + k[:, i, :, :, None] * change[:, :, None]
        y.append(np.einsum("bhc,bhcv->bhv", q[:, i], state))
    return np.stack(y, axis=1), state


@pytest.mark.parametrize(("length", "parts"), [(5, 1), (CHUNK + 36, 1), (CHUNK + 36, 4), (4 * CHUNK, 2)])
def test_chunks_equal_the_recurrence_in_float64(length, parts):
    tokens, rng = tokens_of(length), np.random.default_rng(1)
    chunked = jax.jit(lambda tokens, ids: gated_delta(tokens, runs_of(ids), parts=parts))
    documents = np.cumsum(rng.random((2, length)) < 0.1, axis=1) % 3
    for ids in (documents, np.zeros_like(documents)):
        want, state = recurrence(tokens, ids)
        y, after = chunked(tokens, ids)
        assert np.abs(y - want).max() < 3e-6 * np.abs(want).max()
        assert np.abs(after - state).max() < 3e-6 * np.abs(state).max()


def test_one_token_at_a_time_equals_chunks():
    tokens = tokens_of(30)
    y, state, step = np.zeros(()), np.zeros((2, 3, 8, 4), np.float32), jax.jit(delta_step)
    for i in range(30):
        y, state = step(Tokens(*(x[:, i : i + 1] for x in tokens)), state)
    want, after = jax.jit(gated_delta)(tokens)
    np.testing.assert_allclose(np.asarray(y)[:, 0], np.asarray(want)[:, -1], atol=1e-6)
    np.testing.assert_allclose(state, after, atol=1e-6)


def values(**sizes):
    """Outputs, and gradients, of a layer on a mesh."""
    with jax.set_mesh(make_mesh(**sizes)):
        model = with_random_parameters(lambda: DeltaNet(CONFIG, rngs=nnx.Rngs(0)))
        x = np.random.default_rng(0).standard_normal((4, 16, 16)).astype(np.float32)
        step = nnx.jit(nnx.value_and_grad(lambda model, x: (model(x) ** 2).sum())).lower(model, x).compile()
        loss, gradients = step(model, x)
    return float(loss), {path: np.asarray(value) for path, value in named_leaves(gradients)}, step.as_text() or ""


def test_a_layer_is_equal_on_a_mesh_and_gathers_no_tokens_over_sp():
    loss, gradients, _ = values()
    found, of_mesh, text = values(fsdp=2, tp=2, sp=2)
    assert abs(found - loss) < 1e-5 * loss
    for path, want in gradients.items():
        assert np.abs(of_mesh[path] - want).max() < 2e-5 * np.abs(want).max(), path
    assert "collective-permute" in text
    gathered = re.findall(r"f32\[([\d,]+)\]\S* all-gather", text)
    assert all(math.prod(map(int, dims.split(","))) < 2 * 16 * 16 for dims in gathered), gathered


def test_documents_of_a_row_are_as_rows_and_stacks_equal_lists():
    draw, changes = np.random.default_rng(0), [replace(CONFIG, scan=scan) for scan in (False, True)]
    model, stack = (with_random_parameters(lambda c=c: make_decoder(c, nnx.Rngs(0))) for c in changes)
    for block in model.layers:  # which had equal parameters
        nnx.update(block, jax.tree.map(lambda x: 0.2 * draw.normal(size=x.shape).astype(np.float32), nnx.state(block)))
    nnx.update(stack.layers, jax.tree.map(lambda *x: np.stack(x), *(nnx.state(block) for block in model.layers)))
    tokens, ids = draw.integers(0, 32, (2, 20)).astype(np.int32), np.repeat([[1, 2], [2, 1]], [12, 8], axis=1)
    tokens[1, :8], ids[1, 8:] = tokens[0, 12:], 1  # a row that begins with the second document of the other
    run = nnx.jit(lambda model, tokens, ids: model(tokens, segment_ids=ids))
    whole, of_stack = (np.asarray(run(x, tokens, ids.astype(np.int32))) for x in (model, stack))
    # Logits of up to 3, whose rounding differs between CPUs.
    np.testing.assert_allclose(whole, of_stack, atol=1e-5)
    np.testing.assert_allclose(whole[0, 12:], whole[1, :8], atol=1e-4)


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
