"""Search for a fast schedule, given the measured costs of uneven stages and a memory limit. Pure Python."""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flax_mesh.mpmd.schedules.beam import TOLERANCE, BeamSearch
from flax_mesh.mpmd.schedules.lower_bound import Problem, lower_bound, make_problem, reverse
from flax_mesh.mpmd.schedules.schedule import SCHEDULE_NAMES, Action, Schedule, check_size, make_schedule
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
    interrupted: bool = False  # by Ctrl-C

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
    proven optimal. Ctrl-C (KeyboardInterrupt) ends it as well; the result is then the best schedule so far.

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
    if not 0 < seconds < math.inf:
        problems.append(f"seconds must be more than 0 and finite, got {seconds:g}")
    if problems:
        raise ValueError("; ".join(problems))
    check_size(len(stages), num_microbatches)
    virtual = len(stages) // num_groups
    limits = memory_limits(virtual * num_microbatches if memory_limit is None else memory_limit, num_groups)
    if min(limits) < virtual:
        each = "1 activation" if virtual == 1 else f"{virtual} activations, 1 per stage"
        raise ValueError(f"no schedule fits a memory limit of {min(limits)}: a group requires at least {each}")
    placements = [tuple(range(num_groups)) * virtual]
    if virtual == 2 and num_groups > 1:
        placements.append((*range(num_groups), *reversed(range(num_groups))))  # the placement of zb-v
    searches = [
        _Search(make_problem(stages, num_microbatches, stage_to_group, limits, splits_backward), stages, stage_to_group)
        for stage_to_group in placements
    ]
    interrupted = False
    try:
        for search in searches:
            search.try_named()
        for search in searches:
            search.improve_bound()
        for search in searches:
            search.improve_schedule(seconds * WORK_PER_SECOND / len(searches), seed)
    except KeyboardInterrupt:
        interrupted = True
    best = min(searches, key=lambda search: search.makespan)
    bound = min(search.bound for search in searches)
    named = min(
        (search.named for search in searches if search.named is not None), key=lambda found: found[1], default=None
    )
    return SearchResult(
        schedule=best.schedule,
        makespan=best.makespan,
        lower_bound=bound,
        optimal=best.makespan <= bound * (1 + TOLERANCE),
        best_named=named and named[0],
        best_named_makespan=named and named[1],
        interrupted=interrupted,
    )


class _Search:
    """The best schedule of one placement and a lower bound so far. Both are valid whenever a method is interrupted."""

    def __init__(self, problem: Problem, stages: Sequence[StageCost], stage_to_group: Sequence[int]):
        self.problem, self.stages, self.stage_to_group = problem, stages, stage_to_group
        self.named: tuple[str, float] | None = None  # the fastest named schedule
        # One microbatch after another: slow, but it fits whenever any schedule fits.
        one_by_one = list(range(len(problem.lanes))) * problem.num_microbatches
        self.schedule = _schedule(problem, stage_to_group, one_by_one, backwards=False)
        self.makespan = simulate(self.schedule, stages).makespan
        work = [0.0] * problem.num_groups
        for group, duration in zip(problem.group, problem.duration, strict=True):
            work[group] += duration * problem.num_microbatches
        self.bound = max(work) * (1 - TOLERANCE)

    def try_named(self) -> None:
        for schedule in _named(self.problem, self.stage_to_group):
            makespan = simulate(schedule, self.stages).makespan
            if self.named is None or makespan < self.named[1]:
                self.named = schedule.name, makespan
                if makespan <= self.makespan:
                    self.schedule, self.makespan = schedule, makespan

    def improve_bound(self) -> None:
        self.bound = max(self.bound, lower_bound(self.problem))

    def improve_schedule(self, most_work: float, seed: int) -> None:
        searches = {False: BeamSearch(self.problem), True: BeamSearch(reverse(self.problem))}
        several = len(self.stages) > self.problem.num_groups
        for width, backwards, weight, reserve in _plans(seed, several=several):
            if self.makespan <= self.bound * (1 + TOLERANCE) or most_work <= 0:
                break
            found = searches[backwards].run(
                width, weight=weight, better_than=self.makespan, most_work=most_work, reserve=reserve
            )
            most_work -= found.work
            if found.served:
                schedule = _schedule(self.problem, self.stage_to_group, found.served, backwards)
                self.schedule, self.makespan = schedule, simulate(schedule, self.stages).makespan
            if found.complete and not several:
                self.bound = self.makespan  # the search was exhaustive: see beam.py


def _plans(seed: int, several: bool) -> Iterator[tuple[int, bool, float, bool]]:
    """(width, backwards, weight of idle time, reserve) of successive beam searches, with growing width.

    `several`: groups have several stages, so that reserving memory for the later ones makes a difference.
    """
    choose = random.Random(seed)
    for width in WIDTHS:
        for backwards, least in itertools.product((False, True), (0.01, 0.1)):
            for reserve in (True, False) if several else (False,):
                yield width, backwards, least * 3 ** choose.random(), reserve


def _named(problem: Problem, stage_to_group: Sequence[int]) -> Iterator[Schedule]:
    """The named schedules that have this placement and fit the memory, and the V schedule of this memory limit."""
    virtual = len(stage_to_group) // problem.num_groups
    limit = min(min(problem.limits), 2 * problem.num_groups)
    for name in (*SCHEDULE_NAMES, f"v-{limit}"):
        sizes = {"num_groups": problem.num_groups, "num_microbatches": problem.num_microbatches}
        try:
            schedule = make_schedule(name, **sizes, num_virtual_stages=virtual)
        except ValueError:  # not defined for these sizes
            continue
        fits = all(peak <= limit for peak, limit in zip(peak_activations(schedule), problem.limits, strict=True))
        splits = any(kind == "W" for kind, _ in problem.lanes)
        if fits and schedule.stage_to_group == tuple(stage_to_group) and (splits or not schedule.splits_backward):
            yield schedule


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
