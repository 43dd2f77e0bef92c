"""Predictions of the tokens after the next one, against numpy; test_switches.py has meshes and pipelines."""

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from flax_mesh.models import DecoderConfig, generate, next_token_loss
from flax_mesh.tree import named_leaves
from tests.models.reference import numpy_decoder, small, tokens_of

pytestmark = pytest.mark.usefixtures("quick_compilation")


def cross_entropy(logits, targets):
    """The sum over the targets that are not negative, in float64."""
    rows, positions = np.nonzero(targets >= 0)
    chosen = logits[rows, positions]
    return np.sum(np.log(np.sum(np.exp(chosen), axis=-1)) - chosen[np.arange(len(rows)), targets[rows, positions]])


@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_equals_numpy(tied):
    options = {"prediction_layers": 2, "prediction_loss": 0.5, "loss_chunk": 0 if tied else 5}
    model = small(num_layers=1, tied=tied, **options)
    tokens, targets = tokens_of(), np.random.default_rng(1).integers(-1, 64, (2, 12)).astype(np.int32)
    loss, weight, metrics = jax.jit(next_token_loss)(model, {"inputs": tokens, "targets": targets})
    each = np.moveaxis(numpy_decoder(model, tokens), 1, 0)
    want = [cross_entropy(logits[:, : 12 - k], targets[:, k:]) for k, logits in enumerate(each)]
    np.testing.assert_allclose(metrics["cross_entropy"], want[0], rtol=1e-5)
    np.testing.assert_allclose(metrics["prediction_loss"], (want[1] + want[2]) / 2, rtol=1e-5)
    np.testing.assert_allclose(loss, want[0] + 0.5 * (want[1] + want[2]) / 2, rtol=1e-5)
    assert weight == np.sum(targets >= 0)


def test_a_prediction_ends_with_its_document():
    model, tokens = small(num_layers=1, prediction_layers=1), tokens_of(1)
    targets = np.roll(tokens, -1, axis=1)
    targets[:, [4, 11]] = -1
    found = jax.jit(lambda model, batch: next_token_loss(model, batch)[2]["prediction_loss"])
    row = {"inputs": tokens, "targets": targets, "segment_ids": np.where(np.arange(12) < 5, 1, 2)[None]}
    packed, alone = ({key: np.full((2, 12), -(key == "targets"), np.int32) for key in row} for _ in range(2))
    for key, values in row.items():
        packed[key][0] = values
        alone[key][0, :5], alone[key][1, :7] = values[0, :5], values[0, 5:]
    np.testing.assert_allclose(found(model, packed), found(model, alone), rtol=1e-5)


def test_without_predictions_nothing_changes_and_generation_ignores_them():
    model, plain = small(num_layers=1, prediction_layers=1), small(num_layers=1)
    state = dict(named_leaves(nnx.state(model)))
    nnx.update(plain, nnx.state(model, lambda path, _: path[0] != "predictions"))
    assert {path for path in state if not path.startswith("predictions/")} == {*dict(named_leaves(nnx.state(plain)))}
    found, want = (generate(x, [[1, 2, 3]], max_tokens=4)[0] for x in (model, plain))
    assert found.tokens.tolist() == want.tokens.tolist() and found.log_probs.tolist() == want.log_probs.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prediction_layers": -1}, "prediction_layers must be at least 0"),
        ({"prediction_loss": 0.1}, "prediction_loss has no effect without model.prediction_layers"),
        (
            {"prediction_layers": 1, "layer_pattern": "local,global", "sliding_window": 4},
            "layer_pattern=local,global must be empty with model.prediction_layers=1",
        ),
    ],
)
def test_settings_of_predictions_are_checked(change: dict[str, Any], message):
    assert message in str(DecoderConfig(**change).problems())
