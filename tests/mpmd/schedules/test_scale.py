"""Large schedules: work grows with the number of actions."""

import sys
from collections.abc import Callable

import pytest

from flax_mesh.mpmd.schedules import (
    Schedule,
    check_schedule,
    draw_schedule_svg,
    make_schedule,
    schedule_table,
    simulate,
)

PACKAGE = "flax_mesh/"


class Row(tuple):
    """A row that counts the actions that are read by index or slice."""

    read = 0

    def __getitem__(self, at):
        found = super().__getitem__(at)
        Row.read += len(found) if isinstance(at, slice) else 1
        return found


def instructions(call: Callable[[], object]) -> int:
    """The number of instructions of the package that `call` executes, and of the actions that it reads.

    It is called twice and the second time counts: since Python 3.12 a function that is already running, such as the
    one whose loop resumes a generator, reports instructions only from its next call on.
    """
    count, Row.read = 0, 0

    def trace(frame, event, arg):
        nonlocal count
        if PACKAGE not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
        count, Row.read = 0, 0
        call()
    finally:
        sys.settrace(before)
    return count + Row.read


def crossed(schedule: Schedule) -> Schedule:
    """The schedule with the first two messages of every group in another order than the next group expects."""
    rows = [Row((row[1], row[0], *row[2:]) if group % 2 else row) for group, row in enumerate(schedule.rows)]
    return Schedule(schedule.name, tuple(rows), schedule.stage_to_group, schedule.splits_backward)


def check_crossed(schedule: Schedule) -> None:
    with pytest.raises(ValueError, match="invalid schedule"):
        check_schedule(crossed(schedule))


WORK = {
    "make": lambda one: make_schedule(
        one.name, num_groups=one.num_groups, num_microbatches=one.num_microbatches, num_virtual_stages=None
    ),
    "check": check_schedule,
    "check a wrong one": check_crossed,
    "simulate": simulate,
    "print": schedule_table,
    "draw": draw_schedule_svg,
    "text": lambda one: Schedule.parse(str(one)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_work_is_nearly_linear_in_the_number_of_actions(work):
    per_action = []
    for groups, microbatches in ((4, 32), (16, 128)):
        schedule = make_schedule("zb-h1", num_groups=groups, num_microbatches=microbatches)
        rows = tuple(map(Row, schedule.rows))
        counted = Schedule(schedule.name, rows, schedule.stage_to_group, splits_backward=True)
        per_action.append(instructions(lambda counted=counted: work(counted)) / (groups * microbatches * 3))
    assert per_action[1] < 1.2 * per_action[0]


def test_a_schedule_that_would_fill_the_memory_is_refused():
    with pytest.raises(ValueError, match=r"would have 10,000,000,000 forward actions, and at most 3,000,000"):
        make_schedule("1f1b", num_groups=100_000, num_microbatches=100_000)
