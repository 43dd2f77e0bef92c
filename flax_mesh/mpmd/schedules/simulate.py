"""Simulation of a schedule: makespan, bubble, peak activations, transfers. Pure Python.

A group runs one action at a time. A transfer occupies no group; it only delays the actions that depend on it.
Transfers run concurrently, also between the same two groups.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flax_mesh.fields import check_types
from flax_mesh.mpmd.schedules.schedule import Action, Schedule
from flax_mesh.text import at_most, shortened


class StageCost(NamedTuple):
    """Durations of one microbatch on one stage, in any unit of time.

    `backward` is the time for the gradients of the inputs, `weights` the time for the gradients of the weights. In a
    schedule that does not split the backward pass, B takes their sum. `transfer` is the time of sending an activation
    or a gradient from this stage to another group.
    """

    forward: float = 1.0
    backward: float = 1.0
    weights: float = 1.0
    transfer: float = 0.0


TOLERANCE = 1e-9  # relative, of sums of the same numbers in another order
LEAST_COST, MOST_COST = 1e-100, 1e100  # sums and quotients of these are finite numbers
Costs = StageCost | Sequence[Sequence[float]]  # one for all stages, or one (F, B, W[, T]) per stage


@dataclass(frozen=True)
class Simulation:
    """A simulated schedule. Tuples have one entry per group."""

    times: Mapping[Action, tuple[float, float]]  # {action: (start, end)}, sorted by start
    makespan: float
    period: float  # the longest time from the first to the last action of a group: the time between two steps
    busy: tuple[float, ...]
    peak_activations: tuple[int, ...]  # see `peak_activations`
    transfers: int  # values sent from one group to another

    @property
    def bubble(self) -> float:
        """Idle fraction of the groups' time, 1 - busy / makespan."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan) if self.makespan else 0.0


@check_types
def simulate(schedule: Schedule, costs: Costs = StageCost()) -> Simulation:  # noqa: B008  an immutable default
    """Simulates a schedule: every action starts as early as its row and its dependencies permit.

    An activation is stored from the start of F to the end of B, or to the end of W if the backward pass is split.

    Args:
        schedule: The schedule.
        costs: One `StageCost` for all stages, or one (F, B, W) or (F, B, W, T) per stage, in any unit of time. By
            default F, B and W take 1 each and transfers take no time.

    Returns:
        A `Simulation`: start and end of every action, makespan, period (in which a group can run one step after the
        other), busy time and peak activations per group, number of transfers, and `bubble`, the idle fraction. Times
        are in the unit of `costs`.

    Raises:
        ValueError: If `costs` does not fit the number of stages, or if the schedule deadlocks.

    Example:
        >>> from flax_mesh.mpmd.schedules import StageCost, make_schedule, simulate
        >>> result = simulate(make_schedule("1f1b", num_groups=4, num_microbatches=8), StageCost(transfer=0.5))
        >>> result.makespan, result.peak_activations, result.transfers
        (41.0, (4, 3, 2, 1), 48)
    """
    stages = stage_costs(costs, schedule.num_stages)
    duration = action_duration(stages, schedule.splits_backward)
    times = schedule.times(duration, lambda sender, receiver: stages[sender].transfer)
    return Simulation(
        times=times,
        makespan=max((end for _, end in times.values()), default=0.0),
        period=max((times[row[-1]][1] - times[row[0]][0] for row in schedule.rows if row), default=0.0),
        busy=tuple(sum(map(duration, row)) for row in schedule.rows),
        peak_activations=peak_activations(schedule),
        transfers=_count_transfers(schedule),
    )


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Maximum number of activations that each group stores at once.

    One activation is the memory of one stage for one microbatch, stored from its F until its B, or until its W if the
    backward pass is split. A group with two stages stores two activations per microbatch, each of half the size. A
    schedule without a backward pass stores no activation.
    """
    return tuple(map(round, peak_memory(schedule, (1,) * schedule.num_stages)))


def peak_memory(schedule: Schedule, sizes: Sequence[float]) -> tuple[float, ...]:
    """The maximum memory of each group, if one activation of stage s takes `sizes[s]`, in any unit such as bytes."""
    release = "W" if schedule.splits_backward else "B"
    peaks: list[float] = []
    for row in schedule.rows:
        stored = peak = 0
        for kind, stage, _ in row if any(action.kind == release for action in row) else ():
            stored += ((kind == "F") - (kind == release)) * sizes[stage]
            peak = max(peak, stored)
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
    """One StageCost per stage; a ValueError lists every invalid entry and a wrong number of entries."""
    listed = [costs] * num_stages if isinstance(costs, StageCost) else list(costs)
    problems: list[str] = []
    if len(listed) != num_stages:
        problems.append(
            f"expected costs of {num_stages} stages, got {len(listed)}; pass one for all stages or one per stage"
        )
    for stage, cost in enumerate(listed[:1] if isinstance(costs, StageCost) else listed):
        if not 3 <= len(cost) <= 4:
            problems.append(f"costs of stage {stage}: expected F,B,W or F,B,W,T, got {len(cost)} numbers")
        elif not all(number == 0 or LEAST_COST <= number <= MOST_COST for number in cost):
            numbers = ",".join(f"{float(number):g}" if abs(number) < MOST_COST else str(number) for number in cost)
            problems.append(
                f"costs of stage {stage}: expected 0 or numbers from {LEAST_COST:g} to {MOST_COST:g}, "
                f"got {shortened(numbers)}"
            )
    if problems:
        raise ValueError("; ".join(at_most(problems)))
    return tuple(StageCost(*map(float, cost)) for cost in listed)
