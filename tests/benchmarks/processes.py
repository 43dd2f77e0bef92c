"""Whether the processes of a pipeline run concurrently: one process per group, on this machine.

Stages that sleep, as in the benchmark `overlap`: the median step time over the makespan of the schedule.

    python -m tests.benchmarks processes [--processes 2,4] [--ms 50] [--microbatches 8] [--steps 7]
"""

import argparse
import json
import re
from collections.abc import Sequence
from typing import Any

from tests.benchmarks import overlap
from tests.benchmarks.common.report import options, report
from tests.multiprocess.processes import free_port, join, run_all


def start_workers(count: int, name: str, given: argparse.Namespace) -> list[Any]:
    """Run `count` processes and return their results, one dict each."""
    port = free_port()
    command = ["-m", "tests.benchmarks", "processes", f"--ms={given.ms}", f"--microbatches={given.microbatches}"]
    workers = [f"--worker={name}:{index}:{count}:{port}" for index in range(count)]
    ended = run_all([[*command, f"--steps={given.steps}", worker] for worker in workers], limit_s=300)
    if failed := [one for one in ended if one.code]:
        raise RuntimeError(f"{name}: exit codes {[one.code for one in ended]}\n{failed[0].output}")
    return [json.loads(re.findall(r"^{.*}$", one.output, re.MULTILINE)[-1]) for one in ended]


def work(name: str, index: int, count: int, port: int, given: argparse.Namespace) -> None:
    """One process: prints its result as JSON."""
    join(index, count, port, 1)
    if reason := overlap.load_nap():
        print(json.dumps({"skipped": reason}))
    else:
        print(json.dumps(overlap.measure(name, given.ms, given.microbatches, given.steps, count)))


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


def main(arguments: Sequence[str] | None = None) -> int:
    figures = {"processes": (2, 4), "ms": 50.0, "microbatches": 8, "steps": 7, "schedules": ("1f1b", "zb-h1")}
    given = options("processes", arguments, **figures, worker="")
    if given.worker:
        name, index, count, port = given.worker.split(":")
        work(name, int(index), int(count), int(port), given)
        return 0
    return report("processes", arguments, compare_overlap(given))
