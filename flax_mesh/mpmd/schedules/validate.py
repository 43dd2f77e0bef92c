"""Validation of schedules: every error names its actions and marks them in the table. Pure Python."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import cast

from flax_mesh.fields import check_types, is_sized
from flax_mesh.mpmd.schedules.schedule import Action, Deadlock, Schedule
from flax_mesh.mpmd.schedules.simulate import MOST_COST, TOLERANCE, peak_memory
from flax_mesh.text import at_most, listed, shortened

_Lane = tuple[str, int]  # kind, stage
Place = tuple[int, int]  # group, position in its row
_Mistake = tuple[str, list[Place]]  # message, and the actions to mark in the table
MARGIN = 4  # actions shown on either side of a marked one
MOST = 8  # mistakes reported at once


@check_types
def check_schedule(
    schedule: Schedule,
    memory_limit: float | Sequence[float] | None = None,
    *,
    activation_sizes: Sequence[float] | None = None,
) -> None:
    """Checks that a schedule is complete, can run without deadlock, and fits in memory.

    The checks are: every action appears exactly once, in the row of its stage's group; no action comes before an
    action that it depends on; the groups do not deadlock if receives block and sends do not; on each edge (sending
    group, receiving group, F or B), messages are received in the order in which they are sent; no group exceeds its
    memory limit.

    Args:
        schedule: The schedule. A schedule without any B is checked as forward only.
        memory_limit: Maximum number of activations that a group may store at once, as counted by `peak_activations`:
            one number for all groups or one per group. None: no limit.
        activation_sizes: The size of an activation of every stage, in the unit of `memory_limit`, such as bytes. None:
            all are 1.

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
        stuck = _deadlock(schedule)
        early = _before_their_dependencies(schedule) if stuck else []  # every such action is a deadlock too
        mistakes = [*early, *_out_of_order(schedule), *([] if early else stuck)]
    if memory_limit is not None:
        sizes = activation_sizes_of(activation_sizes, schedule.num_stages)
        mistakes += _over_memory_limits(schedule, memory_limits(memory_limit, schedule.num_groups), sizes)
    if mistakes:
        omitted = [f"and {len(mistakes) - MOST} more"] if len(mistakes) > MOST else []
        blocks = ["\n".join([line, *_excerpt(schedule, places)]) for line, places in mistakes[:MOST]]
        raise ValueError("\n".join([f"{schedule.name}: invalid schedule", *blocks, *omitted]))


def memory_limits(memory_limit: float | Sequence[float], num_groups: int) -> tuple[float, ...]:
    each = memory_limit if is_sized(memory_limit) else (memory_limit,) * num_groups
    limits = tuple(cast(Sequence[float], each))
    if len(limits) != num_groups:
        raise ValueError(f"expected one memory limit or {num_groups}, one per group, got {len(limits)}")
    if not all(0 <= limit <= MOST_COST for limit in limits):
        raise ValueError(f"memory limits must be numbers from 0 to {MOST_COST:g}, got {shortened(listed(limits))}")
    return limits


def activation_sizes_of(sizes: Sequence[float] | None, num_stages: int) -> tuple[float, ...]:
    values = (1,) * num_stages if sizes is None else tuple(sizes)
    if len(values) != num_stages or not all(0 <= size <= MOST_COST for size in values):
        raise ValueError(
            f"activation_sizes must be {num_stages} numbers, one per stage, from 0 to {MOST_COST:g}, got "
            f"{shortened(listed(values))}"
        )
    return values


def _misplaced(schedule: Schedule) -> list[_Mistake]:
    """Actions that are unknown, repeated, or not in the row of their stage's group; then actions that are missing."""
    kinds = "FBW" if schedule.splits_backward else "FB"
    if not any(action.kind == "B" for row in schedule.rows for action in row):
        kinds = "F"  # forward only, for evaluation
    group_of = {(kind, stage): group for kind in kinds for stage, group in enumerate(schedule.stage_to_group)}
    seen: set[Action] = set()
    wrong: set[Action] = set()
    for group, row in enumerate(schedule.rows):
        for action in row:
            if action in seen or group_of.get(action[:2]) != group or action.microbatch < 0:
                wrong.add(action)
            seen.add(action)
    mistakes = _wrong_places(schedule, wrong, group_of) if wrong else []
    return mistakes + _missing(schedule, seen, group_of)


def _missing(schedule: Schedule, seen: Collection[Action], group_of: Mapping[_Lane, int]) -> list[_Mistake]:
    """One mistake per stage and kind: a schedule with a wrong microbatch, such as 0F99999, lacks almost all actions."""
    have = Counter(action[:2] for action in seen if action.microbatch >= 0)
    mistakes: list[_Mistake] = []
    num_microbatches = schedule.num_microbatches  # a pass over all actions
    for lane, group in group_of.items():
        if not (count := num_microbatches - have[lane]):
            continue
        every = (Action(*lane, microbatch) for microbatch in range(num_microbatches))
        first = next(action for action in every if action not in seen)
        row = schedule.rows[group] if len(mistakes) < MOST else ()
        same_microbatch = [(group, i) for i, other in enumerate(row) if other[1:] == first[1:]]
        are = "is" if count == 1 else f"and {count - 1:,} more of its stage and kind are"
        mistakes.append((f"{first} {are} missing from the row of group {group}", same_microbatch))
    return mistakes


def _wrong_places(schedule: Schedule, wrong: Collection[Action], group_of: Mapping[_Lane, int]) -> list[_Mistake]:
    places: dict[Action, list[Place]] = {}
    for group, row in enumerate(schedule.rows):
        for position, action in enumerate(row):
            if action in wrong:
                places.setdefault(action, []).append((group, position))
    mistakes: list[_Mistake] = []
    for action, spots in sorted(places.items()):
        if action[:2] not in group_of or action.microbatch < 0:
            text = f"{action} appears in the table, but the schedule has no such action"
        elif len(spots) > 1:
            text = f"{action} appears {len(spots)} times"
        else:
            text = (
                f"{action} appears in the row of group {spots[0][0]}, but its stage is on group {group_of[action[:2]]}"
            )
        mistakes.append((text, spots))
    return mistakes


def _before_their_dependencies(schedule: Schedule) -> list[_Mistake]:
    mistakes: list[_Mistake] = []
    for group, row in enumerate(schedule.rows):
        position = {action: i for i, action in enumerate(row)}
        for action, i in position.items():
            for needed in schedule.needs(action):
                if position.get(needed, -1) > i:
                    text = f"{action} comes before {needed}, which it depends on, in the row of group {group}"
                    mistakes.append((text, [(group, i), (group, position[needed])]))
    return mistakes


def _out_of_order(schedule: Schedule) -> list[_Mistake]:
    """The first message of each edge that is not received in the order of sending."""
    sends: dict[tuple[int, int, str], list[tuple[Action, Place]]] = {}
    receives: dict[tuple[int, int, str], list[tuple[Action, Place]]] = {}
    receiver_of: dict[Action, int] = {}  # action whose result another group receives -> that group
    for group, row in enumerate(schedule.rows):
        for position, action in enumerate(row):
            for needed in schedule.needs(action):
                sender = schedule.stage_to_group[needed.stage]
                if sender != group:
                    receives.setdefault((sender, group, action.kind), []).append((needed, (group, position)))
                    receiver_of[needed] = group
    for group, row in enumerate(schedule.rows):
        for position, action in enumerate(row):
            if action in receiver_of:
                sends.setdefault((group, receiver_of[action], action.kind), []).append((action, (group, position)))
    mistakes: list[_Mistake] = []
    for (sender, receiver, _), received in receives.items():
        sent = sends[sender, receiver, received[0][0].kind]
        for (first, its_place), (other, place) in zip(sent, received, strict=True):
            if first != other:
                text = f"group {sender} sends the result of {first} next, but group {receiver} waits for {other} first"
                mistakes.append((text, [its_place, place]))
                break
    return mistakes


def _deadlock(schedule: Schedule) -> list[_Mistake]:
    try:
        schedule.times(lambda action: 1.0)
    except Deadlock as error:
        waits = at_most([f"group {group} at {action} for {missing}" for group, action, missing in error.stuck], MOST)
        places = [(group, schedule.rows[group].index(action)) for group, action, _ in error.stuck]
        return [("deadlock, these groups wait for each other: " + listed(waits), places)]
    return []


def _over_memory_limits(schedule: Schedule, limits: Sequence[float], sizes: Sequence[float]) -> list[_Mistake]:
    release = "W" if schedule.splits_backward else "B"
    noun = " activations" if set(sizes) == {1} else ""
    mistakes: list[_Mistake] = []
    for group, (row, peak, limit) in enumerate(zip(schedule.rows, peak_memory(schedule, sizes), limits, strict=True)):
        if peak <= limit * (1 + TOLERANCE):
            continue
        stored = 0.0
        for position, action in enumerate(row):
            stored += ((action.kind == "F") - (action.kind == release)) * sizes[action.stage]
            if stored > limit * (1 + TOLERANCE):
                text = f"group {group} stores {stored:.15g}{noun} from {action} on; its limit is {limit:.15g}"
                mistakes.append((f"{text}, the schedule requires {peak:.15g}", [(group, position)]))
                break
    return mistakes


def _excerpt(schedule: Schedule, places: Sequence[Place]) -> list[str]:
    """The rows around the marked actions, which are in brackets; not more than `MOST` of them."""
    lines: list[str] = []
    for group in sorted({group for group, _ in places[:MOST]}):
        marked = [position for g, position in places[:MOST] if g == group]
        row = schedule.rows[group]
        near = {i for position in marked for i in range(position - MARGIN, position + MARGIN + 1)}
        keep = sorted(near & set(range(len(row))))
        words = [f"[{row[i]}]" if i in marked else f" {row[i]} " for i in keep]
        gaps = ["" if i == 0 or i - 1 in near else " ... " for i in keep]
        text = "".join(gap + word for gap, word in zip(gaps, words, strict=True))
        tail = " ..." if keep and keep[-1] < len(row) - 1 else ""
        lines.append(f"  group {group}: {text.strip() if not text.startswith('[') else text}{tail}")
    return lines
