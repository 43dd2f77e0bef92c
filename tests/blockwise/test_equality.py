"""Loss and gradients of attention in blocks equal the function as it was written."""

import pytest

from flax_mesh.blockwise.transform import blockwise_attention
from tests.blockwise.compare import apart, gradients, largest_square
from tests.blockwise.programs import LEFT, PROGRAMS, S

FAST = ("empty_rows_finite", "sink", "no_key_where")
# The gradient of a bias has two dims of S; the bits of several keys are not computed on blocks.
KEEP = {"bias_parameter", "a_key_of_dropout_per_row"}


@pytest.mark.parametrize("name", [x if x in FAST else pytest.param(x, marks=pytest.mark.slow) for x in PROGRAMS])
def test_a_program_in_blocks_equals_the_program_as_it_was_written(name):
    fn, args = PROGRAMS[name]()
    lines = []  # blocks of 20: the last one is not full
    blockwise = blockwise_attention(fn, block=22, say=lines.append)
    (expected, _), (found, jaxpr) = gradients(fn, args), gradients(blockwise, args)
    assert apart(found, expected) < (4e-2 if "bfloat16" in name else 2e-5)
    square = largest_square(jaxpr, S)
    assert (square > 0) == (name in LEFT - {"router"} | KEEP), lines
