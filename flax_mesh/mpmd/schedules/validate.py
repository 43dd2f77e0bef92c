"""Validation of schedules: every error names its actions and marks them in the table. Pure Python."""

from collections import Counter
from collections.abc import Iterable, Sequence

from flax_mesh.mpmd.schedules.schedule import Action, Deadlock, Schedule, dependencies
from flax_mesh.mpmd.schedules.simulate import peak_activations

Place = tuple[int, int]  # group, position in its row
Mistake = tuple[str, list[Place]]  # message, and the actions to mark in the table
MARGIN = 4  # actions shown on either side of a marked one
MOST = 8  # mistakes reported at once


def check_schedule(schedule: Schedule, memory_limit: int | Sequence[int] | None = None) -> None:
    """Checks that a schedule is complete, can run without deadlock, and fits in memory.

    The checks are: every action appears exactly once, in the row of its stage's group; no action comes before one that
    it depends on; there is no deadlock if receives block and sends do not; on each edge (sending group, receiving
    group, F or B), messages are received in the order in which they are sent; no group exceeds its memory limit.

    Args:
        schedule: The schedule. One without any B is checked as forward only.
        memory_limit: Maximum number of activations that a group may store at once, as counted by `peak_activations`:
            one number for all groups or one per group. None: no limit.

    Raises:
        ValueError: If a check fails. The message has up to 8 mistakes, each with an excerpt of the table in which the
            actions concerned are in brackets.

    Example:
        >>> from flax_mesh.mpmd.schedules import Schedule, check_schedule, make_schedule
        >>> check_schedule(make_schedule("1f1b", num_groups=2, num_microbatches=3), memory_limit=2)
        >>> check_schedule(Schedule.parse("example 0,1\\n0F0 0B0\\n1B0 1F0"))
        Traceback (most recent call last):
        ...
        ValueError: example: invalid schedule
        1B0 comes before 1F0, which it depends on, in the row of group 1
          group 1: [1B0][1F0]
    """
    mistakes = _misplaced(schedule)
    if not mistakes:
        mistakes = _before_their_dependencies(schedule)
        mistakes += _out_of_order(schedule) + ([] if mistakes else _deadlock(schedule))
    if memory_limit is not None:
        mistakes += _over_memory_limits(schedule, memory_limits(memory_limit, schedule.num_groups))
    if mistakes:
        more = [f"and {len(mistakes) - MOST} more"] if len(mistakes) > MOST else []
        blocks = ["\n".join([line, *_excerpt(schedule, places)]) for line, places in mistakes[:MOST]]
        raise ValueError("\n".join([f"{schedule.name}: invalid schedule", *blocks, *more]))


def memory_limits(memory_limit: int | Sequence[int], num_groups: int) -> tuple[int, ...]:
    limits = (memory_limit,) * num_groups if isinstance(memory_limit, int) else tuple(memory_limit)
    if len(limits) != num_groups:
        raise ValueError(f"expected one memory limit or {num_groups}, one per group, got {len(limits)}")
    return limits


def _misplaced(schedule: Schedule) -> list[Mistake]:
    kinds = "FBW" if schedule.splits_backward else "FB"
    places: dict[Action, list[Place]] = {}
    for group, row in enumerate(schedule.rows):
        for position, action in enumerate(row):
            places.setdefault(action, []).append((group, position))
    if not any(action.kind == "B" for action in places):
        kinds = "F"  # forward only, for evaluation
    expected = {
        Action(kind, stage, microbatch): group
        for stage, group in enumerate(schedule.stage_to_group)
        for microbatch in range(schedule.num_microbatches)
        for kind in kinds
    }
    mistakes = []
    for action, found in sorted(places.items()):
        if action not in expected:
            mistakes.append((f"{action} appears in the table, but the schedule has no such action", found))
        elif len(found) > 1:
            mistakes.append((f"{action} appears {len(found)} times", found))
        elif found[0][0] != expected[action]:
            text = f"{action} appears in the row of group {found[0][0]}, but its stage is on group {expected[action]}"
            mistakes.append((text, found))
    for action, group in expected.items():
        if action not in places:
            same_microbatch = [(group, i) for i, other in enumerate(schedule.rows[group]) if other[1:] == action[1:]]
            mistakes.append((f"{action} is missing from the row of group {group}", same_microbatch))
    return mistakes


def _before_their_dependencies(schedule: Schedule) -> list[Mistake]:
    mistakes = []
    for group, row in enumerate(schedule.rows):
        position = {action: i for i, action in enumerate(row)}
        for action, i in position.items():
            for needed in dependencies(action, schedule.num_stages):
                if position.get(needed, -1) > i:
                    text = f"{action} comes before {needed}, which it depends on, in the row of group {group}"
                    mistakes.append((text, [(group, i), (group, position[needed])]))
    return mistakes


def _out_of_order(schedule: Schedule) -> list[Mistake]:
    """The first message of each edge that is not received in the order of sending."""
    sends: dict[tuple[int, int, str], list[tuple[Action, Place]]] = {}
    receives: dict[tuple[int, int, str], list[tuple[Action, Place]]] = {}
    receiver_of = {}  # action whose result is sent to another group -> that group
    for group, row in enumerate(schedule.rows):
        for position, action in enumerate(row):
            for needed in dependencies(action, schedule.num_stages):
                sender = schedule.stage_to_group[needed.stage]
                if sender != group:
                    receives.setdefault((sender, group, action.kind), []).append((needed, (group, position)))
                    receiver_of[needed] = group
    for group, row in enumerate(schedule.rows):
        for position, action in enumerate(row):
            if action in receiver_of:
                sends.setdefault((group, receiver_of[action], action.kind), []).append((action, (group, position)))
    mistakes = []
    for (sender, receiver, _), received in receives.items():
        sent = sends[sender, receiver, received[0][0].kind]
        for (first, its_place), (other, place) in zip(sent, received, strict=True):
            if first != other:
                text = f"group {sender} sends the result of {first} next, but group {receiver} waits for {other} first"
                mistakes.append((text, [its_place, place]))
                break
    return mistakes


def _deadlock(schedule: Schedule) -> list[Mistake]:
    try:
        schedule.times(lambda action: 1.0)
    except Deadlock as error:
        waits = [f"group {group} at {action} for {missing}" for group, action, missing in error.stuck]
        places = [(group, schedule.rows[group].index(action)) for group, action, _ in error.stuck]
        return [("deadlock, these groups wait for each other: " + ", ".join(waits), places)]
    return []


def _over_memory_limits(schedule: Schedule, limits: Sequence[int]) -> list[Mistake]:
    release = "W" if schedule.splits_backward else "B"
    mistakes = []
    for group, (row, peak, limit) in enumerate(zip(schedule.rows, peak_activations(schedule), limits, strict=True)):
        if peak <= limit:
            continue
        done: Counter[str] = Counter()
        for position, action in enumerate(row):
            done[action.kind] += 1
            if done["F"] - done[release] > limit:
                text = f"group {group} stores {limit + 1} activations from {action} on; its limit is {limit}"
                mistakes.append((f"{text}, the schedule requires {peak}", [(group, position)]))
                break
    return mistakes


def _excerpt(schedule: Schedule, places: Iterable[Place]) -> list[str]:
    """The rows around the marked actions, which are in brackets."""
    places = list(places)
    lines = []
    for group in sorted({group for group, _ in places}):
        marked = [position for g, position in places if g == group]
        row = schedule.rows[group]
        words = [f"[{action}]" if i in marked else f" {action} " for i, action in enumerate(row)]
        keep = [i for i in range(len(row)) if any(abs(i - m) <= MARGIN for m in marked)]
        text = "".join(("" if i - 1 in keep or i == 0 else " ... ") + words[i] for i in keep)
        tail = " ..." if keep and keep[-1] < len(row) - 1 else ""
        lines.append(f"  group {group}: {text.strip() if not text.startswith('[') else text}{tail}")
    return lines
