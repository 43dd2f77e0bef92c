"""Measured timelines of a pipeline: start and end of every action, as a trace, as a picture, and as costs.

Times are in milliseconds.
"""

import gc
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import jax

from flax_mesh.errors import ConfigError
from flax_mesh.fields import user_path
from flax_mesh.mpmd.runtime.compile import Jitted, StageFunctions
from flax_mesh.mpmd.runtime.executor import ScheduleRun
from flax_mesh.mpmd.runtime.pipeline import Pipeline
from flax_mesh.mpmd.schedules.draw import Event, draw_timeline_svg, events_of
from flax_mesh.mpmd.schedules.schedule import Action, Schedule
from flax_mesh.mpmd.schedules.simulate import StageCost, simulate
from flax_mesh.step.loss import NO_LIMITS, Batch, Limits, Metrics
from flax_mesh.step.state import TrainState
from flax_mesh.tree import PyTree

_first = jax.jit(lambda x: x[(0,) * x.ndim] if x.size else x.sum())
# Results of F, B and W that the next action of the stage donates: they may be deleted before a worker waits for them.
_DONATED = {"F": 3, "B": 1, "W": slice(None)}
MEASURED, SIMULATED = 0, 1  # process ids in the trace


@dataclass(frozen=True)
class Timeline:
    """A measured step: (group, action, start, end) of every action, sorted by start. The first action starts at 0."""

    schedule: Schedule
    events: tuple[Event, ...]

    @property
    def span(self) -> float:
        """Time from the first start to the last end."""
        return max((end for *_, end in self.events), default=0.0)

    @property
    def overlap(self) -> float:
        """Average number of busy groups."""
        return sum(end - start for _, _, start, end in self.events) / self.span if self.span else 0.0

    @property
    def bubble(self) -> float:
        """Idle fraction of the groups' time."""
        return 1 - self.overlap / self.schedule.num_groups if self.span else 0.0

    def write(self, path: str | Path) -> tuple[Path, Path]:
        """Write the trace to `path` and the picture to the same path with suffix .svg; returns both paths.

        Both also show the schedule, simulated with the medians of the measured times.
        """
        path = user_path(path)
        if path.suffix == ".svg":
            trace = path.with_suffix(".json")
            raise ValueError(f"{path} is the path of the picture; use another suffix for the trace, such as {trace}.")
        path.write_text(json.dumps(chrome_trace(self)))
        picture = path.with_suffix(".svg")
        picture.write_text(draw_timeline_svg(self.schedule, self.events, costs_of(self), unit="ms"))
        return path, picture


def trace_step(
    pipeline: Pipeline, state: TrainState, batch: Batch, limits: Limits = NO_LIMITS
) -> tuple[TrainState, Metrics, Timeline]:
    """Runs `pipeline.step(state, batch)` and measures when each action ran. Donates `state`.

    Dispatch does not block: one thread per group waits for the results, in the order of the group. An action starts
    when it is dispatched, its group is free and its inputs are ready. The first two steps of a pipeline compile, so
    trace a later one. The optimizer's update follows after all actions and is not in the timeline.

    Example:
        >>> from flax_mesh.mpmd import MpmdMesh, Pipeline, chain_stages, trace_step
        >>> mesh = MpmdMesh(fm.create_mesh((2, 4), ("pp", "fsdp")), "pp")
        >>> def make():
        ...     stages = nnx.List([nnx.Linear(8, 8, rngs=nnx.Rngs(seed)) for seed in range(2)])
        ...     return stages, nnx.Optimizer(stages, optax.adam(1e-3), wrt=nnx.Param)
        >>> loss_fn = lambda outputs, batch: (((outputs - batch) ** 2).sum(), batch.size)
        >>> batch = np.ones((8, 8), np.float32)
        >>> staged = chain_stages(loss_fn, make, batch, mesh=mesh, schedule="gpipe", num_microbatches=2)
        >>> pipeline = Pipeline(staged, rules="fsdp")
        >>> state, _ = pipeline.step(pipeline.init_state(), batch)  # compiles
        >>> state, metrics, timeline = trace_step(pipeline, state, batch)
        >>> 0 <= timeline.bubble < 1
        True
    """
    _check_one_process(pipeline, "trace_step")
    run = pipeline.start(state, batch, pipeline.schedule.num_microbatches, train=True)
    _compile_marks(run)
    gc.collect()  # a garbage collection during the step would stop the timing threads for 0.1 s or more
    with ExitStack() as stack:
        workers = [stack.enter_context(ThreadPoolExecutor(1)) for _ in pipeline.groups]
        recorder = _Recorder(workers, pipeline.group_of)
        run.stages = [_wrapped(stage, recorder.wrap) for stage in run.stages]
        for action in pipeline.schedule.order():
            recorder.action = action
            run.do(action)
        times = {action: (begun.result(), ended.result()) for action, (begun, ended) in recorder.times.items()}
    new, metrics = pipeline.update(state, run, limits)
    return new, metrics, _timeline(pipeline.schedule, times)


def measure_costs(pipeline: Pipeline, state: TrainState, batch: Batch, *, repeats: int = 3) -> tuple[StageCost, ...]:
    """Measures the cost of every stage in ms, for `search_schedule` and `simulate`.

    Costs are medians over microbatches and `repeats` passes. Every action runs alone, so that groups that share cores
    do not slow each other down. `state` is not changed. If the schedule does not split the backward pass, `backward`
    has its entire time and `weights` is 0; to let the search split it, measure a pipeline whose schedule is
    `with_split_backward`. `transfer` is the time in which a stage sends all values of a microbatch to another group.

    Example:
        >>> from flax_mesh.mpmd import MpmdMesh, Pipeline, chain_stages, measure_costs
        >>> mesh = MpmdMesh(fm.create_mesh((2, 4), ("pp", "fsdp")), "pp")
        >>> def make():
        ...     stages = nnx.List([nnx.Linear(8, 8, rngs=nnx.Rngs(seed)) for seed in range(2)])
        ...     return stages, nnx.Optimizer(stages, optax.adam(1e-3), wrt=nnx.Param)
        >>> loss_fn = lambda outputs, batch: (((outputs - batch) ** 2).sum(), batch.size)
        >>> batch = np.ones((8, 8), np.float32)
        >>> staged = chain_stages(loss_fn, make, batch, mesh=mesh, schedule="gpipe", num_microbatches=2)
        >>> pipeline = Pipeline(staged, rules="fsdp")
        >>> costs = measure_costs(pipeline, pipeline.init_state(), batch)
        >>> len(costs), costs[0].weights  # one StageCost per stage; gpipe does not split the backward pass
        (2, 0.0)
    """
    _check_one_process(pipeline, "measure_costs")
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}.")
    took: dict[tuple[str, int], list[float]] = {}
    for repeat in range(repeats + 1):
        times = _one_at_a_time(pipeline, state, batch)
        for key, each in times.items() if repeat else ():  # the first pass compiles
            took.setdefault(key, []).extend(each)
    return costs_of_times({key: median(times) for key, times in took.items()}, pipeline.schedule.num_stages)


def costs_of_times(times: Mapping[tuple[str, int], float], num_stages: int) -> tuple[StageCost, ...]:
    """One StageCost per stage from the times of (F, B, W or T for transfers, stage); those that are missing are 0."""
    return tuple(StageCost(*(times.get((name, stage), 0.0) for name in "FBWT")) for stage in range(num_stages))


def _check_one_process(pipeline: Pipeline, name: str) -> None:
    if pipeline.channel is not None:
        raise ConfigError(
            f"{name} requires a single process, got {jax.process_count()}. Run it in one process with as many devices: "
            "the schedule is the same."
        )


def measured_step(
    pipeline: Pipeline, state: TrainState, batch: Batch, limits: Limits = NO_LIMITS
) -> tuple[TrainState, Metrics, dict[tuple[str, int], list[float]]]:
    """`pipeline.step(state, batch)`, and the times in ms of the local actions by (kind, stage).

    Every action waits for its inputs and runs alone in this process, so the step takes longer. Donates `state`.
    """
    run = pipeline.start(state, batch, pipeline.schedule.num_microbatches, train=True)
    took: dict[tuple[str, int], list[float]] = {}

    def record(key: tuple[str, int], begun: float, ended: float) -> None:
        took.setdefault(key, []).append(1e3 * (ended - begun))

    run.stages = [_timed(stage, record) for stage in run.stages]
    pipeline.dispatch(run, fuse=False)
    new, metrics = pipeline.update(state, run, limits)
    return new, metrics, took


def with_split_backward(schedule: Schedule) -> Schedule:
    """The schedule with a W directly after every B; `schedule` itself if it already splits the backward pass."""
    if schedule.splits_backward:
        return schedule
    rows = (
        tuple(action._replace(kind=kind) for action in row for kind in ("BW" if action.kind == "B" else action.kind))
        for row in schedule.rows
    )
    return replace(schedule, rows=tuple(rows), splits_backward=True)


def costs_of(timeline: Timeline) -> tuple[StageCost, ...]:
    """The median time of each kind of action on each stage, measured while other groups run; transfers are 0."""
    took: dict[tuple[str, int], list[float]] = {}
    for _, action, start, end in timeline.events:
        took.setdefault((action.kind, action.stage), []).append(end - start)
    return costs_of_times({key: median(times) for key, times in took.items()}, timeline.schedule.num_stages)


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The timeline and its simulation in Trace Event Format, for Perfetto and chrome://tracing, one row per group."""
    schedule = timeline.schedule
    result = simulate(schedule, costs_of(timeline))
    panels = {MEASURED: ("measured", timeline.events), SIMULATED: ("simulated", events_of(schedule, result))}
    entries: list[dict[str, object]] = []
    for process, (title, events) in panels.items():
        entries.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": title}})
        for group in range(schedule.num_groups):
            name = {"name": f"group {group}"}
            entries.append({"ph": "M", "name": "thread_name", "pid": process, "tid": group, "args": name})
        for group, action, start, end in events:
            entry = {"ph": "X", "name": str(action), "cat": action.kind, "pid": process, "tid": group}
            args = {"stage": action.stage, "microbatch": action.microbatch}
            entries.append(entry | {"ts": start * 1e3, "dur": (end - start) * 1e3, "args": args})
    numbers = {"schedule": schedule.name, "span_ms": timeline.span, "bubble": timeline.bubble}
    numbers |= {"overlap": timeline.overlap, "simulated_ms": result.makespan, "simulated_bubble": result.bubble}
    return {"traceEvents": entries, "displayTimeUnit": "ms", "otherData": numbers}


class _Recorder:
    """Records start and end of the actions, with one thread per group."""

    def __init__(self, workers: Sequence[ThreadPoolExecutor], group_of: Sequence[int]):
        self.workers, self.group_of = workers, group_of
        self.action = Action("F", 0, 0)  # the action that is being dispatched
        self.times: dict[Action, tuple[Future[float], Future[float]]] = {}

    def wrap(self, call: Jitted, kind: str) -> Jitted:
        def recorded(*args: PyTree) -> PyTree:
            action, submit = self.action, self.workers[self.group_of[self.action.stage]].submit
            # The last argument is donated: sums of this stage, computed by earlier actions of the same group.
            begun = submit(_when_ready, args[:-1], perf_counter())
            outs = call(*args)
            self.times[action] = begun, submit(_when_ready, _results_to_await(outs, kind), 0.0)
            return outs

        return recorded


def _when_ready(values: PyTree, earliest: float) -> float:
    """The time when all values are ready. The thread runs this after all earlier actions of the group."""
    jax.block_until_ready(values)
    return max(perf_counter(), earliest)


def _results_to_await(outs: PyTree, kind: str) -> list[jax.Array]:
    """Results that are ready when an action is done and that no later action donates."""
    donated = jax.tree.leaves(outs[_DONATED[kind]])
    ids = set(map(id, donated))
    others = [x for x in jax.tree.leaves(outs) if id(x) not in ids]
    return others or (_marks(donated[0]) if donated else [])


def _marks(x: jax.Array) -> list[jax.Array]:
    """One number per device that is ready when `x` is."""
    return [_first(shard.data) for shard in x.addressable_shards]


def _compile_marks(run: ScheduleRun) -> None:
    """Compile the programs that `_results_to_await` may call, before the timing starts."""
    for stage in run.stages:
        grads = [run.grads[stage.group][at] for at in stage.trained[:1]]
        for x in [*run.sums[stage.stage][:1], *grads]:
            _marks(x)


def _wrapped(stage: StageFunctions, wrap: Callable[[Jitted, str], Jitted]) -> StageFunctions:
    return stage._replace(
        forward=wrap(stage.forward, "F"), backward=wrap(stage.backward, "B"), weights=wrap(stage.weights, "W")
    )


def _timed(stage: StageFunctions, record: Callable[[tuple[str, int], float, float], None]) -> StageFunctions:
    """The stage with programs that run alone and call `record((kind, stage), begun, ended)` when they are done."""

    def wrap(call: Jitted, kind: str) -> Jitted:
        def timed(*args: PyTree) -> PyTree:
            jax.block_until_ready(args)
            begun = perf_counter()
            outs = jax.block_until_ready(call(*args))
            record((kind, stage.stage), begun, perf_counter())
            return outs

        return timed

    return _wrapped(stage, wrap)


def _one_at_a_time(pipeline: Pipeline, state: TrainState, batch: Batch) -> dict[tuple[str, int], list[float]]:
    """The times in ms of all actions by (kind, stage), and of transfers to other groups by ("T", stage); no update."""
    run = pipeline.start(state, batch, pipeline.schedule.num_microbatches, train=True)
    jax.block_until_ready((run.leaves, run.data, run.grads, run.sums))
    took: dict[tuple[str, int], list[float]] = {}
    last = 0.0  # end of the last action

    def record(key: tuple[str, int], begun: float, ended: float) -> None:
        nonlocal last
        last = ended
        took.setdefault(key, []).append(1e3 * (ended - begun))

    run.stages = [_timed(stage, record) for stage in run.stages]
    for action in pipeline.schedule.order():
        before = run.num_transfers
        run.do(action)
        jax.block_until_ready((list(run.values.values()), list(run.cotangents.values())))
        if run.num_transfers > before:
            took.setdefault(("T", action.stage), []).append(1e3 * (perf_counter() - last))
    return took


def _timeline(schedule: Schedule, times: dict[Action, tuple[float, float]]) -> Timeline:
    origin = min((start for start, _ in times.values()), default=0.0)
    events = [
        (schedule.stage_to_group[action.stage], action, 1e3 * (start - origin), 1e3 * (end - origin))
        for action, (start, end) in times.items()
    ]
    return Timeline(schedule, tuple(sorted(events, key=lambda event: (event[2], event[3], event[0]))))
