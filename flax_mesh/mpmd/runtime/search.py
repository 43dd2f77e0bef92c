"""`pipeline.schedule=search`: the first steps of a run are measured to search for the best schedule."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from flax_mesh.errors import ConfigError
from flax_mesh.mpmd.runtime.pipeline import Pipeline
from flax_mesh.mpmd.runtime.profile import costs_of_times, measured_step, with_split_backward
from flax_mesh.mpmd.schedules.schedule import Schedule
from flax_mesh.mpmd.schedules.search import search_schedule
from flax_mesh.mpmd.schedules.simulate import StageCost, simulate
from flax_mesh.mpmd.schedules.text import read_schedule, schedule_text, time_text
from flax_mesh.processes.agree import broadcast_from_process_0, decide_at_process_0
from flax_mesh.step.loss import Batch, Limits, Metrics
from flax_mesh.step.state import TrainState

SEARCH = "search"
SEARCHED = "searched"  # name of the schedule that is found; the schedule of the first steps has another name
FILE = "schedule.txt"  # file in the run folder
WARMUP, MEASURED = 1, 2  # steps: the first one compiles
SECONDS = 5.0


class ScheduleSearch:
    """Steps of a pipeline that measure its stages until they are known, and then search a schedule.

    Process 0 searches with the costs of all processes, writes the file and sends the schedule to the others. All
    schedules compute the same numbers, so a run may be stopped and resumed at any step. A file of an earlier run in the
    same folder is used if it was made for the same mesh and number of microbatches. Transfers are not measured: the
    search assumes that they take no time.
    """

    def __init__(self, pipeline: Pipeline, memory_limit: float, folder: Path, setting: str, say: Callable[[str], None]):
        self.pipeline, self.memory_limit, self.setting, self.say = pipeline, memory_limit, setting, say
        self.path = folder / FILE
        self.num_steps, self.is_done = 0, False
        self.took: dict[tuple[str, int], list[float]] = {}
        pipeline.fuses = False  # all schedules run the same programs
        if text := broadcast_from_process_0("schedule file", self._known):
            self._use(text)
            say(f"schedule: {self.path}")

    def step(self, state: TrainState, batch: Batch, *limits: Limits) -> tuple[TrainState, Metrics]:
        """`Pipeline.step`, measured until the schedule is known."""
        if self.is_done:
            return self.pipeline.step(state, batch, *limits)
        state, metrics, took = measured_step(self.pipeline, state, batch, *limits)
        self.num_steps += 1
        for key, times in took.items() if self.num_steps > WARMUP else ():
            self.took.setdefault(key, []).extend(times)
        if self.num_steps == WARMUP + MEASURED:
            medians = [(kind, stage, median(times)) for (kind, stage), times in self.took.items()]
            self._use(decide_at_process_0("schedule search", json.dumps(medians), self._search))
        return state, metrics

    def _use(self, text: str) -> None:
        self.pipeline.use_schedule(Schedule.parse(text))
        self.is_done = True

    def _known(self) -> str:
        """The text of the schedule file of an earlier run; "" if the folder has none, or its settings differ."""
        try:
            schedule = read_schedule(str(self.path))
            with open(self.path, encoding="utf-8") as file:
                is_same = file.readline() == f"# {self.setting}\n"
        except (ConfigError, OSError):
            return ""
        mine = self.pipeline.schedule
        fits = schedule.stage_to_group == mine.stage_to_group and schedule.num_microbatches == mine.num_microbatches
        return str(schedule) if is_same and fits and schedule.splits_backward else ""

    def _search(self, texts: Sequence[str]) -> str:
        costs = costs_of_processes(texts, self.pipeline.schedule.num_stages)
        before = self.pipeline.schedule
        result = search_schedule(
            costs,
            self.memory_limit,
            num_microbatches=before.num_microbatches,
            num_groups=before.num_groups,
            stage_to_group=before.stage_to_group,
            seconds=SECONDS,
        )
        times = "/".join(",".join(f"{time:.4g}" for time in cost[:3]) for cost in costs)
        # A named schedule with whole backward passes may be the fastest, but the stages are built for B and W.
        schedule = replace(with_split_backward(result.schedule), name=SEARCHED)
        makespan = simulate(schedule, costs).makespan
        part = makespan / simulate(before, costs).makespan
        numbers = f"makespan {time_text(makespan, 'ms')}, {part:.1%} of the makespan of the first schedule"
        notes = f"{self.setting}\nF,B,W of every stage in ms: {times}\n{numbers}"
        _write_atomically(self.path, schedule_text(schedule, notes))
        self.say(f"schedule: searched for the measured stages: {numbers}; {self.path}")
        return str(schedule)


def costs_of_processes(texts: Sequence[str], num_stages: int) -> tuple[StageCost, ...]:
    """The costs of all stages, in ms. If a group has several processes, the slowest process counts."""
    slowest: dict[tuple[str, int], float] = {}
    for kind, stage, time in (item for text in texts for item in json.loads(text)):
        slowest[kind, stage] = max(slowest.get((kind, stage), 0.0), time)
    return costs_of_times(slowest, num_stages)


def _write_atomically(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
