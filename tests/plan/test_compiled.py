"""The estimate of a step is what XLA allocates and sends when it compiles the step, within 10%.

One compilation of a case serves all tests of it, so they are in one file. `python -m tests.benchmarks plan --compiled`
prints all numbers.
"""

import importlib.util
from dataclasses import replace

import pytest

from tests.plan.cases import CASES, Case
from tests.plan.compiled import Figures, compiled, estimated, estimates, figures_of, memory_error, operand_errors

BAR = 0.1
LOOSE = 1.0  # of axes over which XLA sends something else
# TPUs store arrays in tiles of 8 x 128 elements at least, and scalars in 512 bytes.
TILES = 0.05

slow = pytest.mark.slow
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is missing: pip install flax-mesh[tpu-aot]"
)


def marked(case: Case):
    marks = () if case.quick else (slow, needs_libtpu) if case.platform == "tpu" else (slow,)
    return pytest.param(case, id=case.name, marks=marks)


every_case = pytest.mark.parametrize("case", [marked(case) for case in CASES if not case.outside])


def check_memory(found: Figures, true: Figures) -> None:
    error = memory_error(found, true)
    assert abs(error) <= BAR, f"the estimate is {found.total:,} bytes, XLA allocates {true.total:,}: {error:+.1%}"


def check_operands(found: Figures, true: Figures, case: Case) -> None:
    errors = operand_errors(found, true)
    wrong = {axes: f"{x:+.1%}" for axes, x in errors.items() if abs(x) > (LOOSE if axes in case.differs else BAR)}
    assert not wrong, f"operand bytes: {found.operands}, XLA: {true.operands}; errors: {wrong}"


@pytest.mark.slow
@every_case
def test_the_memory_equals_xlas_allocation(case: Case):
    for name, true in compiled(case).items():
        check_memory(estimated(case)[name], true)


@every_case
def test_the_arguments_equal_the_compiled_step(case: Case):
    for name, true in compiled(case).items():
        found = estimated(case)[name].arguments
        if case.platform == "cpu":
            assert found == true.arguments
        else:
            assert (1 - TILES) * true.arguments <= found <= true.arguments


@every_case
def test_the_collectives_equal_the_compiled_step(case: Case):
    for name, true in compiled(case).items():
        check_operands(estimated(case)[name], true, case)


QUICK = next(case for case in CASES if case.quick)


def test_an_estimate_without_residuals_is_found():
    one = estimates(QUICK)["step"]
    residuals = sum(buffer.bytes for buffer in one.profile.alive if buffer.phase == "forward")
    profile = replace(one.profile, peak=one.profile.peak - residuals)
    with pytest.raises(AssertionError, match="XLA allocates"):
        check_memory(figures_of(replace(one, profile=profile)), compiled(QUICK)["step"])


def test_an_estimate_that_counts_loops_once_is_found():
    one = estimates(QUICK)["step"]
    exchanges = tuple(exchange._replace(times=1) for exchange in one.exchanges)
    with pytest.raises(AssertionError, match="errors"):
        check_operands(figures_of(replace(one, exchanges=exchanges)), compiled(QUICK)["step"], QUICK)
