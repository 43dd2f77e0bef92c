"""What a schedule costs: makespan, bubble, activations in flight, transfers. Pure Python.

Groups work on one action at a time; a transfer occupies no group and delays only who waits for it. Transfers of one
pair of groups do not hinder each other.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flax_mesh.mpmd.schedules.schedule import Action, Schedule


class StageCost(NamedTuple):
    """Time that one microbatch takes on one stage, in any unit.

    `backward` is the half to the input and `weights` the half to the weights; a schedule that does not split them takes
    their sum. `transfer` delays what this stage sends to a stage on another group, forward or backward.
    """

    forward: float = 1.0
    backward: float = 1.0
    weights: float = 1.0
    transfer: float = 0.0


Costs = StageCost | Sequence[Sequence[float]]  # the same for every stage, or one (F, B, W[, T]) per stage


@dataclass(frozen=True)
class Simulation:
    """A schedule in time. Lists have one entry per group."""

    times: Mapping[Action, tuple[float, float]]  # {action: (start, end)}, sorted by start
    makespan: float
    busy: tuple[float, ...]
    peak_activations: tuple[int, ...]  # see `peak_activations`
    transfers: int  # values sent from one group to another

    @property
    def bubble(self) -> float:
        """Idle share of the groups' time, 1 - busy / makespan."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan) if self.makespan else 0.0


def simulate(schedule: Schedule, costs: Costs = StageCost()) -> Simulation:  # noqa: B008  a value, not a place
    """The schedule with every action as early as possible.

    ValueError where costs do not fit the stages, or where the rows wait for each other for ever.
    """
    stages = stage_costs(costs, schedule.num_stages)
    duration = action_duration(stages, schedule.splits_backward)
    times = schedule.times(duration, lambda sender, receiver: stages[sender].transfer)
    return Simulation(
        times=times,
        makespan=max((end for _, end in times.values()), default=0.0),
        busy=tuple(sum(map(duration, row)) for row in schedule.rows),
        peak_activations=peak_activations(schedule),
        transfers=_count_transfers(schedule),
    )


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """The most activations each group holds at once: one per forward whose backward is still to come.

    One activation is what one stage keeps for one microbatch; it is released at B, or at W where the backward is split.
    A group with two stages holds two per microbatch, each of half the size. Without backward nothing is held.
    """
    release = "W" if schedule.splits_backward else "B"
    peaks = []
    for row in schedule.rows:
        held = peak = 0
        for kind, _, _ in row if any(action.kind == release for action in row) else ():
            held += (kind == "F") - (kind == release)
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


def _count_transfers(schedule: Schedule) -> int:
    group_of, count = schedule.stage_to_group, 0
    for action in (action for row in schedule.rows for action in row):
        receiver = {"F": action.stage + 1, "B": action.stage - 1}.get(action.kind, -1)
        count += 0 <= receiver < len(group_of) and group_of[receiver] != group_of[action.stage]
    return count


def action_duration(stages: Sequence[StageCost], splits_backward: bool) -> Callable[[Action], float]:
    table = {("F", s): cost.forward for s, cost in enumerate(stages)}
    table |= {("B", s): cost.backward + (0 if splits_backward else cost.weights) for s, cost in enumerate(stages)}
    table |= {("W", s): cost.weights for s, cost in enumerate(stages)}
    return lambda action: table[action.kind, action.stage]


def stage_costs(costs: Costs, num_stages: int) -> tuple[StageCost, ...]:
    """One StageCost per stage; ValueError with every number that is none, and where there are too few or too many."""
    listed = [costs] * num_stages if isinstance(costs, StageCost) else list(costs)
    problems = []
    if len(listed) != num_stages:
        problems.append(f"there are {num_stages} stages, but costs of {len(listed)}; give one for all or one per stage")
    for stage, cost in enumerate(listed[:1] if isinstance(costs, StageCost) else listed):
        if not 3 <= len(cost) <= 4:
            problems.append(f"costs of stage {stage}: want F,B,W or F,B,W,T, got {len(cost)} numbers")
        elif not all(0 <= number < math.inf for number in cost):
            numbers = ",".join(f"{number:g}" for number in cost)
            problems.append(f"costs of stage {stage}: want finite numbers of at least 0, got {numbers}")
    if problems:
        raise ValueError("; ".join(problems))
    return tuple(StageCost(*map(float, cost)) for cost in listed)
