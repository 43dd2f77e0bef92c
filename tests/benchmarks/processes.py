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
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from flax_mesh import create_mesh
from flax_mesh.mpmd import MpmdMesh, Pipeline, split_stages
from flax_mesh.mpmd.schedules import make_schedule
from tests.benchmarks import overlap
from tests.benchmarks._report import print_json, print_table, use_cpu
from tests.multiprocess.processes import free_port, join, run_all

LIMIT_S = 300
WIDTH, ROWS, LAYERS = 512, 256, 8


def start_workers(count: int, what: str, given: argparse.Namespace, devices: int = 1) -> list[Any]:
    """Run `count` processes and return their results, one dict each."""
    port = free_port()
    options = [str(given.ms), str(given.microbatches), str(given.steps)]
    command = ["-m", "tests.benchmarks", "processes", "--worker", what]
    ended = run_all([[*command, *map(str, (index, count, port, devices)), *options] for index in range(count)], LIMIT_S)
    if failed := [one for one in ended if one.code]:
        raise RuntimeError(f"{what}: exit codes {[one.code for one in ended]}\n{failed[0].output}")
    return [json.loads(re.findall(r"^{.*}$", one.output, re.MULTILINE)[-1]) for one in ended]


def work(what: str, index: int, count: int, port: int, devices: int, ms: float, microbatches: int, steps: int) -> None:
    """One process: prints its result as JSON."""
    if what == "cores":
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[index]})
    if count > 1:
        join(index, count, port, devices)
    else:
        use_cpu(devices)
    if what == "cores":
        print(json.dumps(real_steps(microbatches, steps)))
    elif reason := overlap.load_nap():
        print(json.dumps({"skipped": reason}))
    else:
        print(json.dumps(overlap.measure(what, ms, microbatches, steps, count)))


def real_steps(count: int, steps: int) -> dict[str, float]:
    """Median and best step time of two groups that multiply matrices, in milliseconds."""
    groups = MpmdMesh(create_mesh((2, 1), ("pp", "dp"), devices=jax.devices()[:2]), "pp")
    schedule = make_schedule("1f1b", num_groups=2, num_microbatches=count)
    rng = np.random.default_rng(0)
    batch = {key: rng.normal(size=(count * ROWS, WIDTH)).astype(np.float32) for key in "xy"}
    micro = {key: x[:ROWS] for key, x in batch.items()}
    staged = split_stages(
        overlap.loss_fn, lambda: Wide(nnx.Rngs(0)), micro, num_stages=2, balance="count", mesh=groups.unstack[0]
    )
    pipeline = Pipeline(staged, optax.sgd(1e-3), mesh=groups, schedule=schedule)
    state = pipeline.init_state()
    took = []
    for _ in range(steps + 2):  # the first two compile
        start = time.perf_counter()
        state, metrics = pipeline.step(state, batch)
        jax.block_until_ready((state.leaves, metrics))
        took.append(time.perf_counter() - start)
    return {"median_ms": statistics.median(took[2:]) * 1e3, "best_ms": min(took[2:]) * 1e3}


class Wide(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = x + jax.nn.tanh(layer(x))
        return x


def compare_overlap(given: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per number of processes and schedule; none if the op cannot be built."""
    rows: list[dict[str, Any]] = []
    for count in map(int, given.processes.split(",")):
        for name in given.schedules.split(","):
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
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks processes")
    parser.add_argument("--processes", default="2,4")
    parser.add_argument("--ms", type=float, default=50.0, help="sleep of a layer in each of F, B and W")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--schedules", default="1f1b,zb-h1", help="separated by commas")
    parser.add_argument("--cores", action="store_true", help="measure real work on two cores instead")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--worker", nargs=8, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker:
        what, index, count, port, devices, ms, microbatches, steps = given.worker
        work(what, int(index), int(count), int(port), int(devices), float(ms), int(microbatches), int(steps))
        return 0
    rows = compare_cores(given) if given.cores else compare_overlap(given)
    print_table(rows)
    print_json("processes", arguments, rows=rows)
    return 0
