"""Large schedules: work grows with the number of actions."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

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


def work_of(call: Callable[[], object]) -> int:
    """The number of calls and lines of the package that `call` executes, and of the actions that it reads.

    Every pass of a loop, also of one within a line, is a line, and every element of a generator is a call. Python
    3.12.1 does not report the instructions of the first call.
    """
    count, Row.read = 0, 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        if PACKAGE not in frame.f_code.co_filename:
            return None
        count += event in ("call", "line")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
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


@pytest.mark.parametrize("loop", ["[a for a in row]", "{a: a for a in row}", "sum(a for a in row)", "row[1:]"])
def test_every_pass_of_a_loop_is_work(loop):
    functions: dict[str, Any] = {}
    exec(compile(f"def work(row):\n    {loop}", f"{PACKAGE}loop.py", "exec"), functions)
    for size in (10, 1000):
        assert size <= work_of(lambda size=size: functions["work"](Row(range(size)))) + 1 < 2 * size + 10


@pytest.mark.sampled
@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_work_is_nearly_linear_in_the_number_of_actions(work):
    per_action = []
    for groups, microbatches in ((4, 16), (8, 64)):
        schedule = make_schedule("zb-h1", num_groups=groups, num_microbatches=microbatches)
        rows = tuple(map(Row, schedule.rows))
        counted = Schedule(schedule.name, rows, schedule.stage_to_group, splits_backward=True)
        per_action.append(work_of(lambda counted=counted: work(counted)) / (groups * microbatches * 3))
    assert 0 < per_action[1] < 1.2 * per_action[0]


def test_a_schedule_that_would_fill_the_memory_is_refused():
    with pytest.raises(ValueError, match=r"would have 10,000,000,000 forward actions, and at most 3,000,000"):
        make_schedule("1f1b", num_groups=100_000, num_microbatches=100_000)
