"""Schedules found by the search for 100 seeded sets of uneven costs: their gap to a lower bound, and how much faster
they are than the best named schedule that fits the memory.

    python -m tests.benchmarks schedules [--seconds 5] [--cases 100]
"""

import random
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

from flax_mesh.mpmd.schedules import StageCost, check_schedule, search_schedule
from tests.benchmarks.common.report import options, print_json


class Case(NamedTuple):
    seed: int
    costs: tuple[StageCost, ...]
    num_microbatches: int
    memory: int

    def __str__(self) -> str:
        return f"{self.seed}: S={len(self.costs)} M={self.num_microbatches} K={self.memory}"


def cases(count: int = 100) -> list[Case]:
    return [_case(seed) for seed in range(count)]


def _case(seed: int) -> Case:
    draw = random.Random(seed)
    num_stages = draw.choice((2, 3, 4, 5, 6, 7, 8, 8))
    unevenness = draw.uniform(0, 0.7)
    transfer = draw.choice((0, 0, 0.1, 0.5))
    costs = []
    for _ in range(num_stages):
        forward = draw.uniform(1 - unevenness, 1 + unevenness)
        halves = draw.uniform(0.8, 1.5), draw.uniform(0.5, 1.2)
        costs.append(StageCost(forward, forward * halves[0], forward * halves[1], transfer * draw.uniform(0.5, 1)))
    memory = draw.randint(1, 2 * num_stages)
    return Case(seed, tuple(costs), draw.choice((32, draw.randint(1, 32))), memory)


def summary(values: Sequence[float]) -> str:
    median, mean = statistics.median(values), statistics.mean(values)
    return f"median {median:.2%}, mean {mean:.2%}, largest {max(values):.2%} ({len(values)} cases)"


def main(arguments: Sequence[str] | None = None) -> int:
    given = options("schedules", arguments, seconds=5.0, cases=100)
    gaps, gains, times, slower = [], [], [], []
    print(f"{'case':>24} {'makespan':>9} {'gap':>7} {'faster':>7} than best named  seconds")
    for case in cases(given.cases):
        start = time.perf_counter()
        found = search_schedule(case.costs, case.memory, num_microbatches=case.num_microbatches, seconds=given.seconds)
        times.append(time.perf_counter() - start)
        check_schedule(found.schedule, case.memory)
        gaps.append(found.gap)
        gain = None
        if found.best_named_makespan is not None:
            gain = found.best_named_makespan / found.makespan - 1
            gains.append(gain)
            slower += [case.seed] if gain < 0 else []
        named = f"{gain:7.1%} {found.best_named}" if gain is not None else "      - none fits"
        print(f"{case!s:>24} {found.makespan:9.3f} {found.gap:7.2%} {named:26} {times[-1]:7.1f}", flush=True)
    proven = sum(gap < 1e-9 for gap in gaps)
    print(f"gap to the lower bound: {summary(gaps)}; {proven} of {len(gaps)} proven optimal")
    print(f"faster than the best named schedule that fits: {summary(gains)}; slower: {slower or 'none'}")
    figures = {"median_gap": statistics.median(gaps), "largest_gap": max(gaps), "proven": proven}
    figures |= {"median_gain": statistics.median(gains), "largest_gain": max(gains)}
    print_json("schedules", arguments, cases=len(gaps), longest_s=max(times), slower=slower, **figures)
    return 0
