"""The simulator and the checker: known schedules, formulas, and one mutation for each kind of mistake."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_mesh.mpmd.schedules import Action, Schedule, StageCost, check_schedule, make_schedule, simulate
from flax_mesh.mpmd.schedules.schedule import SCHEDULE_NAMES, dependencies, forward_schedule
from flax_mesh.mpmd.schedules.simulate import stage_costs
from tests.mpmd.schedules.test_schedule import schedules

GROUPS, MICROBATCHES = st.integers(1, 8), st.integers(1, 32)


def make(name: str, groups: int, microbatches: int, virtual: int | None = None) -> Schedule:
    return make_schedule(name, num_groups=groups, num_microbatches=microbatches, num_virtual_stages=virtual)


# --- known rows: S = 4, M = 8, F = B = W = 1 ---


@pytest.mark.parametrize(
    ("name", "makespan", "busy", "bubble", "peaks"),
    [
        ("gpipe", 33, 24, 0.2727, (8, 8, 8, 8)),
        ("1f1b", 33, 24, 0.2727, (4, 3, 2, 1)),
        ("eager-1f1b", 33, 24, 0.2727, (7, 5, 3, 1)),
        ("zb-h1", 27, 24, 0.1111, (4, 4, 4, 4)),
        ("interleaved-1f1b", 57, 48, 0.1579, (11, 9, 7, 5)),
        ("zb-v", 51, 48, 0.0588, (8, 8, 8, 8)),
        ("dualpipe-v", 51, 48, 0.0588, (9, 9, 9, 9)),
    ],
)
def test_makespan_bubble_and_memory_of_known_schedules(name, makespan, busy, bubble, peaks):
    result = simulate(make(name, 4, 8))
    assert (result.makespan, set(result.busy), result.peak_activations) == (makespan, {busy}, peaks)
    assert result.bubble == pytest.approx(bubble, abs=5e-5)


@given(groups=GROUPS, microbatches=MICROBATCHES)
@settings(max_examples=60, deadline=None)
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
@settings(max_examples=60, deadline=None)
def test_formulas_of_the_zero_bubble_schedules(groups, microbatches):
    result = simulate(make("zb-h1", groups, microbatches))
    assert result.makespan == 3 * microbatches + groups - 1 + max(groups - microbatches, 0)
    assert set(result.peak_activations) == {min(groups, microbatches)}  # never grows beyond the number of groups
    result = simulate(make("zb-v", groups, microbatches))
    assert max(result.peak_activations) <= min(2 * groups, 2 * microbatches)  # half-chunks: 1F1B's memory on group 0
    if microbatches >= 2 * groups - 1:
        assert result.makespan == 6 * microbatches + groups - 1
    if microbatches >= 2 * groups:
        result = simulate(make("dualpipe-v", groups, microbatches))
        assert result.makespan == 6 * microbatches + groups - 1
        assert set(result.peak_activations) == {2 * groups + 1}


@given(groups=GROUPS, turns=st.integers(1, 8), virtual=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_formula_of_interleaved(groups, turns, virtual):
    microbatches = groups * turns
    result = simulate(make("interleaved-1f1b", groups, microbatches, virtual))
    assert result.makespan == 3 * virtual * microbatches + 3 * (groups - 1)
    all_in_flight = virtual * microbatches
    warmup = [2 * (groups - g - 1) + (virtual - 1) * groups + 1 for g in range(groups)]
    assert result.peak_activations == tuple(min(peak, all_in_flight) for peak in warmup)


@pytest.mark.slow
@given(schedules())
@settings(max_examples=150, deadline=None)
def test_every_named_schedule_passes_the_checker_at_its_own_peak_and_not_below(schedule):
    peaks = simulate(schedule).peak_activations
    check_schedule(schedule, peaks)
    with pytest.raises(ValueError, match=rf"group 0 stores {peaks[0]} activations from \d+F\d+ on; its limit is"):
        check_schedule(schedule, [peaks[0] - 1, *peaks[1:]])


# --- costs ---

COST = st.builds(StageCost, *[st.just(0.0) | st.floats(1e-100, 5) for _ in range(4)])


@given(schedule=schedules(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_simulated_times_are_feasible_and_nothing_could_start_earlier(schedule, data):
    costs = data.draw(st.lists(COST, min_size=schedule.num_stages, max_size=schedule.num_stages))
    times = simulate(schedule, costs).times
    for group, row in enumerate(schedule.rows):
        for before, action in zip([None, *row], row, strict=False):
            bounds = [times[before][1]] if before else [0.0]
            for needed in dependencies(action, schedule.num_stages):
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


def test_a_forward_schedule_stores_no_activations():
    schedule = forward_schedule(2, 5, (0, 1))
    check_schedule(schedule, 0)
    assert simulate(schedule).makespan == 6


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


# --- the checker: a mutation of each kind of mistake ---


def mutated(schedule: Schedule, group: int, change) -> Schedule:
    rows = [list(row) for row in schedule.rows]
    change(rows[group])
    return dataclasses.replace(schedule, rows=tuple(map(tuple, rows)))


def swap(first: str, second: str):
    def change(row: list[Action]) -> None:
        i, j = row.index(Action.parse(first)), row.index(Action.parse(second))
        row[i], row[j] = row[j], row[i]

    return change


def complaint(schedule: Schedule, memory_limit: int | None = None) -> str:
    with pytest.raises(ValueError) as error:
        check_schedule(schedule, memory_limit)
    return str(error.value)


def test_actions_swapped_within_a_microbatch():
    message = complaint(mutated(make("1f1b", 2, 3), 1, swap("1F1", "1B1")))
    assert message == (
        "1f1b: invalid schedule\n"
        "1B1 comes before 1F1, which it depends on, in the row of group 1\n"
        "  group 1: 1F0  1B0 [1B1][1F1] 1F2  1B2"
    )


def test_microbatches_swapped_in_one_row():
    message = complaint(mutated(make("gpipe", 2, 3), 1, swap("1F0", "1F1")))
    assert "group 0 sends the result of 0F0 next, but group 1 waits for 0F1 first" in message
    assert "  group 0: [0F0] 0F1  0F2  0B0  0B1  ...\n  group 1: [1F1] 1F0 " in message


def test_a_missing_weight_action():
    schedule = make("zb-h1", 3, 4)
    message = complaint(mutated(schedule, 1, lambda row: row.remove(Action("W", 1, 2))))
    assert "1W2 is missing from the row of group 1" in message
    assert "[1B2]" in message.splitlines()[2]


def test_actions_that_are_duplicated_unknown_or_in_the_row_of_another_group():
    def change(row: list[Action]) -> None:
        row += [Action("F", 0, 0), Action("F", 7, 0), Action("W", 0, 0), Action("B", 1, 1)]
        row.remove(Action("B", 0, 1))

    message = complaint(mutated(make("1f1b", 2, 2), 0, change))
    for text in ("0F0 appears 2 times", "7F0 appears in the table, but", "0W0 appears in", "1B1 appears 2 times"):
        assert text in message
    assert "0B1 is missing from the row of group 0" in message
    rows = Schedule.parse("foreign 0,1\n0F0 0B0 1B0\n1F0")
    assert "1B0 appears in the row of group 0, but its stage is on group 1\n  group 0: 0F0  0B0 [1B0]" in complaint(
        rows
    )


def test_a_receive_before_its_send():
    schedule = Schedule.parse("crossed 0,1\n0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    assert complaint(schedule) == (
        "crossed: invalid schedule\n"
        "deadlock, these groups wait for each other: group 0 at 0B0 for 1B0, group 1 at 1F1 for 0F1\n"
        "  group 0: 0F0 [0B0] 0F1  0B1\n"
        "  group 1: 1F0 [1F1] 1B0  1B1"
    )


def test_a_microbatch_far_away_is_reported_without_listing_all_that_are_missing():
    message = complaint(Schedule.parse("far 0,1\n0F0 0B0 0F999999999\n1F0 1B0"))
    assert "0F1 and 999,999,997 more of its stage and kind are missing from the row of group 0" in message
    assert len(message) < 1000


def test_an_action_that_appears_very_often_is_marked_a_few_times():
    message = complaint(Schedule.parse("often 0\n" + "0F0 " * 5000 + "0B0"))
    assert "0F0 appears 5000 times" in message and message.count("[0F0]") == 8


def test_a_deadlock_of_many_groups_is_cut_to_a_few():
    rows = [f"{s}B0 {s}F0" if s == 99 else f"{s}F0 {s}B0" for s in range(100)]
    with pytest.raises(ValueError, match=r"deadlock: group 0 is blocked .*; and 92 more$"):
        simulate(Schedule.parse("\n".join(["long " + ",".join(map(str, range(100))), *rows])))


def test_one_microbatch_too_many_in_flight():
    schedule = make("1f1b", 4, 8)
    check_schedule(schedule, 4)
    message = complaint(mutated(schedule, 0, swap("0B0", "0F4")), 4)
    assert "group 0 stores 5 activations from 0F4 on; its limit is 4, the schedule requires 5" in message
    assert "  group 0: 0F0  0F1  0F2  0F3 [0F4] 0B0  0B1  0F5  0B2 ..." in message


@pytest.mark.slow
@given(schedule=schedules(), data=st.data())
@settings(max_examples=80, deadline=None)
def test_any_swap_of_dependent_actions_or_of_messages_is_caught(schedule, data):
    group = data.draw(st.integers(0, schedule.num_groups - 1))
    row = schedule.rows[group]
    action = data.draw(st.sampled_from(row))
    partners = [a for a in row if a != action and (a[1:] == action[1:] or a[:2] == action[:2])]
    if schedule.num_groups == 1 or action.kind == "W":
        partners = [a for a in partners if a[1:] == action[1:]]
    partner = data.draw(st.sampled_from(partners or [action]))
    wrong = mutated(schedule, group, swap(str(action), str(partner)))
    if partner != action:
        with pytest.raises(ValueError, match=rf"(?s)invalid schedule.*\[({action}|{partner})\]"):
            check_schedule(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_every_size_up_to_8_groups_32_microbatches_and_4_stages_on_a_group(name):
    defined = 0
    for groups, microbatches, virtual in itertools.product(range(1, 9), range(1, 33), range(1, 5)):
        try:
            schedule = make(name, groups, microbatches, virtual)
        except ValueError:
            continue
        defined += 1
        check_schedule(schedule, simulate(schedule).peak_activations)
    assert defined == {"interleaved-1f1b": 340, "dualpipe-v": 192}.get(name, 256)
