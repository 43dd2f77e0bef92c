"""What a pipeline really did: the start and the end of every action, as a trace, as a picture, and as costs.

Times are in milliseconds.
"""

import gc
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import jax

from flax_mesh.errors import ConfigError
from flax_mesh.mpmd.runtime.compile import StageFunctions
from flax_mesh.mpmd.runtime.executor import ScheduleRun
from flax_mesh.mpmd.runtime.pipeline import Pipeline
from flax_mesh.mpmd.schedules.draw import Event, draw_timeline_svg
from flax_mesh.mpmd.schedules.schedule import Action, Schedule
from flax_mesh.mpmd.schedules.simulate import Costs, StageCost, simulate
from flax_mesh.step.loss import Batch, Metrics
from flax_mesh.step.state import TrainState

# What F, B and W give and the next action of the same stage gets donated: gone before a watcher comes to it.
DONATED = {"F": 3, "B": 1, "W": slice(None)}
MEASURED, SIMULATED = 0, 1  # process ids in the trace


@dataclass(frozen=True)
class Timeline:
    """One step as it ran: (group, action, start, end) of every action, sorted by start; the first starts at 0."""

    schedule: Schedule
    events: tuple[Event, ...]

    @property
    def span(self) -> float:
        """From the first start to the last end."""
        return max((end for *_, end in self.events), default=0.0)

    @property
    def overlap(self) -> float:
        """Groups at work on average."""
        return sum(end - start for _, _, start, end in self.events) / self.span if self.span else 0.0

    @property
    def bubble(self) -> float:
        """Idle share of the groups' time."""
        return 1 - self.overlap / self.schedule.num_groups if self.span else 0.0

    def write(self, path: str | Path, costs: Costs | None = None) -> tuple[Path, Path]:
        """Write the trace to `path` and the picture beside it, as .svg; returns both paths.

        Both show the same schedule simulated with `costs`, from `measure_costs`; None: with the medians of what ran.
        """
        path = Path(path)
        if path.suffix == ".svg":
            raise ValueError(f"{path} is where the picture goes; name the trace, such as {path.with_suffix('.json')}.")
        costs = costs_of(self) if costs is None else costs
        path.write_text(json.dumps(chrome_trace(self, costs)))
        picture = path.with_suffix(".svg")
        picture.write_text(draw_timeline_svg(self.schedule, self.events, costs))
        return path, picture


def trace_step(pipeline: Pipeline, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics, Timeline]:
    """`pipeline.step(state, batch)`, and when each of its actions ran; donates `state`.

    Nothing is held up: a thread per group waits for the results, in the order of the group. An action starts when it
    is dispatched, its group is free and its inputs are there. The first two steps of a pipeline compile; trace a later
    one. The update of the parameters follows when all actions are done, and is no part of the timeline.
    """
    _check_one_process(pipeline, "trace_step")
    run = pipeline.start(state, batch, pipeline.schedule.num_microbatches, train=True)
    _compile_marks(run)
    gc.collect()  # a collection during the step would stop the threads that look at the clock, for 0.1 s and more
    with ExitStack() as stack:
        workers = [stack.enter_context(ThreadPoolExecutor(1)) for _ in pipeline.groups]
        watch = _Watch(workers, pipeline.group_of)
        run.stages = [_wrapped(stage, watch.around) for stage in run.stages]
        for action in pipeline.schedule.order():
            watch.action = action
            run.do(action)
        times = {action: (begun.result(), ended.result()) for action, (begun, ended) in watch.times.items()}
    new, metrics = pipeline.update(state, run)
    return new, metrics, _timeline(pipeline.schedule, times)


def measure_costs(pipeline: Pipeline, state: TrainState, batch: Batch, *, repeats: int = 3) -> tuple[StageCost, ...]:
    """The cost of every stage, for `search_schedule` and `simulate`: medians over microbatches and `repeats` passes.

    Every action runs alone, so that groups that share cores do not hinder each other. `state` stays as it is. A
    schedule that does not split the backward gives the whole of it as `backward` and 0 as `weights`; to let the search
    split it, measure a pipeline whose schedule is `with_split_backward`. `transfer` covers all values that a stage
    sends to another group for one microbatch, forward or backward.
    """
    _check_one_process(pipeline, "measure_costs")
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}.")
    took: dict[tuple[str, int], list[float]] = {}
    for repeat in range(repeats + 1):
        times = _one_at_a_time(pipeline, state, batch)
        for (kind, stage, _), spans in times.items() if repeat else ():  # the first pass compiles
            for what, time in zip((kind, "T"), spans, strict=False):
                took.setdefault((what, stage), []).append(time)
    of = {key: median(times) for key, times in took.items()}
    stages = range(pipeline.schedule.num_stages)
    return tuple(StageCost(*(of.get((what, stage), 0.0) for what in "FBWT")) for stage in stages)


def _check_one_process(pipeline: Pipeline, what: str) -> None:
    if pipeline.channel is not None:
        raise ConfigError(
            f"{what} looks at the clock of one process, and this run has {jax.process_count()}. Run it in one process "
            "with as many devices: the schedule is the same."
        )


def with_split_backward(schedule: Schedule) -> Schedule:
    """The schedule with a W right after every B; one that splits the backward already is given back as it is."""
    if schedule.splits_backward:
        return schedule
    rows = (
        tuple(action._replace(kind=kind) for action in row for kind in ("BW" if action.kind == "B" else action.kind))
        for row in schedule.rows
    )
    return replace(schedule, rows=tuple(rows), splits_backward=True)


def costs_of(timeline: Timeline) -> tuple[StageCost, ...]:
    """The median time of each kind of action on each stage, as it ran beside the others; transfers are left at 0."""
    took: dict[tuple[str, int], list[float]] = {}
    for _, action, start, end in timeline.events:
        took.setdefault((action.kind, action.stage), []).append(end - start)
    stages = range(timeline.schedule.num_stages)
    return tuple(StageCost(*(median(took.get((kind, stage), [0.0])) for kind in "FBW")) for stage in stages)


def chrome_trace(timeline: Timeline, costs: Costs | None = None) -> dict[str, Any]:
    """The timeline and its simulation as Trace Event Format, which Perfetto and chrome://tracing open.

    One row per group; `costs` of the simulation as in `Timeline.write`.
    """
    schedule = timeline.schedule
    result = simulate(schedule, costs_of(timeline) if costs is None else costs)
    simulated = [(schedule.stage_to_group[action.stage], action, *times) for action, times in result.times.items()]
    panels = {MEASURED: ("measured", timeline.events), SIMULATED: ("simulated", simulated)}
    entries: list[dict[str, Any]] = []
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


class _Watch:
    """When the actions run, seen by one thread per group."""

    def __init__(self, workers: Sequence[ThreadPoolExecutor], group_of: Sequence[int]):
        self.workers, self.group_of = workers, group_of
        self.action = Action("F", 0, 0)  # the one that is being dispatched
        self.times: dict[Action, tuple[Future[float], Future[float]]] = {}

    def around(self, call: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            action, submit = self.action, self.workers[self.group_of[self.action.stage]].submit
            # The last argument is donated: sums of this stage, made by actions before this one on the same group.
            begun = submit(_when_ready, args[:-1], perf_counter())
            outs = call(*args)
            self.times[action] = begun, submit(_when_ready, _lasting(outs, kind), 0.0)
            return outs

        return watched


def _when_ready(values: Any, earliest: float) -> float:
    """The time at which all values are there. The thread comes here when the group is done with what was before."""
    jax.block_until_ready(values)
    return max(perf_counter(), earliest)


def _lasting(outs: Any, kind: str) -> Any:
    """Results that tell when an action is done, and that nobody takes away."""
    donated = jax.tree.leaves(outs[DONATED[kind]])
    gone = set(map(id, donated))
    kept = [x for x in jax.tree.leaves(outs) if id(x) not in gone]
    return kept or (_marks(donated[0]) if donated else [])


def _marks(x: jax.Array) -> list[jax.Array]:
    """A number from each device, there when `x` is."""
    return [_first(shard.data) for shard in x.addressable_shards]


def _compile_marks(run: ScheduleRun) -> None:
    """Compile what `_lasting` may call, before the clock runs."""
    for stage in run.stages:
        grads = [run.grads[stage.group][at] for at in stage.trained[:1]]
        for x in [*run.sums[stage.stage][:1], *grads]:
            _marks(x)


@jax.jit
def _first(x: jax.Array) -> jax.Array:
    return x[(0,) * x.ndim] if x.size else x.sum()


def _wrapped(stage: StageFunctions, around: Callable[[Callable[..., Any], str], Callable[..., Any]]) -> StageFunctions:
    return stage._replace(
        forward=around(stage.forward, "F"), backward=around(stage.backward, "B"), weights=around(stage.weights, "W")
    )


def _one_at_a_time(pipeline: Pipeline, state: TrainState, batch: Batch) -> dict[Action, tuple[float, ...]]:
    """How long every action took, and what it sent, where it sent to another group; without an update."""
    run = pipeline.start(state, batch, pipeline.schedule.num_microbatches, train=True)
    jax.block_until_ready((run.held, run.data, run.grads, run.sums))
    begun = ended = 0.0

    def around(call: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            nonlocal begun, ended
            begun = perf_counter()
            outs = jax.block_until_ready(call(*args))
            ended = perf_counter()
            return outs

        return timed

    run.stages = [_wrapped(stage, around) for stage in run.stages]
    times = {}
    for action in pipeline.schedule.order():
        before = run.num_transfers
        run.do(action)
        jax.block_until_ready((list(run.values.values()), list(run.cotangents.values())))
        sent = (1e3 * (perf_counter() - ended),) if run.num_transfers > before else ()
        times[action] = (1e3 * (ended - begun), *sent)
    return times


def _timeline(schedule: Schedule, times: dict[Action, tuple[float, float]]) -> Timeline:
    origin = min((start for start, _ in times.values()), default=0.0)
    events = [
        (schedule.stage_to_group[action.stage], action, 1e3 * (start - origin), 1e3 * (end - origin))
        for action, (start, end) in times.items()
    ]
    return Timeline(schedule, tuple(sorted(events, key=lambda event: (event[2], event[3], event[0]))))
