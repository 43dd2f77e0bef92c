"""Random pipelines equal one device; and the fuzzer itself: its cases, its comparison, its shrinking."""

import pytest

from flax_mesh.mpmd.schedules.schedule import SCHEDULE_NAMES
from tests.mpmd.fuzz.case import VARIANTS, Case, random_case, shrink
from tests.mpmd.fuzz.operations import FEATURES, OPERATIONS, RULES, WRAPPERS
from tests.mpmd.fuzz.run import check_case, check_seeds, differences, on_one_device, pipelined

pytestmark = pytest.mark.usefixtures("quick_compilation")
SECONDS, FEWEST = 60, 10  # of the slow run; shrinking three failures takes at most three minutes more
SEEDS = range(100_000)
# Cases that the library computed wrongly once: complex activations, new values without an equation, custom_vjp rules
# that are not linear, parameters that the forward pass changes.
REPAIRED = (
    "layers=linear+complex_parameter,linear",
    "layers=to_complex+linear,linear+from_complex",
    *(f"layers=linear+{name}_rw,linear" for name in ("literal", "input", "parameter", "swap")),
    *(f"layers=linear,linear table={rule} head=tied microbatches=1" for rule in ("clip", "jit_clip", "remat_clip")),
    *(f"layers=linear+{name},linear" for name in ("clip_weights_wr", "normalize_weights_rw", "shrink_weights_rwr")),
    # Refused once: memories of inputs, and counters of several stages.
    *(f"layers=linear,linear+memory_{order} cuts=1" for order in ("rw", "wr", "rwr")),
    "layers=linear+shared_count_rw,linear+shared_count_r,linear,linear+shared_count_r schedule=interleaved-1f1b",
)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", [237, pytest.param(252, marks=pytest.mark.slow)])
def test_a_random_pipeline_equals_one_device(seed: int):
    outcome = check_case(random_case(seed))
    assert outcome.kind == "same", outcome.detail


@pytest.mark.slow
def test_random_pipelines_equal_one_device():
    report = check_seeds(SEEDS, seconds=SECONDS)
    print(report)
    assert not report.failures, f"{report}"
    assert report.kinds["same"] >= FEWEST, f"{report}"
    assert report.kinds["same"] >= 0.5 * report.kinds.total(), f"{report}"


@pytest.mark.slow
@pytest.mark.parametrize("text", REPAIRED)
def test_a_case_that_failed_once_equals_one_device(text: str):
    assert check_case(Case.parse(text)).kind == "same"


# --- the fuzzer itself ---


def test_a_case_is_the_inverse_of_its_text():
    cases = [random_case(seed) for seed in range(200)]
    assert [Case.parse(str(case)) for case in cases] == cases
    assert len(set(cases)) > 190
    with pytest.raises(ValueError, match="'bent:linear' is not a layer"):
        Case.parse("layers=bent:linear")


def test_a_seed_determines_its_case_and_consecutive_seeds_share_a_model():
    assert str(random_case(0)) == str(random_case(0))
    assert len({random_case(seed).on_one_device for seed in range(VARIANTS)}) == 1
    assert random_case(0).on_one_device != random_case(VARIANTS).on_one_device


@pytest.mark.slow
def test_random_cases_have_every_operation_rule_wrapper_schedule_and_fit():
    cases = [random_case(seed) for seed in range(2000)]
    assert {name for case in cases for name in case.operations} == set(OPERATIONS)
    assert {case.table for case in cases} == set(RULES)
    assert {layer.wrapper for case in cases for layer in case.layers} == set(WRAPPERS)
    assert {case.schedule for case in cases} == set(SCHEDULE_NAMES)
    assert {case.remat for case in cases} == {"none", "cheap", "full"}
    assert all(case.fits() for case in cases)


@pytest.mark.parametrize("feature", sorted({*FEATURES} - {"layers"}))
def test_a_feature_that_is_switched_off_is_in_no_case(feature: str):
    cases = [random_case(seed, (feature,)) for seed in range(0, 400, VARIANTS)]
    assert not any(feature in case.features for case in cases)
    assert any(feature in random_case(seed).features for seed in range(0, 400, VARIANTS))


def test_shrinking_leaves_what_the_failure_requires():
    case = Case.parse(
        "layers=linear+norm,remat:conv+average_rw,mlp+tanh,norm+attention before=loss table=clip head=tied "
        "loss=metrics optimizer=clip microbatches=4 schedule=zb-v cuts=1,2,3 remat=full"
    )
    assert case.fits()

    def fails(case: Case) -> bool:
        return "average_rw" in case.operations and case.remat == "full" and case.microbatches >= 2

    assert str(shrink(case, fails)) == "layers=average_rw,linear remat=full"


@pytest.mark.slow
def test_the_comparison_detects_other_masks_of_dropout():
    case = Case.parse("layers=linear+dropout,linear")
    want = on_one_device(case.on_one_device)
    assert differences(want, pipelined(case), case) == []
    found = differences(want, pipelined(case, seed=8), case)
    assert any(line.startswith("step 0: loss") for line in found)
    assert any("trace/layers/0/operations/0/linear/kernel" in line for line in found)


def test_what_the_library_refuses_is_no_failure():
    case = Case.parse("layers=linear+shared_average_rw,linear+shared_average_rw")
    outcome = check_case(case)
    assert outcome.kind == "refused" and "changes in stage" in outcome.detail
    assert not outcome.failed and not any(char.isdigit() for char in outcome.reason)
