"""The search compared with brute force and with the named schedules, and its lower bound."""

import itertools
import random
import signal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_mesh.mpmd.schedules import (
    Action,
    Schedule,
    StageCost,
    check_schedule,
    make_schedule,
    search_schedule,
    simulate,
)
from flax_mesh.mpmd.schedules.beam import BeamSearch
from flax_mesh.mpmd.schedules.lower_bound import lower_bound, make_problem, reverse, tails
from flax_mesh.mpmd.schedules.schedule import SCHEDULE_NAMES
from flax_mesh.mpmd.schedules.simulate import peak_memory
from tests.benchmarks.schedules import cases
from tests.mpmd.schedules.examples import MAKESPANS
from tests.mpmd.schedules.exhaustive import Steps

QUICK = 0.05  # seconds of search: some hundred partial schedules


def words(num_microbatches: int, memory: int, splits: bool):
    """Every row of one stage that keeps the order of microbatches: F >= B >= W in each prefix."""
    kinds = "FBW" if splits else "FB"

    def extend(row: list[tuple[str, int]], counts: dict[str, int]):
        if len(row) == len(kinds) * num_microbatches:
            yield list(row)
        for before, kind in zip([None, *kinds], kinds, strict=False):
            allowed = num_microbatches if before is None else counts[before]
            if counts[kind] < allowed and (kind != "F" or counts["F"] - counts[kinds[-1]] < memory):
                row.append((kind, counts[kind]))
                counts[kind] += 1
                yield from extend(row, counts)
                counts[kind] -= 1
                row.pop()

    return list(extend([], dict.fromkeys(kinds, 0)))


def brute_force(costs: list[StageCost], num_microbatches: int, memory: int, splits: bool = True) -> float:
    """The minimal makespan over all combinations of rows that do not deadlock."""
    best = float("inf")
    for chosen in itertools.product(words(num_microbatches, memory, splits), repeat=len(costs)):
        rows = tuple(tuple(Action(kind, s, m) for kind, m in row) for s, row in enumerate(chosen))
        schedule = Schedule("all", rows, tuple(range(len(costs))), splits)
        try:
            best = min(best, simulate(schedule, costs).makespan)
        except ValueError:  # deadlock
            continue
    return best


def random_costs(seed: int, num_stages: int) -> list[StageCost]:
    draw, values = random.Random(seed), (0.5, 1.0, 1.3, 2.0, 3.1)
    return [StageCost(*draw.choices(values, k=3), transfer=draw.choice((0.0, 0.7))) for _ in range(num_stages)]


SMALL = [(1, 4, 3), (2, 2, 2), (2, 3, 2), (2, 3, 3), (3, 2, 2), (3, 2, 1)]
LARGER = [(2, 4, 2, 0), (2, 4, 2, 1), (3, 3, 2, 0), (3, 3, 3, 1)]


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "memory", "seed", "splits"),
    [
        *((*sizes, seed, True) for sizes in SMALL for seed in range(2)),
        *((*sizes, 7, False) for sizes in ((2, 4, 2), (3, 3, 3))),
        *(pytest.param(*sizes, True, marks=pytest.mark.slow) for sizes in LARGER),
    ],
)
def test_the_search_finds_the_optimum_of_small_pipelines(num_stages, num_microbatches, memory, seed, splits):
    costs = random_costs(seed, num_stages)
    found = search_schedule(costs, memory, num_microbatches=num_microbatches, splits_backward=splits)
    assert found.makespan == pytest.approx(brute_force(costs, num_microbatches, memory, splits), rel=1e-12)
    assert splits or not found.schedule.splits_backward
    assert found.optimal or (num_stages, num_microbatches, memory) not in SMALL


# --- larger pipelines ---


def test_the_same_seed_gives_the_same_schedule_and_another_seed_may_not():
    case = max(cases(), key=lambda case: len(case.costs) * case.num_microbatches)
    found = [
        search_schedule(case.costs, case.memory, num_microbatches=case.num_microbatches, seconds=0.1, seed=seed)
        for seed in (1, 1, 2, 3, 4)
    ]
    assert found[0] == found[1]
    assert len({str(result.schedule) for result in found}) > 1


@pytest.mark.parametrize("unit", [1e-12, 1e9])
def test_the_unit_of_time_does_not_matter(unit):
    costs = random_costs(3, 4)
    scaled = [StageCost(*(unit * number for number in cost)) for cost in costs]
    found = [search_schedule(c, 2, num_microbatches=6) for c in (costs, scaled)]
    assert found[0].optimal and found[1].optimal and found[0].gap == 0
    assert found[1].makespan == pytest.approx(unit * found[0].makespan)
    assert search_schedule([(0, 0, 0)] * 3, 2, num_microbatches=2).makespan == 0


@pytest.mark.sampled
@pytest.mark.parametrize("memory", [2, 3, 8, None])
def test_two_stages_per_group_stay_within_memory(memory):
    found = search_schedule([(1, 1, 1)] * 8, memory, num_groups=4, num_microbatches=8, seconds=0.5)
    check_schedule(found.schedule, memory)
    if memory in (8, None):
        assert found.makespan == 51  # zb-v: with this memory nothing is faster
        assert found.optimal and found.schedule.stage_to_group == (0, 1, 2, 3, 3, 2, 1, 0)
    else:
        assert found.best_named is None
        one_by_one = 8 * (8 + 8 + 1)
        assert found.makespan < 0.8 * one_by_one  # microbatches overlap even if memory fits only one of them


def test_three_stages_per_group_and_a_single_group():
    found = search_schedule([(1, 2, 1)] * 6, 4, num_groups=2, num_microbatches=3, seconds=0.2)
    check_schedule(found.schedule, 4)
    assert found.schedule.stage_to_group == (0, 1, 0, 1, 0, 1)
    assert search_schedule([(1, 2, 1)] * 2, 2, num_groups=1, num_microbatches=3).makespan == 24


def test_each_group_can_have_its_own_memory_limit():
    found = search_schedule([(1, 1, 1)] * 3, [3, 2, 1], num_microbatches=6)
    check_schedule(found.schedule, [3, 2, 1])
    more = search_schedule([(1, 1, 1)] * 3, [3, 3, 3], num_microbatches=6)
    assert more.makespan < found.makespan


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory_limit": 0}, r"no schedule fits a memory limit of 0: a group requires at least 1 activation$"),
        ({"memory_limit": 1, "num_groups": 2}, r"limit of 1: .* at least 2 activations, 1 per stage"),
        ({"memory_limit": [4, 4]}, r"expected one memory limit or 4, one per group, got 2"),
        ({"num_groups": 3}, r"4 stages cannot be divided evenly over 3 groups"),
        ({"num_microbatches": 0, "seconds": 0}, r"num_microbatches must be at least 1, got 0; seconds must be more"),
        ({"seconds": float("inf")}, r"seconds must be more than 0 and finite, got inf"),
        ({"seconds": float("nan")}, r"seconds must be more than 0 and finite, got nan"),
        ({"objective": "bubble"}, "objective must be makespan or period, got 'bubble'"),
        ({"activation_sizes": [1, 2]}, "activation_sizes must be 4 numbers, one per stage, .* got 1, 2"),
        ({"activation_sizes": [1, 1, 1, -1]}, "activation_sizes must be 4 numbers"),
        ({"memory_limit": float("nan")}, "memory limits must be numbers from 0 to 1e\\+100, got nan"),
        ({"memory_limit": [1, 1, 1, float("inf")]}, "memory limits must be numbers from 0"),
        ({"activation_sizes": [5, 1, 1, 1]}, "no schedule fits a memory limit of 4: a group requires at least 5 for"),
        ({"costs": []}, r"costs is empty"),
        ({"costs": [(1, 1)] * 4}, r"costs of stage 0: expected F,B,W or F,B,W,T, got 2 numbers"),
        ({"costs": [(1, 1, -1)] * 4}, r"costs of stage 0: expected 0 or numbers from 1e-100 to 1e\+100, got 1,1,-1"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    defaults = {"costs": [(1, 1, 1)] * 4, "memory_limit": 4, "num_microbatches": 8}
    with pytest.raises(ValueError, match=message):
        search_schedule(**{**defaults, **arguments})


def test_ctrl_c_ends_the_search_with_the_best_schedule_so_far(monkeypatch):
    whole, calls = BeamSearch.run, itertools.count(1)

    def run(self, *args, **kwargs):
        if next(calls) == 6:
            signal.raise_signal(signal.SIGINT)
        return whole(self, *args, **kwargs)

    case = max(cases(), key=lambda case: len(case.costs) * case.num_microbatches)
    finished = search_schedule(case.costs, case.memory, num_microbatches=case.num_microbatches, seconds=0.1)
    monkeypatch.setattr(BeamSearch, "run", run)
    found = search_schedule(case.costs, case.memory, num_microbatches=case.num_microbatches, seconds=1e308)
    assert found.interrupted and next(calls) == 7 and not finished.interrupted
    check_schedule(found.schedule, case.memory)
    assert found.makespan == simulate(found.schedule, case.costs).makespan
    assert found.lower_bound <= finished.makespan
    assert (found.best_named, found.best_named_makespan) == (finished.best_named, finished.best_named_makespan)


def test_ctrl_c_while_the_bound_is_computed_leaves_a_valid_bound(monkeypatch):
    monkeypatch.setattr("flax_mesh.mpmd.schedules.search.lower_bound", lambda _: signal.raise_signal(signal.SIGINT))
    found = search_schedule([(1, 1, 1), (2, 2, 2)], 2, num_microbatches=4)
    assert found.interrupted and found.best_named == "zb-h1"
    assert found.lower_bound == pytest.approx(4 * 6) and found.lower_bound < found.makespan


# --- the lower bound ---


def test_known_optimal_schedules_meet_the_lower_bound():
    for groups, microbatches in ((1, 3), (2, 5), (4, 8), (8, 32)):
        problem = make_problem([StageCost()] * groups, microbatches, range(groups), [groups] * groups)
        assert lower_bound(problem) == 3 * microbatches + groups - 1  # the makespan of zb-h1
    one_at_a_time = make_problem([StageCost()] * 4, 5, range(4), [1] * 4)
    assert lower_bound(one_at_a_time) == 5 * (4 + 4 + 1)  # all F, all B, and W of stage 0


@given(schedule_seed=st.integers(0, 10**6), name=st.sampled_from(SCHEDULE_NAMES))
@settings(max_examples=60, deadline=None)
def test_no_simulated_schedule_is_faster_than_the_bound_or_ends_before_a_tail(schedule_seed, name):
    draw = random.Random(schedule_seed)
    groups = draw.randint(1, 4)
    schedule = make_schedule(name, num_groups=groups, num_microbatches=groups * draw.randint(2, 4))
    costs = [StageCost(*(draw.uniform(0, 2) for _ in range(4))) for _ in range(schedule.num_stages)]
    result = simulate(schedule, costs)
    problem = make_problem(
        costs, schedule.num_microbatches, schedule.stage_to_group, result.peak_activations, schedule.splits_backward
    )
    assert lower_bound(problem) <= result.makespan + 1e-9
    assert lower_bound(reverse(problem)) == pytest.approx(lower_bound(problem))
    for lane, of_lane in zip(problem.lanes, tails(problem), strict=True):
        for microbatch, tail in enumerate(of_lane):
            assert result.times[Action(*lane, microbatch)][1] + tail <= result.makespan + 1e-9


# --- two stages per group: brute force, the V schedules at every memory limit, random costs, periods ---


@pytest.mark.parametrize("seed", [pytest.param(s, marks=() if s < 4 else pytest.mark.slow) for s in range(16)])
def test_no_schedule_of_two_groups_of_two_stages_is_faster(seed):
    draw = random.Random(seed)
    costs = [tuple(draw.choices((1, 2), k=3)) for _ in range(4)]
    num_microbatches, memory = 2 + seed % 2, draw.randint(2, 5)
    found = search_schedule(costs, memory, num_microbatches=num_microbatches, num_groups=2)
    assert found.optimal
    check_schedule(found.schedule, memory)
    every = [Steps(costs, num_microbatches, memory, placement) for placement in ((0, 1, 0, 1), (0, 1, 1, 0))]
    best = round(found.makespan)
    assert not any(steps.finishes_by(best - 1) for steps in every)
    assert any(steps.finishes_by(best) for steps in every)


LIMITS = [(sizes, limit) for sizes, row in MAKESPANS.items() for limit in row]


@pytest.mark.parametrize(
    ("sizes", "limit"), [pytest.param(*one, marks=pytest.mark.slow if one[0][0] >= 6 else ()) for one in LIMITS]
)
def test_the_search_is_never_slower_than_the_published_schedule_of_its_memory_limit(sizes, limit):
    groups, microbatches = sizes
    costs = [(1, 1, 1)] * (2 * groups)
    found = search_schedule(costs, limit, num_groups=groups, num_microbatches=microbatches, seconds=QUICK)
    check_schedule(found.schedule, limit)
    assert found.makespan <= MAKESPANS[sizes][limit]


@pytest.mark.sampled
@pytest.mark.parametrize("seeds", [range(12), range(12, 60), range(60, 108), range(108, 156), range(156, 204)], ids=str)
def test_the_search_is_never_slower_than_a_named_schedule_that_fits(seeds):
    """For random costs: a head of several layers, transfers, memory in bytes per stage."""
    for seed in seeds:
        draw = random.Random(seed)
        groups, virtual = draw.randint(1, 4), draw.choice((1, 2))
        microbatches = draw.choice((groups, 2 * groups, 2 * groups + 1))
        costs = [
            StageCost(*[draw.uniform(0.5, 2) for _ in "FBW"])._replace(transfer=draw.choice((0, 0.4)))
            for _ in range(groups * virtual)
        ]
        costs[-1] = StageCost(*[draw.randint(1, 4) * number for number in costs[-1][:3]])
        sizes = [draw.choice((1e9, 1.5e9, 3e9)) for _ in costs]
        limit = draw.uniform(1, 2 * groups) * max(sizes) * virtual
        counts: dict[str, Any] = {"num_groups": groups, "num_microbatches": microbatches}
        objective = draw.choice(("makespan", "period"))
        found = search_schedule(costs, limit, **counts, activation_sizes=sizes, seconds=QUICK, objective=objective)
        check_schedule(found.schedule, limit, activation_sizes=sizes)
        result = simulate(found.schedule, costs)
        assert (found.makespan, found.period) == (result.makespan, result.period)
        best, named = getattr(found, objective), getattr(found, f"best_named_{objective}") or float("inf")
        assert found.lower_bound <= best * (1 + 1e-9) and best <= named
        for name in (*SCHEDULE_NAMES, f"v-{limit // max(sizes):.0f}", f"v-{limit // max(sizes) + 1:.0f}"):
            try:
                schedule = make_schedule(name, **counts, num_virtual_stages=virtual)
            except ValueError:
                continue
            if max(peak_memory(schedule, sizes)) <= limit:
                assert named <= getattr(simulate(schedule, costs), objective) * (1 + 1e-9), name
            assert name != found.best_named or named == getattr(simulate(schedule, costs), objective)


def test_the_objective_can_be_the_period():
    """With memory for 2 S - 1 activations zb-h2 has the makespan of zb-h1 and no idle time between steps."""
    found = search_schedule([(1, 1, 1)] * 4, 7, num_microbatches=8, objective="period", seconds=QUICK)
    assert (found.period, found.makespan, found.optimal) == (24, 27, True)
    tight = search_schedule([(1, 1, 1)] * 4, 4, num_microbatches=8, objective="period", seconds=QUICK)
    assert tight.best_named_period == 27 and 24 <= tight.period <= 27
    check_schedule(tight.schedule, 4)
