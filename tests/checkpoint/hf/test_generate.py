"""Greedy continuations of imported models equal the continuations from transformers."""

import jax
import numpy as np
import pytest

from flax_mesh import create_mesh
from flax_mesh.models import generate, load_decoder
from tests.checkpoint.hf.make_reference import CASES, DATA, GENERATED, PROMPT, write_generated, write_reference

pytestmark = pytest.mark.usefixtures("quick_compilation")
REPEATING = ("gemma2", "granite")  # texts of few tokens, whatever the weights
# The rotary factors of longrope follow from the slots of the cache here, and in transformers from the text so far.
LIKE_TRANSFORMERS = [case for case in CASES if case != "phi3"]
ONE, MESH = (1, 1, 1, 1, 1), (1, 2, 1, 2, 1)


def check(folder, shape=ONE, varied=True):
    """Compare with generated.npz in the folder."""
    with np.load(folder / "generated.npz") as stored:
        prompt, expected, margin = stored["prompt"].tolist(), stored["tokens"].tolist(), stored["margin"]
    assert len(prompt) == PROMPT and len(expected) == GENERATED
    assert varied <= (len(set(expected)) > 4)
    assert margin > 5e-4  # rounding does not change a token
    mesh = create_mesh(shape, devices=jax.devices()[: int(np.prod(shape))])
    model, _ = load_decoder(folder, mesh, dtype="float32")
    (found,) = generate(model, [prompt], max_tokens=len(expected))
    assert found.tokens.tolist() == expected


@pytest.mark.slow
@pytest.mark.parametrize("shape", [ONE, MESH])
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_that_transformers_generated(case, shape):
    check(DATA / case, shape, varied=case not in REPEATING)


@pytest.mark.parametrize("seed", [10, 14])  # without near ties, whatever the case
@pytest.mark.parametrize("case", LIKE_TRANSFORMERS)
def test_greedy_tokens_of_new_weights_equal_transformers(case, seed, tmp_path):
    pytest.importorskip("torch", reason="comes with the extra hf")
    pytest.importorskip("transformers", reason="comes with the extra hf")
    write_reference(case, tmp_path, seed=seed)
    write_generated(tmp_path)
    check(tmp_path, varied=case not in REPEATING)
