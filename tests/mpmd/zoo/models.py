"""All cases of the zoo: models in various NNX styles that split_stages must support."""

from tests.mpmd.zoo import calls, params, side_values, text, variables, vision
from tests.mpmd.zoo.base import Case

CASES: list[Case] = [*variables.CASES, *calls.CASES, *text.CASES, *side_values.CASES, *vision.CASES, *params.CASES]
BY_NAME = {case.name: case for case in CASES}
