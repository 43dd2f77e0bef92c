"""Search for a fast schedule, given the measured costs of uneven stages and a memory limit. Pure Python."""

import itertools
import math
import operator
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flax_mesh.fields import check_types
from flax_mesh.mpmd.schedules.beam import BeamSearch
from flax_mesh.mpmd.schedules.lower_bound import Problem, lower_bound, make_problem, reverse
from flax_mesh.mpmd.schedules.schedule import SCHEDULE_NAMES, Action, Schedule, check_size, make_schedule
from flax_mesh.mpmd.schedules.simulate import TOLERANCE, Simulation, StageCost, peak_memory, simulate, stage_costs
from flax_mesh.mpmd.schedules.validate import activation_sizes_of, memory_limits
from flax_mesh.text import count_text, shown

_WORK_PER_SECOND = 15_000  # partial schedules; an idle two-core machine of 2024 evaluates twice as many
_WIDTHS = (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000)
_OBJECTIVES = ("makespan", "period")


@dataclass(frozen=True)
class SearchResult:
    """The best schedule found. `best_named` is None if no named schedule has these stages and fits the memory limit."""

    schedule: Schedule
    makespan: float
    period: float
    lower_bound: float  # no schedule with these costs, microbatches, groups and memory has a smaller objective
    optimal: bool  # proven: the objective equals the lower bound
    best_named: str | None  # by the objective
    best_named_makespan: float | None
    best_named_period: float | None
    objective: str = "makespan"
    interrupted: bool = False  # by Ctrl-C

    @property
    def gap(self) -> float:
        """(objective - lower_bound) / lower_bound: an upper bound on the relative distance from the optimum."""
        objective = self.period if self.objective == "period" else self.makespan
        return objective / self.lower_bound - 1 if self.lower_bound else 0.0


@check_types
def search_schedule(
    costs: Sequence[Sequence[float]],
    memory_limit: float | Sequence[float] | None = None,
    *,
    num_microbatches: int,
    num_groups: int | None = None,
    stage_to_group: Sequence[int] | None = None,
    activation_sizes: Sequence[float] | None = None,
    splits_backward: bool = True,
    objective: str = "makespan",
    seconds: float = 5.0,
    seed: int = 0,
) -> SearchResult:
    """Searches for a schedule of minimal makespan, or period, within a memory limit, by a beam search (`beam.py`).

    The result is never slower than a named schedule that fits the memory limit, including the V schedule of that limit.
    It is a deterministic function of the arguments: `seconds` is converted into a number of partial schedules at a
    fixed rate. The search stops early if the schedule is proven optimal. Ctrl-C (KeyboardInterrupt) ends it as well;
    the result is then the best schedule so far.

    Args:
        costs: (F, B, W) or (F, B, W, T) of every stage, in any unit of time; see `StageCost`.
        memory_limit: Maximum number of activations per group, as counted by `peak_activations`: one number for all
            groups or one per group. None: no limit.
        activation_sizes: The size of an activation of every stage, in the unit of `memory_limit`, such as bytes. None:
            all are 1.
        num_microbatches: Microbatches per step.
        num_groups: Groups of devices; None: one per stage. With fewer groups than stages, each group runs several
            stages, placed as in interleaved-1f1b or, for two per group, as in zb-v if that is faster.
        stage_to_group: The group of every stage. None: the search chooses the placement.
        splits_backward: Whether W is a separate action. If False, B takes the time of both halves.
        objective: "makespan", or "period", the time between two steps if a group starts the next one while others
            finish: the longest time from the first to the last action of a group.
        seconds: Approximate upper bound on the search time of one two-core machine.
        seed: Seed of the random weights in the ranking.

    Returns:
        A `SearchResult`, with a lower bound of the objective and the fastest named schedule that fits.

    Raises:
        ValueError: The arguments are inconsistent, or the memory limit is below the minimum, which is in the message.

    Example:
        >>> from flax_mesh.mpmd.schedules import search_schedule
        >>> costs = [(1, 1.5, 1), (1, 1, 1), (2, 2, 1), (1, 2.5, 2)]
        >>> result = search_schedule(costs, memory_limit=4, num_microbatches=8)
        >>> result.makespan, result.optimal, result.best_named, result.best_named_makespan
        (48.0, True, 'zb-h1', 49.0)
    """
    stages = stage_costs(costs, len(costs))
    num_groups = len(stages) if num_groups is None else num_groups
    num_microbatches = operator.index(num_microbatches)  # also an integer of numpy
    _check_numbers(len(stages), num_microbatches, num_groups, stage_to_group, objective, seconds)
    check_size(len(stages), num_microbatches)
    sizes = activation_sizes_of(activation_sizes, len(stages))
    # Without a limit: the memory of all activations at once, which no schedule exceeds.
    limits = memory_limits(math.fsum(sizes) * num_microbatches if memory_limit is None else memory_limit, num_groups)
    searches: list[_Search] = []
    for placement in _that_fit(_placements(len(stages), num_groups, stage_to_group), sizes, limits):
        problem = make_problem(stages, num_microbatches, placement, limits, splits_backward, sizes)
        searches.append(_Search(problem, stages, placement, sizes, objective))
    return _result(searches, _run(searches, seconds, seed))


def _result(searches: Sequence["_Search"], interrupted: bool) -> SearchResult:
    best = min(searches, key=lambda search: search.value)
    bound = min(search.bound for search in searches)  # the bound of a placement holds for it only
    named = min((search for search in searches if search.named), key=lambda search: search.named_value, default=None)
    return SearchResult(
        schedule=best.schedule,
        makespan=best.simulated.makespan,
        period=best.simulated.period,
        lower_bound=bound,
        optimal=best.value[0] <= bound * (1 + TOLERANCE),
        best_named=named and named.named,
        best_named_makespan=named and named.of_named.makespan,
        best_named_period=named and named.of_named.period,
        objective=best.objective,
        interrupted=interrupted,
    )


def _check_numbers(
    num_stages: int,
    num_microbatches: int,
    num_groups: int,
    stage_to_group: Sequence[int] | None,
    objective: str,
    seconds: float,
) -> None:
    """ValueError with every argument that does not fit the others."""
    problems = [f"num_microbatches must be at least 1, got {num_microbatches}"] if num_microbatches < 1 else []
    if not num_stages:
        problems.append("costs is empty; pass (F, B, W[, T]) for every stage")
    elif num_groups < 1 or num_stages % num_groups:
        problems.append(f"{num_stages} stages cannot be divided evenly over {num_groups} groups")
    if not 0 < seconds < math.inf:
        problems.append(f"seconds must be more than 0 and finite, got {seconds:g}")
    virtual = num_stages // max(1, num_groups)
    if stage_to_group is not None and sorted(stage_to_group) != sorted([*range(num_groups)] * virtual):
        problems.append(
            f"stage_to_group must contain each of {num_groups} groups {virtual} times, got {stage_to_group}"
        )
    if objective not in _OBJECTIVES:
        problems.append(f"objective must be {' or '.join(_OBJECTIVES)}, got {shown(objective)}")
    if problems:
        raise ValueError("; ".join(problems))


def _placements(num_stages: int, num_groups: int, stage_to_group: Sequence[int] | None) -> list[tuple[int, ...]]:
    """The placements to try: the given one, or those of the named schedules."""
    if stage_to_group is not None:
        return [tuple(stage_to_group)]
    virtual = num_stages // num_groups
    in_turn = tuple(range(num_groups)) * virtual
    if virtual != 2 or num_groups == 1:
        return [in_turn]
    return [in_turn, (*range(num_groups), *reversed(range(num_groups)))]  # the placement of the V schedules


def _run(searches: Sequence["_Search"], seconds: float, seed: int) -> bool:
    """Run all searches within `seconds`. Returns whether Ctrl-C has ended them.

    Ctrl-C may stop the search at any point. The named schedules and the bounds of all placements therefore come
    before the beam searches, which take most of the time.
    """
    try:
        for search in searches:
            search.try_named()
        for search in searches:
            search.improve_bound()
        for search in searches:
            search.improve_schedule(seconds * _WORK_PER_SECOND / len(searches), seed)
    except KeyboardInterrupt:
        return True
    return False


def _that_fit(
    placements: Sequence[tuple[int, ...]], sizes: Sequence[float], limits: Sequence[float]
) -> list[tuple[int, ...]]:
    """The placements in which every group can store one microbatch of its stages. ValueError if none fits."""
    fitting: list[tuple[int, ...]] = []
    problem = ""
    for placement in placements:
        least = [0.0] * len(limits)
        for stage, group in enumerate(placement):
            least[group] += sizes[stage]
        short = [g for g, limit in enumerate(limits) if limit * (1 + TOLERANCE) < least[g]]
        if not short:
            fitting.append(placement)
            continue
        group = short[0]
        count = placement.count(group)
        each = count_text(count, "activation") + (", 1 per stage" if count > 1 else "")
        needed = each if set(sizes) == {1} else f"{least[group]:.15g} for one microbatch"
        problem = f"no schedule fits a memory limit of {limits[group]:.15g}: a group requires at least {needed}"
    if not fitting:
        raise ValueError(problem)
    return fitting


class _Search:
    """The best schedule of one placement and a lower bound so far. Both are valid whenever a method is interrupted."""

    def __init__(
        self,
        problem: Problem,
        stages: Sequence[StageCost],
        stage_to_group: Sequence[int],
        sizes: Sequence[float],
        objective: str,
    ):
        self.problem, self.stages, self.stage_to_group, self.sizes = problem, stages, stage_to_group, sizes
        self.objective = objective
        self.named: str | None = None  # the fastest named schedule
        # One microbatch after another: slow, but it fits whenever any schedule fits.
        one_by_one = list(range(len(problem.lanes))) * problem.num_microbatches
        self.schedule = _schedule(problem, stage_to_group, one_by_one, backwards=False)
        self.simulated = self.of_named = simulate(self.schedule, stages)
        work = [0.0] * problem.num_groups
        for group, duration in zip(problem.group, problem.duration, strict=True):
            work[group] += duration * problem.num_microbatches
        self.bound = max(work) * (1 - TOLERANCE)

    @property
    def value(self) -> tuple[float, float]:
        return self._value(self.simulated)

    @property
    def named_value(self) -> tuple[float, float]:
        return self._value(self.of_named)

    def _value(self, simulated: Simulation) -> tuple[float, float]:
        """(makespan, period), the objective first: of schedules with equal objectives, the other value decides."""
        makespan, period = simulated.makespan, simulated.period
        return (makespan, period) if self.objective == "makespan" else (period, makespan)

    def try_named(self) -> None:
        for schedule in _named(self.problem, self.stage_to_group, self.sizes):
            simulated = simulate(schedule, self.stages)
            if self.named is None or self._value(simulated) < self.named_value:
                self.named, self.of_named = schedule.name, simulated
                if self.named_value <= self.value:
                    self.schedule, self.simulated = schedule, simulated

    def improve_bound(self) -> None:
        if self.objective == "makespan":
            self.bound = max(self.bound, lower_bound(self.problem))

    def improve_schedule(self, most_work: float, seed: int) -> None:
        searches = {
            False: BeamSearch(self.problem, self.objective),
            True: BeamSearch(reverse(self.problem), self.objective),
        }
        several = len(self.stages) > self.problem.num_groups
        for width, backwards, weight, reserve, may_wait in _plans(seed, several=several):
            if self.value[0] <= self.bound * (1 + TOLERANCE) or most_work <= 0:
                break
            result = searches[backwards].run(
                width,
                weight=weight,
                better_than=self.value[0],
                most_work=most_work,
                reserve=reserve,
                may_wait=may_wait,
            )
            most_work -= result.work
            if result.served:
                schedule = _schedule(self.problem, self.stage_to_group, result.served, backwards)
                simulated = simulate(schedule, self.stages)
                if self._value(simulated) < self.value:
                    self.schedule, self.simulated = schedule, simulated
            if result.complete and (may_wait or not several) and self.objective == "makespan":
                self.bound = self.simulated.makespan  # the search was exhaustive: see beam.py


def _plans(seed: int, several: bool) -> Iterator[tuple[int, bool, float, bool, bool]]:
    """(width, backwards, weight of idle time, reserve, may wait) of successive beam searches, with growing width.

    `several`: groups have several stages, so that reserving memory for the later ones, and waiting for an action that
    is more urgent, make a difference.
    """
    choose = random.Random(int(seed))
    for width in _WIDTHS:
        for backwards, least in itertools.product((False, True), (0.01, 0.1)):
            for reserve in (True, False) if several else (False,):
                yield width, backwards, least * 3 ** choose.random(), reserve, False
        if several:
            yield width, False, 0.01 * 3 ** choose.random(), False, True


def _named(problem: Problem, stage_to_group: Sequence[int], sizes: Sequence[float]) -> Iterator[Schedule]:
    """The named schedules that have this placement and fit the memory, and the V schedules of this memory limit."""
    virtual = len(stage_to_group) // problem.num_groups
    least, most = (min(problem.limits) * (1 + TOLERANCE) / max(size, TOLERANCE) for size in (max(sizes), min(sizes)))
    limits = range(math.floor(least), min(math.floor(most), 2 * problem.num_groups) + 1) or [2 * problem.num_groups]
    for name in (*SCHEDULE_NAMES, *(f"v-{limit}" for limit in limits)):
        counts = {"num_groups": problem.num_groups, "num_microbatches": problem.num_microbatches}
        try:
            schedule = make_schedule(name, **counts, num_virtual_stages=virtual)
        except ValueError:  # not defined for these sizes
            continue
        peaks = zip(peak_memory(schedule, sizes), problem.limits, strict=True)
        fits = all(peak <= limit * (1 + TOLERANCE) for peak, limit in peaks)
        splits = any(kind == "W" for kind, _ in problem.lanes)
        if fits and schedule.stage_to_group == tuple(stage_to_group) and (splits or not schedule.splits_backward):
            yield schedule


def _schedule(problem: Problem, stage_to_group: Sequence[int], served: Sequence[int], backwards: bool) -> Schedule:
    """The schedule that serves lanes in this order. If `backwards`, `served` is a result of the search
    of the reversed problem."""
    if backwards:
        served = [len(problem.lanes) - 1 - lane for lane in reversed(served)]
    counts = [0] * len(problem.lanes)
    rows: list[list[Action]] = [[] for _ in problem.limits]
    for lane in served:
        rows[problem.group[lane]].append(Action(*problem.lanes[lane], counts[lane]))
        counts[lane] += 1
    splits = any(kind == "W" for kind, _ in problem.lanes)
    return Schedule("search", tuple(map(tuple, rows)), tuple(stage_to_group), splits)
