"""The search with two stages per group: brute force, the V schedules at every memory limit, random costs, periods."""

import random
from typing import Any

import pytest

from flax_mesh.mpmd.schedules import StageCost, check_schedule, make_schedule, search_schedule, simulate
from flax_mesh.mpmd.schedules.schedule import SCHEDULE_NAMES
from flax_mesh.mpmd.schedules.simulate import peak_memory
from tests.mpmd.schedules.examples import MAKESPANS
from tests.mpmd.schedules.exhaustive import Steps

QUICK = 0.05


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


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_the_search_is_never_slower_than_a_named_schedule_for_random_costs(part):
    """200 sets of costs: a head of several layers, transfers, memory in bytes per stage."""
    for seed in range(50 * part, 50 * part + 50):
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
        found = search_schedule(costs, limit, **counts, activation_sizes=sizes, seconds=0.002, objective=objective)
        check_schedule(found.schedule, limit, activation_sizes=sizes)
        result = simulate(found.schedule, costs)
        assert (found.makespan, found.period) == (result.makespan, result.period)
        assert found.lower_bound <= getattr(found, objective) * (1 + 1e-9)
        for name in (*SCHEDULE_NAMES, f"v-{limit // max(sizes):.0f}", f"v-{limit // max(sizes) + 1:.0f}"):
            try:
                schedule = make_schedule(name, **counts, num_virtual_stages=virtual)
            except ValueError:
                continue
            if max(peak_memory(schedule, sizes)) <= limit:
                assert getattr(found, objective) <= getattr(simulate(schedule, costs), objective) * (1 + 1e-9), name


def test_the_objective_can_be_the_period():
    """With memory for 2 S - 1 activations zb-h2 has the makespan of zb-h1 and no idle time between steps."""
    found = search_schedule([(1, 1, 1)] * 4, 7, num_microbatches=8, objective="period", seconds=QUICK)
    assert (found.period, found.makespan, found.optimal) == (24, 27, True)
    tight = search_schedule([(1, 1, 1)] * 4, 4, num_microbatches=8, objective="period", seconds=QUICK)
    assert tight.best_named_period == 27 and 24 <= tight.period <= 27
    check_schedule(tight.schedule, 4)
