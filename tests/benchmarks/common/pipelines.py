"""Pipelines on groups of one device, and the times of their steps."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax

from flax_mesh import create_mesh
from flax_mesh.mpmd import MpmdMesh, Pipeline, split_stages
from flax_mesh.mpmd.schedules import make_schedule


def make_pipeline(
    make: Callable[[], Any],
    loss_fn: Callable[..., Any],
    batch: dict[str, np.ndarray],
    name: str,
    num_groups: int,
    count: int,
    rate: float = 1e-2,
    **options: Any,
) -> Pipeline:
    """Plain SGD on `count` microbatches by the named schedule."""
    mesh = create_mesh((num_groups, 1), ("pp", "dp"), devices=jax.devices()[:num_groups])
    groups = MpmdMesh(mesh, "pp")
    schedule = make_schedule(name, num_groups=num_groups, num_microbatches=count)
    micro = {key: x[: len(x) // count] for key, x in batch.items()}
    staged = split_stages(loss_fn, make, micro, num_stages=schedule.num_stages, balance="count", mesh=groups.unstack[0])
    return Pipeline(staged, optax.sgd(rate), mesh=groups, schedule=schedule, **options)


def random_batch(*shape: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {key: rng.normal(size=shape).astype(np.float32) for key in "xy"}


def times_of_steps(pipeline: Pipeline, batch: dict[str, np.ndarray], steps: int) -> tuple[list[float], list[float]]:
    """Milliseconds until the results of a step are there, and until the step has returned."""
    state, took, returned = pipeline.init_state(), [], []
    for _ in range(steps + 2):  # the first two compile
        start = time.perf_counter()
        state, metrics = pipeline.step(state, batch)
        returned.append(1e3 * (time.perf_counter() - start))
        jax.block_until_ready((state.leaves, metrics))
        took.append(1e3 * (time.perf_counter() - start))
    return took[2:], returned[2:]


class Turn:
    """One of several alternating steps: `call()` dispatches a step and returns the arrays to wait for."""

    def __init__(self, call: Callable[[], Any]):
        self.call, self.time, self.cpu, self.dispatch = call, [], [], []

    def run(self) -> None:
        began, cpu, thread = time.perf_counter(), time.process_time(), time.thread_time()
        waited = self.call()
        self.dispatch.append(time.thread_time() - thread)
        jax.block_until_ready(waited)
        self.time.append(time.perf_counter() - began)
        self.cpu.append(time.process_time() - cpu)


def median_ratio(times: Sequence[float], baseline: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(times, baseline, strict=True))
