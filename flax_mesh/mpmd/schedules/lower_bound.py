"""A lower bound on the makespan of every schedule of a pipeline. Pure Python.

All microbatches cost the same, so each stage can run them in order without loss. The actions of one kind and stage are
therefore one **lane**, and a schedule is the order in which each group serves its lanes.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flax_mesh.mpmd.schedules.schedule import Action, dependencies
from flax_mesh.mpmd.schedules.simulate import TOLERANCE, StageCost, action_duration


@dataclass(frozen=True)
class Problem:
    """The input of a search. Lanes are in topological order: a microbatch can pass through them from first to last."""

    num_microbatches: int
    lanes: tuple[tuple[str, int], ...]  # (kind, stage)
    group: tuple[int, ...]  # of each lane
    duration: tuple[float, ...]  # of one action of each lane
    needs: tuple[tuple[tuple[int, float], ...], ...]  # of each lane: (lane that it depends on, delay)
    memory_change: tuple[float, ...]  # the size of an activation that an action allocates; negative if it releases one
    limits: tuple[float, ...]  # of each group: its memory limit, in the unit of the sizes

    @property
    def num_groups(self) -> int:
        return len(self.limits)

    def users(self) -> list[list[int]]:
        """Maps each lane to the lanes that depend on it."""
        users: list[list[int]] = [[] for _ in self.lanes]
        for lane, needs in enumerate(self.needs):
            for needed, _ in needs:
                users[needed].append(lane)
        return users

    def chain(self, lane: int) -> list[int]:
        """The lanes of the same stage, in the order in which a microbatch passes through them."""
        return [other for other, (_, stage) in enumerate(self.lanes) if stage == self.lanes[lane][1]]

    def most_stored(self, lane: int) -> int:
        """The most activations of a lane's stage that its group can store. Optimistic: other stages are ignored."""
        size = max(self.memory_change[other] for other in self.chain(lane))
        if not size:
            return self.num_microbatches
        return math.floor(min(self.limits[self.group[lane]] * (1 + TOLERANCE) / size, self.num_microbatches))


def make_problem(
    stages: Sequence[StageCost],
    num_microbatches: int,
    stage_to_group: Sequence[int],
    limits: Sequence[float],
    splits_backward: bool = True,
    sizes: Sequence[float] = (),
) -> Problem:
    """The lanes of a pipeline. Without `splits_backward`, B takes the time of both halves and no lane has the kind W.

    `sizes` are the sizes of one activation of every stage; () if all are 1.
    """
    num_stages = len(stages)
    sizes = sizes or (1,) * num_stages
    lanes = [("F", s) for s in range(num_stages)] + [("B", s) for s in reversed(range(num_stages))]
    lanes += [("W", s) for s in range(num_stages)] if splits_backward else []
    place = {lane: i for i, lane in enumerate(lanes)}
    actions = [Action(kind, stage, microbatch=0) for kind, stage in lanes]

    def need(sender: Action, receiver: Action) -> tuple[int, float]:
        remote = stage_to_group[sender.stage] != stage_to_group[receiver.stage]
        return place[sender.kind, sender.stage], stages[sender.stage].transfer if remote else 0.0

    release = "W" if splits_backward else "B"
    return Problem(
        num_microbatches=num_microbatches,
        lanes=tuple(lanes),
        group=tuple(stage_to_group[s] for _, s in lanes),
        duration=tuple(map(action_duration(stages, splits_backward), actions)),
        needs=tuple(tuple(need(other, action) for other in dependencies(action, num_stages)) for action in actions),
        memory_change=tuple(((kind == "F") - (kind == release)) * sizes[s] for kind, s in lanes),
        limits=tuple(limits),
    )


def reverse(problem: Problem) -> Problem:
    """The same pipeline with time reversed: its schedules, read from the end, are the schedules of `problem`."""
    last = len(problem.lanes) - 1
    needs: list[list[tuple[int, float]]] = [[] for _ in problem.lanes]
    for lane, needed in enumerate(problem.needs):
        for other, delay in needed:
            needs[last - other].append((last - lane, delay))
    return replace(
        problem,
        lanes=problem.lanes[::-1],
        group=problem.group[::-1],
        duration=problem.duration[::-1],
        needs=tuple(map(tuple, needs)),
        memory_change=tuple(-change for change in reversed(problem.memory_change)),
    )


def heads(problem: Problem) -> list[list[float]]:
    """[lane][microbatch]: a lower bound on the start of that action.

    The longest path over the dependencies of the action, the actions before it in its lane, the actions that must
    release memory first, and all work of the same stage that must come first.
    """
    microbatches = range(problem.num_microbatches)
    starts = [[0.0 for _ in microbatches] for _ in problem.lanes]
    chains = [problem.chain(lane) for lane in range(len(problem.lanes))]
    memory = [problem.most_stored(lane) for lane in range(len(problem.lanes))]
    for m in microbatches:
        for lane, needs in enumerate(problem.needs):
            chain, freed = chains[lane], max(0, m + 1 - memory[lane])
            bounds = [starts[other][m] + problem.duration[other] + delay for other, delay in needs]
            if m or lane != chain[0]:
                place = chain.index(lane)
                counts = [m + 1] * place + [m] + [freed] * (len(chain) - place - 1)
                work = sum(problem.duration[other] * count for other, count in zip(chain, counts, strict=True))
                bounds.append(starts[chain[0]][0] + work)
            if m:
                bounds.append(starts[lane][m - 1] + problem.duration[lane])
            if freed and lane == chain[0]:
                bounds.append(starts[chain[-1]][freed - 1] + problem.duration[chain[-1]])
            starts[lane][m] = max(bounds, default=0.0)
    return starts


def tails(problem: Problem) -> list[list[float]]:
    """[lane][microbatch]: a lower bound on the time from the end of that action to the end of the schedule."""
    return [row[::-1] for row in reversed(heads(reverse(problem)))]


def lower_bound(problem: Problem) -> float:
    """A lower bound on the makespan of every schedule of `problem`.

    It is the maximum of two bounds. The first is the longest path: head + duration + tail of an action. The second is,
    per group, the makespan of its actions on one machine with preemption, given their heads and tails (Jackson's
    preemptive schedule; Carlier 1982).
    """
    first, after = heads(problem), tails(problem)
    jobs: list[list[tuple[float, float, float]]] = [[] for _ in problem.limits]
    for lane, group in enumerate(problem.group):
        for head, tail in zip(first[lane], after[lane], strict=True):
            jobs[group].append((head, problem.duration[lane], tail))
    paths = [sum(job) for of_group in jobs for job in of_group]
    return max([*paths, *map(_preemptive_makespan, jobs)])


def _preemptive_makespan(jobs: list[tuple[float, float, float]]) -> float:
    """The makespan of (head, duration, tail) jobs on one machine. The waiting job with the longest tail runs."""
    jobs = sorted(jobs)
    waiting: list[tuple[float, float]] = []  # (-tail, remaining duration)
    time, longest, arrived = 0.0, 0.0, 0
    while waiting or arrived < len(jobs):
        if not waiting:
            time = max(time, jobs[arrived][0])
        while arrived < len(jobs) and jobs[arrived][0] <= time:
            heapq.heappush(waiting, (-jobs[arrived][2], jobs[arrived][1]))
            arrived += 1
        tail, remaining = heapq.heappop(waiting)
        until = jobs[arrived][0] if arrived < len(jobs) else float("inf")
        if time + remaining <= until:
            time += remaining
            longest = max(longest, time - tail)
        else:
            heapq.heappush(waiting, (tail, remaining - (until - time)))
            time = until
    return longest
