"""Random pipelines equal one device; and the fuzzer itself: its cases and its comparison."""

import pytest

from flax_mesh.mpmd.schedules.schedule import SCHEDULE_NAMES
from tests.mpmd.fuzz.case import Case, random_case
from tests.mpmd.fuzz.operations import OPERATIONS, RULES, WRAPPERS
from tests.mpmd.fuzz.run import check_case, differences, on_one_device, pipelined

pytestmark = pytest.mark.usefixtures("quick_compilation")
SEEDS = (*range(20), 252)
CLIPS = ("clip", "jit_clip", "remat_clip", "cond_clip", "scan_clip")
# One case for each way of a layer. Most were computed wrongly or refused once.
CASES = (
    # Complex activations and parameters, control flow around layers, tied kernels and scalars of all layers.
    "layers=linear+complex_parameter,linear schedule=zb-h1",
    "layers=to_complex+linear,linear+from_complex schedule=zb-h1",
    "layers=remat:linear+dropout,checkpoint:mlp,jit:linear,scan:linear,cond:linear,loop:linear groups=4",
    "layers=linear+tied+strength,linear+tied+strength+embed_integer+features cuts=1",
    # New values without an equation.
    *(f"layers=linear+{name}_rw,linear schedule=zb-h1" for name in ("literal", "input", "parameter", "swap")),
    "layers=jit:linear+swap_rw,linear",
    # custom_vjp rules that are not linear, on a tied table and on values for later layers.
    *(f"layers=linear,linear table={rule} head=tied microbatches=1" for rule in CLIPS),
    *(f"layers=linear+stash_{rule},linear+recall,linear+recall schedule=zb-h1" for rule in CLIPS),
    # Parameters that the forward pass changes, memories of inputs, counters of several stages.
    *(f"layers=linear+{name},linear" for name in ("clip_weights_wr", "normalize_weights_rw", "shrink_weights_rwr")),
    *(f"layers=linear,linear+memory_{order} cuts=1" for order in ("rw", "wr", "rwr")),
    "layers=linear+shared_count_rw,linear+shared_count_r,linear,linear+shared_count_r schedule=interleaved-1f1b",
)


def test_a_random_pipeline_equals_one_device():
    outcome = check_case(random_case(237))
    assert outcome.kind == "same", outcome.detail


@pytest.mark.slow
def test_random_pipelines_equal_one_device():
    """`python -m tests.mpmd.fuzz SEED` prints the case of a seed that fails; leave out parts of its text."""
    outcomes = {seed: check_case(random_case(seed)) for seed in SEEDS}
    assert [(seed, outcome.detail) for seed, outcome in outcomes.items() if outcome.failed] == []
    assert 2 * sum(outcome.kind == "same" for outcome in outcomes.values()) > len(SEEDS)  # others are refused


@pytest.mark.slow
@pytest.mark.parametrize("text", CASES)
def test_a_case_of_each_way_equals_one_device(text: str):
    assert check_case(Case.parse(text)).kind == "same"


# --- the fuzzer itself ---


@pytest.mark.slow
def test_random_cases_have_every_operation_rule_wrapper_schedule_fit_and_parse_back():
    cases = [random_case(seed) for seed in range(2000)]
    assert [Case.parse(str(case)) for case in cases] == cases
    assert {name for case in cases for name in case.operations} == set(OPERATIONS)
    assert {case.table for case in cases} == set(RULES)
    assert {layer.wrapper for case in cases for layer in case.layers} == set(WRAPPERS)
    assert {case.schedule for case in cases} == set(SCHEDULE_NAMES)
    assert {case.remat for case in cases} == {"none", "cheap", "full"}
    assert all(case.fits() for case in cases)


@pytest.mark.slow
def test_the_comparison_detects_other_masks_of_dropout():
    case = Case.parse("layers=linear+dropout,linear")
    want = on_one_device(case.on_one_device)
    assert differences(want, pipelined(case), case) == []
    found = differences(want, pipelined(case, seed=8), case)
    assert any(line.startswith("step 0: loss") for line in found)
    assert any("trace/layers/0/operations/0/linear/kernel" in line for line in found)


def test_cases_that_the_library_refuses_are_not_failures():
    case = Case.parse("layers=linear+shared_average_rw,linear+shared_average_rw")
    outcome = check_case(case)
    assert outcome.kind == "refused" and "changes in stage" in outcome.detail
    assert not outcome.failed
