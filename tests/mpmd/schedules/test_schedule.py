"""Schedules as data: invariants of every named schedule at all sizes, and the text form."""

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flax_mesh.mpmd.schedules import Schedule, make_schedule
from flax_mesh.mpmd.schedules.schedule import forward_schedule
from tests.mpmd.schedules.examples import SIZES, schedules


@given(schedules())
@settings(max_examples=40, deadline=None)
def test_every_action_appears_once_in_the_row_of_its_group_and_the_text_parses_back(schedule):
    assert Schedule.parse(str(schedule)) == schedule
    kinds = "FBW" if schedule.splits_backward else "FB"
    for group, row in enumerate(schedule.rows):
        stages = [s for s, owner in enumerate(schedule.stage_to_group) if owner == group]
        wanted = [(k, s, m) for k in kinds for s in stages for m in range(schedule.num_microbatches)]
        assert sorted(row) == sorted(wanted)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1f1b\n0F0 0B0", "line 1: expected a name and the group of every stage"),
        ("1f1b 0\n0F0 0X0 B0", "(?s)line 2: '0X0' is not an action; .* such as 2F0\nline 2: 'B0' is not an action"),
        ("1f1b 0\n0F0 1F0 7B2", "line 2: stages are 0 to 0, the stages of the first line; found 1, 7"),
        ("1f1b 0\n0F\u0660", "line 2: '0F\u0660' is not an action"),
        ("1f1b 0\n0F" + "9" * 5000, r"line 2: '0F9{170,}\.\.\. \(5,002 characters\)' is not an action"),
        ("1f1b 0\n" + "0X0 " * 1000, r"(?s)not an action.*\nand 976 more$"),
        ("1f1b " + "9" * 5000 + "\n0F0", r"line 1: expected a name .* \(5,005 characters\)"),
        ("1f1b 0,1\n0F0 0B0", "stages are placed on groups up to 1, but there are 1 rows"),
    ],
)
def test_invalid_text_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Schedule.parse(text)


# --- where a schedule is not defined ---


@given(name=st.sampled_from(("interleaved-1f1b", "dualpipe-v")), **SIZES)
@settings(max_examples=40, deadline=None)
def test_no_valid_number_is_nearer_than_the_one_named(name, num_groups, num_microbatches):
    def error(microbatches: int) -> str:
        try:
            make_schedule(name, num_groups=num_groups, num_microbatches=microbatches)
        except ValueError as error:
            return str(error)
        return ""

    message = error(num_microbatches)
    assume(message)
    assert re.fullmatch(rf"{name} on {num_groups} groups requires .* got {num_microbatches}; .* is \d+", message)
    nearest = int(message.rpartition(" ")[2])
    distance = abs(nearest - num_microbatches)
    assert not error(nearest)
    assert all(error(m) for m in range(max(1, num_microbatches - distance + 1), num_microbatches + distance))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"name": "1f1"},
            r"unknown schedule '1f1'; did you mean 1f1b\? \(available: gpipe, .*dualpipe-v and v-K, K a number\)",
        ),
        ({"num_groups": 0}, "the number of groups must be at least 1, got 0"),
        ({"num_microbatches": 0, "num_virtual_stages": -1}, "microbatches must be at least 1, got 0; .* got -1"),
        ({"num_virtual_stages": 2}, "1f1b has 1 stage per group, got 2; interleaved-1f1b supports other numbers"),
        ({"name": "zb-v", "num_virtual_stages": 1}, "zb-v has 2 stages per group, got 1"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(**{"name": "1f1b", "num_groups": 4, "num_microbatches": 8, **arguments})


# --- evaluation ---


@given(
    num_microbatches=st.integers(1, 12),
    stage_to_group=st.sampled_from([(0,), (0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1, 1), (0, 1, 2, 2, 1, 0)]),
)
@settings(max_examples=50, deadline=None)
def test_the_busiest_group_bounds_a_forward_schedule(num_microbatches, stage_to_group):
    num_groups = 1 + max(stage_to_group)
    schedule = forward_schedule(num_groups, num_microbatches, stage_to_group)
    times = schedule.times(lambda action: 1.0)
    assert sorted(times) == [("F", s, m) for s in range(len(stage_to_group)) for m in range(num_microbatches)]
    busiest = max(map(len, schedule.rows))
    assert max(end for _, end in times.values()) <= busiest + len(stage_to_group) - 1
