"""Greedy continuations of imported models equal the continuations from transformers."""

import math

import jax
import numpy as np
import pytest

from flax_mesh import create_mesh
from flax_mesh.models import generate, load_decoder
from tests.checkpoint.hf.make_reference import CASES, DATA, GENERATED, PROMPT

pytestmark = pytest.mark.usefixtures("quick_compilation")
REPEATING = ("gemma2", "granite")  # texts of few tokens, whatever the weights


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (1, 2, 1, 2, 1)])
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_that_transformers_generated(case, shape):
    with np.load(DATA / case / "generated.npz") as stored:
        prompt, expected, margin = stored["prompt"].tolist(), stored["tokens"].tolist(), stored["margin"]
    assert len(prompt) == PROMPT and len(expected) == GENERATED
    assert case in REPEATING or len(set(expected)) > 4
    assert margin > 5e-4  # rounding does not change a token
    mesh = create_mesh(shape, devices=jax.devices()[: math.prod(shape)])
    model, _ = load_decoder(DATA / case, mesh, dtype="float32")
    (found,) = generate(model, [prompt], max_tokens=len(expected))
    assert found.tokens.tolist() == expected
