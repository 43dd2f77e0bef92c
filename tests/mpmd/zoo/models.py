"""Models in many people's NNX styles that a pipeline cut must handle: one case each, collected from the zoo's files."""

import pytest

from tests.mpmd.zoo import calls, params, text, vision
from tests.mpmd.zoo.base import Case

CASES: list[Case] = [*calls.CASES, *text.CASES, *vision.CASES, *params.CASES]
BY_NAME = {case.name: case for case in CASES}

# What the default suite compiles. All others are marked slow; that all are cut is tested in any case.
SAMPLE = ("shared_gate", "unused_parameters")

PARAMETERS = [pytest.param(c, id=c.name, marks=() if c.name in SAMPLE else pytest.mark.slow) for c in CASES]
