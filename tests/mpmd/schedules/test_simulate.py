"""The simulator: formulas of known schedules, and that every action starts as early as it can."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_mesh.mpmd.schedules import Schedule, StageCost, simulate
from flax_mesh.mpmd.schedules.schedule import dependencies, forward_schedule
from flax_mesh.mpmd.schedules.simulate import stage_costs
from tests.mpmd.schedules.examples import make, schedules

GROUPS, MICROBATCHES = st.integers(1, 8), st.integers(1, 32)


@given(groups=GROUPS, microbatches=MICROBATCHES)
@settings(max_examples=25, deadline=None)
def test_formulas_of_one_stage_per_group(groups, microbatches):
    for name in ("gpipe", "1f1b", "eager-1f1b"):
        result = simulate(make(name, groups, microbatches))
        assert result.makespan == 3 * (microbatches + groups - 1)
        assert result.transfers == 2 * (groups - 1) * microbatches
    peaks = simulate(make("1f1b", groups, microbatches)).peak_activations
    assert peaks == tuple(min(groups - s, microbatches) for s in range(groups))
    assert set(simulate(make("gpipe", groups, microbatches)).peak_activations) == {microbatches}
    eager = simulate(make("eager-1f1b", groups, microbatches)).peak_activations
    assert eager == tuple(min(2 * (groups - s) - 1, microbatches) for s in range(groups))


@given(groups=GROUPS, microbatches=MICROBATCHES)
@settings(max_examples=25, deadline=None)
def test_formulas_of_the_zero_bubble_schedules(groups, microbatches):
    result = simulate(make("zb-h1", groups, microbatches))
    assert result.makespan == 3 * microbatches + groups - 1 + max(groups - microbatches, 0)
    assert set(result.peak_activations) == {min(groups, microbatches)}  # never grows beyond the number of groups
    if microbatches >= 2 * groups - 1:  # memory for no idle time between steps
        result = simulate(make("zb-h2", groups, microbatches))
        assert (result.makespan, result.period) == (3 * microbatches + groups - 1, 3 * microbatches)
        assert set(result.peak_activations) == {2 * groups - 1}
    result = simulate(make("zb-v", groups, microbatches))
    assert max(result.peak_activations) <= min(2 * groups, 2 * microbatches)  # half-chunks: 1F1B's memory on group 0
    if microbatches >= 2 * groups - 1:
        assert result.makespan == 6 * microbatches + groups - 1
    if microbatches >= 2 * groups:
        result = simulate(make("dualpipe-v", groups, microbatches))
        assert result.makespan == 6 * microbatches + groups - 1
        assert set(result.peak_activations) == {2 * groups + 1}


@given(groups=GROUPS, turns=st.integers(1, 8), virtual=st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_formula_of_interleaved(groups, turns, virtual):
    microbatches = groups * turns
    result = simulate(make("interleaved-1f1b", groups, microbatches, virtual))
    assert result.makespan == 3 * virtual * microbatches + 3 * (groups - 1)
    all_in_flight = virtual * microbatches
    warmup = [2 * (groups - g - 1) + (virtual - 1) * groups + 1 for g in range(groups)]
    assert result.peak_activations == tuple(min(peak, all_in_flight) for peak in warmup)


# --- costs ---

COST = st.builds(StageCost, *[st.just(0.0) | st.floats(1e-100, 5) for _ in range(4)])


@given(schedule=schedules(), data=st.data())
@settings(max_examples=20, deadline=None)
def test_simulated_times_are_feasible_and_nothing_could_start_earlier(schedule, data):
    costs = data.draw(st.lists(COST, min_size=schedule.num_stages, max_size=schedule.num_stages))
    times = simulate(schedule, costs).times
    assert set(times) == {action for row in schedule.rows for action in row}
    place = {action: i for i, action in enumerate(times)}  # also an order for the dispatch of actions
    for group, row in enumerate(schedule.rows):
        for before, action in zip([None, *row], row, strict=False):
            bounds = [times[before][1]] if before else [0.0]
            assert before is None or place[before] < place[action]
            for needed in dependencies(action, schedule.num_stages):
                assert place[needed] < place[action]
                apart = schedule.stage_to_group[needed.stage] != group
                bounds.append(times[needed][1] + apart * costs[needed.stage].transfer)
            assert times[action][0] == max(bounds)
            cost = costs[action.stage]
            unsplit = action.kind == "B" and not schedule.splits_backward
            span = {"F": cost.forward, "B": cost.backward + unsplit * cost.weights, "W": cost.weights}[action.kind]
            assert times[action][1] == times[action][0] + span


def test_a_transfer_delays_both_ways_but_not_within_a_group():
    cost = StageCost(1, 1, 1, transfer=10)
    assert simulate(make("1f1b", 4, 1), cost).makespan == 4 * 3 + 2 * 3 * 10
    assert simulate(forward_schedule(2, 1, (0, 1, 1, 0)), cost).makespan == 4 + 2 * 10  # stages 1 and 2 share a group


def test_idle_share_of_uneven_stages():
    result = simulate(make("gpipe", 2, 1), [(1, 1, 0), (3, 3, 0)])
    assert (result.makespan, result.busy, result.bubble) == (8, (2, 6), 0.5)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ([(1, 1, 1)] * 3, "expected costs of 4 stages, got 3; pass one for all stages or one per stage"),
        (
            [(1, 1), (1, -1, 1), (1, 1, 1), (1, math.nan, 1)],
            r"stage 0: expected F,B,W or F,B,W,T, .* stage 1: .*-1.*nan",
        ),
        (StageCost(forward=-1), r"expected 0 or numbers from 1e-100 to 1e\+100, got -1,1,1,0$"),
        (StageCost(weights=1e308), r"got 1,1,1e\+308,0$"),
        (StageCost(transfer=1e-308), r"got 1,1,1,1e-308$"),
        (StageCost(backward=10**400), r"got 1,10{150,}\.\.\. \(407 characters\)$"),
        (StageCost(weights=math.inf), r"got 1,1,inf,0$"),
    ],
)
def test_bad_costs(costs, message):
    with pytest.raises(ValueError, match=message):
        stage_costs(costs, 4)


def test_a_deadlock_of_many_groups_is_cut_to_a_few():
    rows = [f"{s}B0 {s}F0" if s == 99 else f"{s}F0 {s}B0" for s in range(100)]
    with pytest.raises(ValueError, match=r"deadlock: group 0 is blocked .*; and 92 more$"):
        simulate(Schedule.parse("\n".join(["long " + ",".join(map(str, range(100))), *rows])))
