"""Is a schedule right? Every mistake with the actions it is made of, and the spot in the table. Pure Python."""

from collections import Counter
from collections.abc import Iterable, Sequence

from flax_mesh.mpmd.schedules.schedule import Action, Deadlock, Schedule, dependencies
from flax_mesh.mpmd.schedules.simulate import peak_activations

Place = tuple[int, int]  # group, position in its row
Mistake = tuple[str, list[Place]]  # a line, and what to mark in the table
MARGIN = 4  # actions shown on either side of what is marked
MOST = 8  # mistakes told at once


def check_schedule(schedule: Schedule, memory_limit: int | Sequence[int] | None = None) -> None:
    """ValueError unless the schedule can run and fits, with every mistake and its place in the table.

    Every action stands exactly once, in the row of its stage's group; no row has an action before one that it needs;
    the rows do not wait for each other for ever when a receive blocks and a send does not; the messages of each edge
    (sending group, receiving group, F or B) are received in the order in which they are sent; no group holds more than
    `memory_limit` activations (of every group, or one number per group; see `peak_activations`).
    """
    mistakes = _misplaced(schedule)
    if not mistakes:
        mistakes = _before_what_they_need(schedule)
        mistakes += _out_of_order(schedule) + ([] if mistakes else _deadlock(schedule))
    if memory_limit is not None:
        mistakes += _too_many_in_flight(schedule, memory_limits(memory_limit, schedule.num_groups))
    if mistakes:
        more = [f"and {len(mistakes) - MOST} more"] if len(mistakes) > MOST else []
        blocks = ["\n".join([line, *_excerpt(schedule, places)]) for line, places in mistakes[:MOST]]
        raise ValueError("\n".join([f"{schedule.name}: wrong schedule", *blocks, *more]))


def memory_limits(memory_limit: int | Sequence[int], num_groups: int) -> tuple[int, ...]:
    limits = (memory_limit,) * num_groups if isinstance(memory_limit, int) else tuple(memory_limit)
    if len(limits) != num_groups:
        raise ValueError(f"there are {num_groups} groups, but memory limits of {len(limits)}")
    return limits


def _misplaced(schedule: Schedule) -> list[Mistake]:
    kinds = "FBW" if schedule.splits_backward else "FB"
    places: dict[Action, list[Place]] = {}
    for group, row in enumerate(schedule.rows):
        for position, action in enumerate(row):
            places.setdefault(action, []).append((group, position))
    if not any(action.kind == "B" for action in places):
        kinds = "F"  # evaluation
    wanted = {
        Action(kind, stage, microbatch): group
        for stage, group in enumerate(schedule.stage_to_group)
        for microbatch in range(schedule.num_microbatches)
        for kind in kinds
    }
    mistakes = []
    for action, found in sorted(places.items()):
        if action not in wanted:
            mistakes.append((f"{action} stands in the table, but there is no such action here", found))
        elif len(found) > 1:
            mistakes.append((f"{action} stands {len(found)} times", found))
        elif found[0][0] != wanted[action]:
            text = f"{action} stands in the row of group {found[0][0]}, its stage on group {wanted[action]}"
            mistakes.append((text, found))
    for action, group in wanted.items():
        if action not in places:
            same_microbatch = [(group, i) for i, other in enumerate(schedule.rows[group]) if other[1:] == action[1:]]
            mistakes.append((f"{action} is missing from the row of group {group}", same_microbatch))
    return mistakes


def _before_what_they_need(schedule: Schedule) -> list[Mistake]:
    mistakes = []
    for group, row in enumerate(schedule.rows):
        position = {action: i for i, action in enumerate(row)}
        for action, i in position.items():
            for needed in dependencies(action, schedule.num_stages):
                if position.get(needed, -1) > i:
                    text = f"{action} stands before {needed}, which it needs, in the row of group {group}"
                    mistakes.append((text, [(group, i), (group, position[needed])]))
    return mistakes


def _out_of_order(schedule: Schedule) -> list[Mistake]:
    """Edges whose messages are received in another order than they are sent; the first of each edge."""
    sends: dict[tuple[int, int, str], list[tuple[Action, Place]]] = {}
    receives: dict[tuple[int, int, str], list[tuple[Action, Place]]] = {}
    receiver_of = {}
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
        return [("deadlock, these wait for each other: " + ", ".join(waits), places)]
    return []


def _too_many_in_flight(schedule: Schedule, limits: Sequence[int]) -> list[Mistake]:
    release = "W" if schedule.splits_backward else "B"
    mistakes = []
    for group, (row, peak, limit) in enumerate(zip(schedule.rows, peak_activations(schedule), limits, strict=True)):
        if peak <= limit:
            continue
        held: Counter[str] = Counter()
        for position, action in enumerate(row):
            held[action.kind] += 1
            if held["F"] - held[release] > limit:
                text = f"group {group} holds {limit + 1} activations from {action} on; its limit is {limit}"
                mistakes.append((f"{text}, the schedule needs {peak}", [(group, position)]))
                break
    return mistakes


def _excerpt(schedule: Schedule, places: Iterable[Place]) -> list[str]:
    """The rows that hold what is marked, in brackets, and what stands around it."""
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
