"""Models in many people's NNX styles that a pipeline cut must handle: one case each, collected from the zoo's files."""

import pytest

from tests.mpmd import zoo_calls, zoo_params, zoo_text, zoo_vision
from tests.mpmd.zoo_base import Case

CASES: list[Case] = [*zoo_calls.CASES, *zoo_text.CASES, *zoo_vision.CASES, *zoo_params.CASES]
BY_NAME = {case.name: case for case in CASES}

# What the default suite compiles. All others are marked slow; that all are cut is tested in any case.
SAMPLE = ("shared_gate", "unused_parameters")

PARAMETERS = [pytest.param(c, id=c.name, marks=() if c.name in SAMPLE else pytest.mark.slow) for c in CASES]
