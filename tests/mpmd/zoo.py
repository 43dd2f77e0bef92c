"""Models in many people's NNX styles that a pipeline cut must handle: one case each, collected from the zoo's files."""

import pytest

from tests.mpmd import zoo_calls, zoo_params, zoo_text, zoo_vision
from tests.mpmd.zoo_base import Case

CASES: list[Case] = [*zoo_calls.CASES, *zoo_text.CASES, *zoo_vision.CASES, *zoo_params.CASES]
BY_NAME = {case.name: case for case in CASES}

# What the default suite runs: every mechanism of the cut once. All others are marked slow.
SAMPLE = (
    "residual",
    "reversed",
    "listed_twice",
    "dicts",
    "remat_model",
    "checkpointed_groups",
    "scanned_noisy",
    "linen_layers",
    "caching_decoder",
    "encoder_decoder",
    "experts",
    "one_random_stream",
    "conv_batch_norm",
    "vision_transformer",
    "shared_gate",
    "unused_parameters",
    "lora",
    "averages",
)

PARAMETERS = [pytest.param(c, id=c.name, marks=() if c.name in SAMPLE else pytest.mark.slow) for c in CASES]
