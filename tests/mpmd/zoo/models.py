"""All cases of the zoo: models in various NNX styles that split_stages must support."""

import pytest

from tests.mpmd.zoo import calls, params, text, variables, vision
from tests.mpmd.zoo.base import Case

CASES: list[Case] = [*calls.CASES, *text.CASES, *vision.CASES, *params.CASES, *variables.CASES]
BY_NAME = {case.name: case for case in CASES}

# Cases that the default suite compiles. All others are marked slow. The default suite splits all cases.
SAMPLE = ("shared_gate", "unused_parameters", "decaying_memory", "counter")

PARAMETERS = [pytest.param(c, id=c.name, marks=() if c.name in SAMPLE else pytest.mark.slow) for c in CASES]
