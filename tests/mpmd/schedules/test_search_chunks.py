"""The search with two stages per group: brute force, the V schedules at every memory limit, random costs, periods."""

import random
from functools import cache

import pytest

from flax_mesh.mpmd.schedules import StageCost, check_schedule, make_schedule, search_schedule, simulate
from flax_mesh.mpmd.schedules.schedule import SCHEDULE_NAMES
from flax_mesh.mpmd.schedules.simulate import peak_memory
from tests.mpmd.schedules.test_v_family import MAKESPANS

QUICK = 0.05


class Steps:
    """Whether a schedule of two groups of two stages can end by a deadline.

    Tries every choice of both groups, idling included, at every step of time. Costs are integers. A result that the
    other group has produced can be used in the order in which it was produced, as `check_schedule` demands.
    """

    def __init__(self, costs, num_microbatches: int, memory: int, group_of: tuple[int, ...]):
        self.costs, self.count, self.memory, self.group_of = costs, num_microbatches, memory, group_of
        self.lanes = [("F", s) for s in range(4)] + [("B", s) for s in range(4)] + [("W", s) for s in range(4)]
        self.of = [[i for i, (_, s) in enumerate(self.lanes) if group_of[s] == g] for g in (0, 1)]
        self.length = [costs[s]["FBW".index(kind)] for kind, s in self.lanes]

    def finishes_by(self, deadline: int) -> bool:
        states = {((0,) * 12, (-1, 0), (-1, 0), ())}  # started per lane, (running, time left) per group, messages
        for now in range(deadline):
            after = set()
            for state in states:
                for first in self.choices(state, 0, deadline - now):
                    for second in self.choices(state, 1, deadline - now):
                        after.add(self.step(state, first, second))
            states = {state for state in after if state is not None}
        return any(all(n == self.count for n in started) and a[1] == b[1] == 0 for started, a, b, _ in states)

    def done(self, state, lane: int) -> int:
        started, *running, _ = state
        return started[lane] - any(now == lane and left for now, left in running)

    def sources(self, lane: int) -> list[int]:
        kind, stage = self.lanes[lane]
        if kind == "F":
            return [stage - 1] if stage else []
        return [lane - 4] if kind == "W" else [stage] + ([lane + 1] if stage < 3 else [])

    def choices(self, state, group: int, time_left: int):
        started, *running, messages = state
        if running[group][1]:
            return [None]
        work = sum((self.count - started[lane]) * self.length[lane] for lane in self.of[group])
        found: list[int | None] = [None] if work < time_left else []
        stored = sum(started[s] - self.done(state, 8 + s) for s in range(4) if self.group_of[s] == group)
        for lane in self.of[group]:
            if started[lane] == self.count or (lane < 4 and stored >= self.memory):
                continue
            sources = self.sources(lane)
            if any(self.done(state, source) <= started[lane] for source in sources):
                continue
            remote = [s for s in sources if self.group_of[self.lanes[s][1]] != group]
            kind = self.lanes[lane][0]
            waiting = [m for m in messages if m[0] == group and m[1] == kind]
            if remote and waiting and waiting[0][2] != lane:
                continue
            found.append(lane)
        return found

    def step(self, state, *chosen):
        started, *running, messages = state
        started, messages, after = list(started), list(messages), []
        for lane in chosen:
            if lane is not None:
                started[lane] += 1
                for message in messages:
                    if message[2] == lane:
                        messages.remove(message)
                        break
        for (now, left), lane in zip(running, chosen, strict=True):
            now, left = (lane, self.length[lane]) if lane is not None else (now, left)
            after.append((now, left - 1) if left > 1 else (-1, 0))
            if left == 1 and now >= 0:
                kind, stage = self.lanes[now]
                to = {"F": stage + 1, "B": stage - 1}.get(kind, -1)
                if 0 <= to < 4 and self.group_of[to] != self.group_of[stage]:
                    messages.append((self.group_of[to], kind, to if kind == "F" else 4 + to))
        return tuple(started), *after, tuple(messages)


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


@cache
def unit_search(groups: int, microbatches: int, limit: int):
    return search_schedule(
        [(1, 1, 1)] * (2 * groups), limit, num_groups=groups, num_microbatches=microbatches, seconds=QUICK
    )


@pytest.mark.parametrize(
    ("sizes", "limit"),
    [
        pytest.param(sizes, k, marks=() if sizes[0] < 6 else pytest.mark.slow)
        for sizes, row in MAKESPANS.items()
        for k in row
    ],
)
def test_the_search_is_never_slower_than_the_published_schedule_of_its_memory_limit(sizes, limit):
    assert unit_search(*sizes, limit).makespan <= MAKESPANS[sizes][limit]


@pytest.mark.parametrize("limit", range(2, 10))
def test_the_search_is_never_slower_than_a_schedule_of_two_stages_that_fits(limit):
    found = unit_search(4, 8, limit)
    check_schedule(found.schedule, limit)
    for name in [*SCHEDULE_NAMES, *(f"v-{k}" for k in range(4, limit + 1) if k <= 8)]:
        schedule = make_schedule(name, num_groups=4, num_microbatches=8)
        result = simulate(schedule)
        if schedule.num_stages == 8 and max(result.peak_activations) <= limit:
            assert found.makespan <= result.makespan, name


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
        found = search_schedule(
            costs,
            limit,
            num_microbatches=microbatches,
            num_groups=groups,
            activation_sizes=sizes,
            seconds=0.002,
            objective=(objective := draw.choice(("makespan", "period"))),
        )
        check_schedule(found.schedule, limit, activation_sizes=sizes)
        result = simulate(found.schedule, costs)
        assert (found.makespan, found.period) == (result.makespan, result.period)
        assert found.lower_bound <= getattr(found, objective) * (1 + 1e-9)
        for name in (*SCHEDULE_NAMES, f"v-{limit // max(sizes):.0f}", f"v-{limit // max(sizes) + 1:.0f}"):
            try:
                schedule = make_schedule(
                    name, num_groups=groups, num_microbatches=microbatches, num_virtual_stages=virtual
                )
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"objective": "bubble"}, "objective must be makespan or period, got 'bubble'"),
        ({"activation_sizes": [1, 2]}, "activation_sizes must be 4 numbers, one per stage, .* got 1, 2"),
        ({"activation_sizes": [1, 1, 1, -1]}, "activation_sizes must be 4 numbers"),
        ({"memory_limit": float("nan")}, "memory limits must be numbers from 0 to 1e\\+100, got nan"),
        ({"memory_limit": [1, 1, 1, float("inf")]}, "memory limits must be numbers from 0"),
        ({"activation_sizes": [5, 1, 1, 1]}, "no schedule fits a memory limit of 4: a group requires at least 5 for"),
    ],
)
def test_bad_objectives_and_sizes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        search_schedule([(1, 1, 1)] * 4, **{"memory_limit": 4, "num_microbatches": 4, **arguments})
