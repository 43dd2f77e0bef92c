"""Whether the processes of a pipeline run concurrently: one process per group, on this machine.

"overlap": stages that sleep, as in the benchmark of that name; the median step time over the makespan of the schedule.
"cores": real matrix products in two processes, each pinned to a core, compared with one process with both groups pinned
to one core, best of `--repeats`. With M microbatches and two groups the ideal is 2M / (M + 1). Requires two idle cores.

    python -m tests.benchmarks processes [--processes 2,4] [--ms 50] [--microbatches 8] [--steps 7] [--cores]
"""

import argparse
import json
import os
import re
import statistics
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from tests.benchmarks import overlap
from tests.benchmarks.common.pipelines import make_pipeline, random_batch, times_of_steps
from tests.benchmarks.common.report import options, report, use_cpu
from tests.multiprocess.processes import free_port, join, run_all

LIMIT_S = 300
WIDTH, ROWS, LAYERS = 512, 256, 8


def start_workers(count: int, what: str, given: argparse.Namespace, devices: int = 1) -> list[Any]:
    """Run `count` processes and return their results, one dict each."""
    port = free_port()
    command = ["-m", "tests.benchmarks", "processes", f"--ms={given.ms}", f"--microbatches={given.microbatches}"]
    workers = [f"--worker={what}:{index}:{count}:{port}:{devices}" for index in range(count)]
    ended = run_all([[*command, f"--steps={given.steps}", worker] for worker in workers], LIMIT_S)
    if failed := [one for one in ended if one.code]:
        raise RuntimeError(f"{what}: exit codes {[one.code for one in ended]}\n{failed[0].output}")
    return [json.loads(re.findall(r"^{.*}$", one.output, re.MULTILINE)[-1]) for one in ended]


def work(what: str, index: int, count: int, port: int, devices: int, given: argparse.Namespace) -> None:
    """One process: prints its result as JSON."""
    if what == "cores":
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[index]})
    if count > 1:
        join(index, count, port, devices)
    else:
        use_cpu(devices)
    if what == "cores":
        print(json.dumps(real_steps(given.microbatches, given.steps)))
    elif reason := overlap.load_nap():
        print(json.dumps({"skipped": reason}))
    else:
        print(json.dumps(overlap.measure(what, given.ms, given.microbatches, given.steps, count)))


def real_steps(count: int, steps: int) -> dict[str, float]:
    """Median and best step time of two groups that multiply matrices, in milliseconds."""
    batch = random_batch(count * ROWS, WIDTH)
    make = lambda: overlap.Net(LAYERS, lambda x, w: jax.nn.tanh(x @ w), nnx.Rngs(0), WIDTH)  # noqa: E731
    pipeline = make_pipeline(make, overlap.loss_fn, batch, "1f1b", 2, count, rate=1e-3)
    took, _ = times_of_steps(pipeline, batch, steps)
    return {"median_ms": statistics.median(took), "best_ms": min(took)}


def compare_overlap(given: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per number of processes and schedule; none if the op cannot be built."""
    rows: list[dict[str, Any]] = []
    for count in given.processes:
        for name in given.schedules:
            found = start_workers(count, name, given)
            if "skipped" in found[0]:
                print(f"skipped: {found[0]['skipped']}")
                return []
            slowest = max(found, key=lambda one: one["step_ms"])  # a step ends when all processes have ended it
            rows.append({"processes": count, "schedule": name, **slowest})
    return rows


def compare_cores(given: argparse.Namespace) -> list[dict[str, Any]]:
    best = {1: float("inf"), 2: float("inf")}
    for _ in range(given.repeats):
        for count in best:
            found = start_workers(count, "cores", given, devices=2 // count)
            best[count] = min(best[count], max(one["best_ms"] for one in found))
    ideal = 2 * given.microbatches / (given.microbatches + 1)
    return [{"one core ms": best[1], "two cores ms": best[2], "times as fast": best[1] / best[2], "ideal": ideal}]


def main(arguments: Sequence[str] | None = None) -> int:
    figures = {"processes": (2, 4), "ms": 50.0, "microbatches": 8, "steps": 7, "schedules": ("1f1b", "zb-h1")}
    given = options("processes", arguments, **figures, cores=False, repeats=5, worker="")
    if given.worker:
        what, *numbers = given.worker.split(":")
        index, count, port, devices = map(int, numbers)
        work(what, index, count, port, devices, given)
        return 0
    rows = compare_cores(given) if given.cores else compare_overlap(given)
    return report("processes", arguments, rows)
