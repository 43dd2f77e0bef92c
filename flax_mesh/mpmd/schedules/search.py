"""Search for a fast schedule, given the measured costs of uneven stages and a memory limit. Pure Python."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from flax_mesh.mpmd.schedules.beam import TOLERANCE, BeamSearch
from flax_mesh.mpmd.schedules.lower_bound import Problem, lower_bound, make_problem, reverse
from flax_mesh.mpmd.schedules.schedule import SCHEDULE_NAMES, Action, Schedule, make_schedule
from flax_mesh.mpmd.schedules.simulate import StageCost, peak_activations, simulate, stage_costs
from flax_mesh.mpmd.schedules.validate import memory_limits

WORK_PER_SECOND = 15_000  # partial schedules; an idle two-core machine of 2024 evaluates twice as many
WIDTHS = (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000)


@dataclass(frozen=True)
class SearchResult:
    """The best schedule found. `best_named` is None if no named schedule has these stages and fits the memory limit."""

    schedule: Schedule
    makespan: float
    lower_bound: float  # no schedule with these costs, microbatches, groups and memory is faster
    optimal: bool  # proven: the makespan is that of the lower bound
    best_named: str | None
    best_named_makespan: float | None

    @property
    def gap(self) -> float:
        """(makespan - lower_bound) / lower_bound: an upper bound on the relative distance from the optimum."""
        return self.makespan / self.lower_bound - 1 if self.lower_bound else 0.0


def search_schedule(
    costs: Sequence[Sequence[float]],
    memory_limit: int | Sequence[int] | None = None,
    *,
    num_microbatches: int,
    num_groups: int | None = None,
    splits_backward: bool = True,
    seconds: float = 5.0,
    seed: int = 0,
) -> SearchResult:
    """Searches for a schedule of minimal makespan within a memory limit.

    A beam search extends partial schedules, ranked by a lower bound on their makespan; see `beam.py`. The result is
    never slower than a named schedule that fits the memory limit. It is a deterministic function of the arguments:
    `seconds` is converted into a number of partial schedules at a fixed rate. The search stops early if the schedule is
    proven optimal.

    Args:
        costs: (F, B, W) or (F, B, W, T) of every stage, in any unit of time; see `StageCost`.
        memory_limit: Maximum number of activations per group, as counted by `peak_activations`: one number for all
            groups or one per group. None: no limit.
        num_microbatches: Microbatches per step.
        num_groups: Groups of devices; None: one per stage. With fewer groups than stages, each group runs several
            stages, placed as in interleaved-1f1b or, for two per group, as in zb-v if that is faster.
        splits_backward: Whether W is an action of its own. If False, B takes the time of both halves.
        seconds: Approximate upper bound on the search time of one two-core machine.
        seed: Seed of the random weights in the ranking.

    Returns:
        A `SearchResult`: the schedule, its makespan, a lower bound, and the fastest named schedule that fits.

    Raises:
        ValueError: If the arguments are inconsistent, or no schedule fits the memory limit. The message contains the
            minimum memory limit.

    Example:
        >>> from flax_mesh.mpmd.schedules import search_schedule
        >>> costs = [(1, 1.5, 1), (1, 1, 1), (2, 2, 1), (1, 2.5, 2)]
        >>> found = search_schedule(costs, memory_limit=4, num_microbatches=8)
        >>> found.makespan, found.optimal, found.best_named, found.best_named_makespan
        (48.0, True, 'zb-h1', 49.0)
    """
    stages = stage_costs(costs, len(costs))
    num_groups = len(stages) if num_groups is None else num_groups
    problems = [f"num_microbatches must be at least 1, got {num_microbatches}"] if num_microbatches < 1 else []
    if not stages:
        problems.append("costs is empty; pass (F, B, W[, T]) for every stage")
    elif num_groups < 1 or len(stages) % num_groups:
        problems.append(f"{len(stages)} stages cannot be divided evenly over {num_groups} groups")
    if seconds <= 0:
        problems.append(f"seconds must be more than 0, got {seconds:g}")
    if problems:
        raise ValueError("; ".join(problems))
    virtual = len(stages) // num_groups
    limits = memory_limits(virtual * num_microbatches if memory_limit is None else memory_limit, num_groups)
    if min(limits) < virtual:
        each = "1 activation" if virtual == 1 else f"{virtual} activations, 1 per stage"
        raise ValueError(f"no schedule fits a memory limit of {min(limits)}: a group requires at least {each}")
    placements = [tuple(range(num_groups)) * virtual]
    if virtual == 2 and num_groups > 1:
        placements.append((*range(num_groups), *reversed(range(num_groups))))  # the placement of zb-v
    work = int(seconds * WORK_PER_SECOND / len(placements))
    results = []
    for stage_to_group in placements:
        problem = make_problem(stages, num_microbatches, stage_to_group, limits, splits_backward)
        results.append(_search_placement(problem, stages, stage_to_group, work, seed))
    best = min(results, key=lambda result: result.makespan)
    bound = min(result.lower_bound for result in results)
    with_named = (result for result in results if result.best_named is not None)
    named = min(with_named, key=lambda result: result.best_named_makespan or 0.0, default=best)
    return replace(
        best,
        lower_bound=bound,
        optimal=best.makespan <= bound * (1 + TOLERANCE),
        best_named=named.best_named,
        best_named_makespan=named.best_named_makespan,
    )


def _search_placement(
    problem: Problem, stages: Sequence[StageCost], stage_to_group: Sequence[int], most_work: int, seed: int
) -> SearchResult:
    times = {schedule: simulate(schedule, stages).makespan for schedule in _named(problem, stage_to_group)}
    named = min(times, key=times.__getitem__, default=None)
    # The fallback runs one microbatch after another: slow, but it fits whenever any schedule fits.
    one_by_one = list(range(len(problem.lanes))) * problem.num_microbatches
    best = named or _schedule(problem, stage_to_group, one_by_one, backwards=False)
    makespan, bound = simulate(best, stages).makespan, lower_bound(problem)
    searches = {False: BeamSearch(problem), True: BeamSearch(reverse(problem))}
    for width, backwards, weight, reserve in _plans(seed, several=len(stages) > problem.num_groups):
        if makespan <= bound * (1 + TOLERANCE) or most_work <= 0:
            break
        search = searches[backwards]
        found = search.run(width, weight=weight, better_than=makespan, most_work=most_work, reserve=reserve)
        most_work -= found.work
        if found.served:
            best = _schedule(problem, stage_to_group, found.served, backwards)
            makespan = simulate(best, stages).makespan
        if found.complete and len(stages) == problem.num_groups:
            bound = makespan  # the search was exhaustive: see beam.py
    optimal = makespan <= bound * (1 + TOLERANCE)
    return SearchResult(best, makespan, bound, optimal, named and named.name, times[named] if named else None)


def _plans(seed: int, several: bool) -> Iterator[tuple[int, bool, float, bool]]:
    """(width, backwards, weight of idle time, reserve) of successive beam searches, with growing width.

    `several`: groups have several stages, so that reserving memory for the later ones makes a difference.
    """
    choose = random.Random(seed)
    for width in WIDTHS:
        for backwards, least in itertools.product((False, True), (0.01, 0.1)):
            for reserve in (True, False) if several else (False,):
                yield width, backwards, least * 3 ** choose.random(), reserve


def _named(problem: Problem, stage_to_group: Sequence[int]) -> list[Schedule]:
    found = []
    virtual = len(stage_to_group) // problem.num_groups
    for name in SCHEDULE_NAMES:
        sizes = {"num_groups": problem.num_groups, "num_microbatches": problem.num_microbatches}
        try:
            schedule = make_schedule(name, **sizes, num_virtual_stages=virtual)
        except ValueError:  # not defined for these sizes
            continue
        fits = all(peak <= limit for peak, limit in zip(peak_activations(schedule), problem.limits, strict=True))
        splits = any(kind == "W" for kind, _ in problem.lanes)
        if fits and schedule.stage_to_group == tuple(stage_to_group) and (splits or not schedule.splits_backward):
            found.append(schedule)
    return found


def _schedule(problem: Problem, stage_to_group: Sequence[int], served: Sequence[int], backwards: bool) -> Schedule:
    """The schedule that serves lanes in this order. `backwards`: order and lanes are those of the reversed problem."""
    if backwards:
        served = [len(problem.lanes) - 1 - lane for lane in reversed(served)]
    counts = [0] * len(problem.lanes)
    rows: list[list[Action]] = [[] for _ in problem.limits]
    for lane in served:
        rows[problem.group[lane]].append(Action(*problem.lanes[lane], counts[lane]))
        counts[lane] += 1
    splits = any(kind == "W" for kind, _ in problem.lanes)
    return Schedule("search", tuple(map(tuple, rows)), tuple(stage_to_group), splits)
