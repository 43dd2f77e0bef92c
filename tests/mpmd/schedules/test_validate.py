"""The checker: it accepts every named schedule, and names and marks every kind of mistake in a short message."""

import dataclasses
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_mesh.mpmd.schedules import (
    Action,
    Schedule,
    check_schedule,
    draw_schedule_svg,
    make_schedule,
    schedule_table,
    simulate,
)
from flax_mesh.mpmd.schedules.schedule import SCHEDULE_NAMES, forward_schedule
from tests.mpmd.schedules.examples import make, schedules


def mutated(schedule: Schedule, group: int, change) -> Schedule:
    rows = [list(row) for row in schedule.rows]
    change(rows[group])
    return dataclasses.replace(schedule, rows=tuple(map(tuple, rows)))


def swap(first: str, second: str):
    def change(row: list[Action]) -> None:
        i, j = row.index(Action.parse(first)), row.index(Action.parse(second))
        row[i], row[j] = row[j], row[i]

    return change


def foreign(row: list[Action]) -> None:
    """Adds actions that are repeated, unknown and of another group to group 0, and removes one."""
    row += [Action("F", 0, 0), Action("F", 7, 0), Action("W", 0, 0), Action("B", 1, 1)]
    row.remove(Action("B", 0, 1))


MISTAKES: dict[str, tuple[Schedule, str | tuple[str, ...]]] = {  # the whole message, or parts of it
    "actions swapped within a microbatch": (
        mutated(make("1f1b", 2, 3), 1, swap("1F1", "1B1")),
        "1f1b: invalid schedule\n"
        "1B1 comes before 1F1, which it depends on, in the row of group 1\n"
        "  group 1: 1F0  1B0 [1B1][1F1] 1F2  1B2",
    ),
    "microbatches swapped in one row": (
        mutated(make("gpipe", 2, 3), 1, swap("1F0", "1F1")),
        (
            "group 0 sends the result of 0F0 next, but group 1 waits for 0F1 first",
            "  group 0: [0F0] 0F1  0F2  0B0  0B1  ...\n  group 1: [1F1] 1F0 ",
        ),
    ),
    "a receive before its send": (
        Schedule.parse("crossed 0,1\n0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"),
        "crossed: invalid schedule\n"
        "deadlock, these groups wait for each other: group 0 at 0B0 for 1B0, group 1 at 1F1 for 0F1\n"
        "  group 0: 0F0 [0B0] 0F1  0B1\n"
        "  group 1: 1F0 [1F1] 1B0  1B1",
    ),
    "a missing weight action": (
        mutated(make("zb-h1", 3, 4), 1, lambda row: row.remove(Action("W", 1, 2))),
        ("\n1W2 is missing from the row of group 1\n  group 1:", "[1B2]"),
    ),
    "repeated, unknown, and of another group": (
        mutated(make("1f1b", 2, 2), 0, foreign),
        (
            "0F0 appears 2 times",
            "7F0 appears in the table, but the schedule has no such action",
            "0W0 appears in",
            "1B1 appears 2 times",
            "0B1 is missing from the row of group 0",
        ),
    ),
    "the row of another group": (
        Schedule.parse("foreign 0,1\n0F0 0B0 1B0\n1F0"),
        ("1B0 appears in the row of group 0, but its stage is on group 1\n  group 0: 0F0  0B0 [1B0]",),
    ),
    "a microbatch far away": (  # without a list of all that are missing
        Schedule.parse("far 0,1\n0F0 0B0 0F999999999\n1F0 1B0"),
        ("0F1 and 999,999,997 more of its stage and kind are missing from the row of group 0",),
    ),
}


def complaint(schedule: Schedule, memory_limit: int | None = None) -> str:
    with pytest.raises(ValueError) as error:
        check_schedule(schedule, memory_limit)
    assert len(str(error.value)) < 1000
    return str(error.value)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_and_its_actions_are_marked(name):
    schedule, expected = MISTAKES[name]
    message = complaint(schedule)
    if isinstance(expected, str):
        assert message == expected
    for part in expected:
        assert part in message


def test_an_action_that_appears_very_often_is_marked_a_few_times():
    message = complaint(Schedule.parse("often 0\n" + "0F0 " * 5000 + "0B0"))
    assert "0F0 appears 5000 times" in message and message.count("[0F0]") == 8


def test_one_microbatch_too_many_in_flight():
    schedule = make("1f1b", 4, 8)
    check_schedule(schedule, 4)
    message = complaint(mutated(schedule, 0, swap("0B0", "0F4")), 4)
    assert "group 0 stores 5 activations from 0F4 on; its limit is 4, the schedule requires 5" in message
    assert "  group 0: 0F0  0F1  0F2  0F3 [0F4] 0B0  0B1  0F5  0B2 ..." in message
    check_schedule(forward_schedule(2, 5, (0, 1)), 0)  # stores no activations


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
def test_every_schedule_needs_exactly_its_peak_memory(name):
    defined = 0
    for groups, microbatches, virtual in itertools.product(range(1, 9), range(1, 33), range(1, 5)):
        try:
            schedule = make(name, groups, microbatches, virtual)
        except ValueError:
            continue
        defined += 1
        peaks = simulate(schedule).peak_activations
        check_schedule(schedule, peaks)
        with pytest.raises(ValueError, match=rf"group 0 stores {peaks[0]} activations from \d+F\d+ on; its limit is"):
            check_schedule(schedule, [peaks[0] - 1, *peaks[1:]])
    assert defined == {"interleaved-1f1b": 340, "dualpipe-v": 192}.get(name, 256)


# --- damaged text ---


def damaged(text: str, choose: random.Random) -> str:
    """The text after one to three random edits of its characters, words or lines."""
    for _ in range(choose.randint(1, 3)):
        at = choose.randrange(len(text) + 1)
        words = text.split(" ")
        i, j = choose.randrange(len(words)), choose.randrange(len(words))
        words[i], words[j] = words[j], words[i]
        lines = text.split("\n")
        text = choose.choice(
            [
                text[:at] + choose.choice("0123456789FBWX ,\n\t-\0é٣\x1b") + text[at + 1 :],  # another character
                text[:at],  # the rest is missing
                text[:at] + text[max(0, at - 9) :],  # a part is there twice
                f"{text[:at]}{choose.choice(['9' * 9, '9' * 5000, 'F' * 5000])}{text[at:]}",  # a very long word
                " ".join(words),  # two words have changed places
                "\n".join([*lines[: at % len(lines)], *lines[at % len(lines) + 1 :]]),  # a line is missing
                "\n".join(choose.sample(lines, len(lines))),  # lines are in another order
            ]
        )
    return text


@pytest.mark.parametrize("seed", range(200))
def test_a_damaged_schedule_is_refused_by_a_short_message_or_is_a_schedule(seed):
    choose = random.Random(seed)
    name, groups = choose.choice(SCHEDULE_NAMES), choose.randint(1, 4)
    text = damaged(str(make_schedule(name, num_groups=groups, num_microbatches=2 * groups)), choose)
    try:
        schedule = Schedule.parse(text)
        check_schedule(schedule, memory_limit=100)
    except ValueError as error:
        assert 0 < len(str(error)) < 20_000 and len(str(error).splitlines()) < 100
        return
    assert Schedule.parse(str(schedule)) == schedule
    assert schedule_table(schedule) and draw_schedule_svg(schedule)
    assert simulate(schedule).makespan >= 0
