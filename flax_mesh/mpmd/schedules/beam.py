"""Beam search over schedules: which lane does each group serve next? Pure Python.

A partial schedule is extended by the action that could end first, or by an action of the same group that could start
before that end (Giffler and Thompson 1960):

    group 0 is free at 3    0F2 could run 3..4    <- the first end of all candidates
                            0B0 could run 3..5    starts before 4: also a candidate
    group 1 is free at 2    1F1 could run 4..5    other group: not a candidate in this step

If each group has one stage, at least one optimal schedule can be built this way. A search that drops only partial
schedules that are dominated, or whose lower bound is too large, therefore finds the optimum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from flax_mesh.mpmd.schedules.lower_bound import Problem, tails
from flax_mesh.mpmd.schedules.simulate import TOLERANCE

_NEVER = float("inf")


_Entry = TypeVar("_Entry")


class Partial(NamedTuple):
    """A schedule of some of the actions. Tuples have one entry per lane or per group."""

    counts: tuple[int, ...]  # per lane: number of scheduled actions
    ends: tuple[tuple[float, ...], ...]  # per lane: end of each scheduled action
    ready: tuple[float, ...]  # per lane: when the inputs of the next action are available; _NEVER: unknown
    free: tuple[float, ...]  # per group: end of its last scheduled action
    stored: tuple[float, ...]  # per group: memory of the activations
    starts: tuple[float, ...]  # per group: start of its first action; _NEVER: nothing is scheduled
    queues: tuple[tuple[int, ...], ...]  # per shared edge: lanes whose inputs are in transit, in sending order
    remaining: tuple[float, ...]  # per group: total duration of the unscheduled actions
    bound: float  # lower bound on the makespan of every completion
    idle: float  # total idle time of the groups so far
    start: float  # start of the action scheduled last
    trail: "tuple[int, Partial] | None"  # the lane served last, and the schedule before it


# (counts, queues) -> the times of schedules with these actions
_Frontier = dict[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]], list[tuple[float, ...]]]


@dataclass(frozen=True)
class _BeamResult:
    served: list[int]  # lanes in the order of serving; [] if nothing better was found
    complete: bool  # the search was exhaustive: nothing better was dropped
    work: int  # number of partial schedules evaluated


class BeamSearch:
    """Beam searches of one problem, with the tables that they share."""

    def __init__(self, problem: Problem, objective: str = "makespan"):
        self.problem, self.objective = problem, objective
        self.tails = tails(problem)
        self.users = problem.users()
        group = problem.group
        self.sends = [(i, user) for i, users in enumerate(self.users) for user in users if group[user] != group[i]]
        self.lanes_of = [[i for i, g in enumerate(problem.group) if g == group] for group in range(problem.num_groups)]
        self.rooms = {reserve: _room(problem, reserve) for reserve in (False, True)}
        self.pairs_of = [_pairs(problem, group) for group in range(problem.num_groups)]
        self.one_stage_each = all(len(pairs) == 1 for pairs in self.pairs_of)
        self.edge_of = _shared_edges(problem)

    def run(
        self,
        width: int,
        *,
        weight: float,
        better_than: float,
        most_work: float,
        reserve: bool = False,
        may_wait: bool = False,
    ) -> _BeamResult:
        """The best schedule found with a beam of `width` partial schedules of each length.

        They are ranked by their bound plus `weight` times their idle time. The search stops after evaluating
        `most_work` partial schedules. With `reserve`, a group of several stages reserves memory for the later ones.
        With `may_wait`, partial schedules are extended by all actions that start no earlier than the last one, so that
        a group may wait although it could run an action in the meantime.
        """
        beam, complete, work = [self._empty()], True, 0
        too_long = better_than * (1 - TOLERANCE)
        for _ in range(self.problem.num_microbatches * len(self.problem.lanes)):
            offers: list[tuple[float, float, int, float, int, float, Partial]] = []
            for partial in beam:
                for lane, start in self._choices(partial, self.rooms[reserve], may_wait):
                    bound = self._bound(partial, lane, start)
                    if bound < too_long:
                        idle = partial.idle + start - partial.free[self.problem.group[lane]]
                        offers.append((bound + weight * idle, idle, len(offers), bound, lane, start, partial))
            work += len(offers)
            if work > most_work:
                return _BeamResult([], False, work)
            offers.sort()
            beam: list[Partial] = []
            frontier: _Frontier = {}
            for _, idle, _, bound, lane, start, partial in offers:
                if len(beam) == width:
                    complete = False
                    break
                extended = self._extend(partial, lane, start, bound, idle)
                if not self._dominated(extended, frontier, may_wait):
                    beam.append(extended)
        best = min(beam, key=lambda partial: max(partial.free), default=None)
        return _BeamResult([] if best is None else _served(best), complete, work)

    def _empty(self) -> Partial:
        problem = self.problem
        work = [sum(problem.duration[lane] for lane in lanes) * problem.num_microbatches for lanes in self.lanes_of]
        groups, lanes = problem.num_groups, len(problem.lanes)
        ready = tuple(_NEVER if needs else 0.0 for needs in problem.needs)
        queues = ((),) * len(set(self.edge_of.values()))
        return Partial(
            (0,) * lanes,
            ((),) * lanes,
            ready,
            (0.0,) * groups,
            (0,) * groups,
            (_NEVER,) * groups,
            queues,
            tuple(work),
            0.0,
            0.0,
            0.0,
            None,
        )

    def _choices(self, partial: Partial, room: Sequence[float], may_wait: bool) -> list[tuple[int, float]]:
        """(lane, start) of the candidates: the action that could end first, and the actions of its group that could
        start before that end.

        With `may_wait`, all actions that start no earlier than the action scheduled last. The actions of a
        schedule are then scheduled in the order of their starts.
        """
        free, ready, stored, duration = partial.free, partial.ready, partial.stored, self.problem.duration
        first_end, first = _NEVER, -1
        choices: list[tuple[int, float]] = []
        for group, lanes in enumerate(self.lanes_of):
            since, in_use, before = free[group], stored[group], first_end
            startable: list[tuple[int, float]] = []
            for lane in lanes:
                start = ready[lane]
                if start < _NEVER and in_use <= room[lane] and (self.one_stage_each or self._can_serve(partial, lane)):
                    start = max(start, since)
                    startable.append((lane, start))
                    if start + duration[lane] < first_end:
                        first_end, first = start + duration[lane], lane
            if may_wait:
                choices = choices + startable
            elif first_end < before:
                choices = startable
        if may_wait:
            return [(lane, start) for lane, start in choices if start >= partial.start]
        return [(lane, start) for lane, start in choices if start < first_end or lane == first]

    def _can_serve(self, partial: Partial, lane: int) -> bool:
        """Whether a group of several stages can serve this lane without receiving out of order or exhausting memory.

        The input of this lane must be the oldest message of its edge. With the memory that this action allocates, the
        microbatches in flight must still be able to finish, oldest first (the banker's algorithm; Dijkstra 1965).
        """
        edge = self.edge_of.get(lane)
        if edge is not None and partial.queues[edge][0] != lane:
            return False
        if self.problem.memory_change[lane] <= 0:
            return True
        group, counts = self.problem.group[lane], _with(partial.counts, lane, partial.counts[lane] + 1)
        change, limit = self.problem.memory_change, self.problem.limits[group]
        pairs = [(counts[first], counts[last], change[first]) for first, last in self.pairs_of[group]]
        unused = limit * (1 + TOLERANCE) - sum((allocated - released) * size for allocated, released, size in pairs)
        for microbatch in range(min(released for _, released, _ in pairs), max(allocated for allocated, _, _ in pairs)):
            if sum((allocated <= microbatch) * size for allocated, _, size in pairs) > unused:
                return False
            unused += sum((released <= microbatch < allocated) * size for allocated, released, size in pairs)
        return True

    def _bound(self, partial: Partial, lane: int, start: float) -> float:
        """A lower bound on the objective of every completion of `partial` that continues with `lane`."""
        duration, ready, counts = self.problem.duration, partial.ready, partial.counts
        group = self.problem.group[lane]
        end = start + duration[lane]
        if self.objective == "period":
            return max(
                partial.bound, end + partial.remaining[group] - duration[lane] - min(start, partial.starts[group])
            )
        bound = max(
            partial.bound, end + self.tails[lane][counts[lane]], end + partial.remaining[group] - duration[lane]
        )
        for other in self.lanes_of[group]:
            if other != lane and ready[other] < _NEVER:
                waits = max(ready[other], end) + duration[other] + self.tails[other][counts[other]]
                bound = max(bound, waits)
        return bound

    def _extend(self, partial: Partial, lane: int, start: float, bound: float, idle: float) -> Partial:
        problem = self.problem
        group, microbatch = problem.group[lane], partial.counts[lane]
        end = start + problem.duration[lane]
        counts = _with(partial.counts, lane, microbatch + 1)
        ends = _with(partial.ends, lane, (*partial.ends[lane], end))
        ready = list(partial.ready)
        for other in (lane, *self.users[lane]):
            if other == lane or counts[other] == microbatch:
                ready[other] = self._ready(other, counts, ends)
        return Partial(
            counts=counts,
            ends=ends,
            ready=tuple(ready),
            free=_with(partial.free, group, end),
            stored=_with(partial.stored, group, partial.stored[group] + problem.memory_change[lane]),
            starts=_with(partial.starts, group, min(start, partial.starts[group])),
            queues=self._queues(partial, lane),
            remaining=_with(partial.remaining, group, partial.remaining[group] - problem.duration[lane]),
            bound=bound,
            idle=idle,
            start=start,
            trail=(lane, partial),
        )

    def _queues(self, partial: Partial, lane: int) -> tuple[tuple[int, ...], ...]:
        queues = partial.queues
        if lane in self.edge_of:
            queues = _with(queues, self.edge_of[lane], queues[self.edge_of[lane]][1:])
        for user in self.users[lane]:
            if user in self.edge_of and self.problem.group[user] != self.problem.group[lane]:
                queues = _with(queues, self.edge_of[user], (*queues[self.edge_of[user]], user))
        return queues

    def _ready(self, lane: int, counts: Sequence[int], ends: Sequence[Sequence[float]]) -> float:
        microbatch = counts[lane]
        if microbatch == self.problem.num_microbatches:
            return _NEVER
        ready = 0.0
        for other, delay in self.problem.needs[lane]:
            if counts[other] <= microbatch:
                return _NEVER
            ready = max(ready, ends[other][microbatch] + delay)
        return ready

    def _dominated(self, partial: Partial, frontier: _Frontier, may_wait: bool = False) -> bool:
        """Whether a schedule in `frontier` has the same actions and is nowhere later. If not, adds this one to it."""
        times = [*partial.free, partial.start] if may_wait else list(partial.free)
        for lane, user in self.sends:
            times += partial.ends[lane][partial.counts[user] :]
        others = frontier.setdefault((partial.counts, partial.queues), [])
        if any(all(a <= b for a, b in zip(other, times, strict=True)) for other in others):
            return True
        others.append(tuple(times))
        return False


def _with(values: tuple[_Entry, ...], place: int, value: _Entry) -> tuple[_Entry, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _served(partial: Partial) -> list[int]:
    served: list[int] = []
    while partial.trail is not None:
        lane, partial = partial.trail
        served.append(lane)
    return served[::-1]


def _shared_edges(problem: Problem) -> dict[int, int]:
    """{lane: edge} of the lanes that share an edge (sending group, receiving group, kind) with another lane.

    Their messages must be received in the order of sending. If each group has one stage, every edge has one lane, whose
    microbatches are in order anyway.
    """
    lanes: dict[tuple[int, int, str], list[int]] = {}
    for lane, needs in enumerate(problem.needs):
        for other, _ in needs:
            if problem.group[other] != problem.group[lane]:
                edge = (problem.group[other], problem.group[lane], problem.lanes[lane][0])
                lanes.setdefault(edge, []).append(lane)
    shared = [receiving for receiving in lanes.values() if len(receiving) > 1]
    return {lane: edge for edge, receiving in enumerate(shared) for lane in receiving}


def _pairs(problem: Problem, group: int) -> list[tuple[int, int]]:
    """For every stage of a group, the lane that allocates memory and the lane that releases it."""
    lanes = [lane for lane, of in enumerate(problem.group) if of == group]
    allocating = [lane for lane in lanes if problem.memory_change[lane] > 0]
    return [(lane, next(i for i in problem.chain(lane) if problem.memory_change[i] < 0)) for lane in allocating]


def _room(problem: Problem, reserve: bool) -> list[float]:
    """Per lane, the most memory that its group may store when the lane is served."""
    room: list[float] = [_NEVER] * len(problem.lanes)
    for group, limit in enumerate(problem.limits):
        later = 0.0
        for lane in reversed([first for first, _ in _pairs(problem, group)]):
            room[lane] = limit * (1 + TOLERANCE) - problem.memory_change[lane] - later
            later += problem.memory_change[lane] if reserve else 0
    return room
