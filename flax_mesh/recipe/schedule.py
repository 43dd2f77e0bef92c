"""The schedule of a recipe's pipeline, and how its layers are split into stages."""

from functools import cache
from typing import Literal, TypedDict

from flax_mesh.errors import ConfigError
from flax_mesh.mpmd.runtime.search import SEARCH
from flax_mesh.mpmd.schedules import Schedule, StageCost, make_schedule, search_schedule
from flax_mesh.mpmd.schedules.text import is_schedule_file, read_schedule
from flax_mesh.recipe.config import PipelineConfig


class Cut(TypedDict, total=False):
    """Arguments of `split_stages`."""

    balance: Literal["flops", "count"]
    cuts: list[int]


def parse_cut(text: str) -> Cut:
    """Convert `pipeline.cut` ("flops", "count", or first layers, "2,5") to arguments of `split_stages`."""
    if text in ("flops", "count"):
        return {"balance": text}
    try:
        return {"cuts": [int(part) for part in text.split(",")]}
    except ValueError:
        raise ConfigError(
            f"pipeline.cut must be flops, count, or the first layer of every stage but the first, such as 2,5; "
            f"got {text!r}"
        ) from None


def pipeline_schedule(config: PipelineConfig, num_groups: int) -> Schedule:
    """The schedule of `pipeline.schedule`, a name or a file. Raises ConfigError if it does not fit other settings."""
    try:
        if config.schedule == SEARCH:
            return first_schedule(config, num_groups)
        if is_schedule_file(config.schedule):
            schedule = read_schedule(config.schedule)
        else:
            schedule = make_schedule(
                config.schedule,
                num_groups=num_groups,
                num_microbatches=config.num_microbatches,
                num_virtual_stages=config.num_virtual_stages,
            )
    except ConfigError as error:  # every line starts with the file
        raise ConfigError([f"pipeline.schedule={line}" for line in error.lines]) from error
    except ValueError as error:
        raise ConfigError(f"pipeline.schedule={config.schedule}: {error}") from error
    virtual = config.num_virtual_stages or schedule.num_stages // num_groups
    problems = [
        f"{setting} is {wanted}, but the schedule has {value}"
        for setting, wanted, value in (
            ("pp in mesh.shape", num_groups, schedule.num_groups),
            ("pipeline.num_microbatches", config.num_microbatches, schedule.num_microbatches),
            ("the number of stages", virtual * num_groups, schedule.num_stages),
        )
        if wanted != value
    ]
    if problems:
        raise ConfigError([f"pipeline.schedule={config.schedule}: {problem}" for problem in problems])
    return schedule


@cache  # it takes a second
def first_schedule(config: PipelineConfig, num_groups: int) -> Schedule:
    """The schedule of the steps that are measured: the best one for stages of equal cost."""
    num_stages = num_groups * (config.num_virtual_stages or 1)
    result = search_schedule(
        [StageCost()] * num_stages,
        schedule_memory(config, num_groups),
        num_microbatches=config.num_microbatches,
        num_groups=num_groups,
        seconds=1.0,
    )
    return result.schedule


def schedule_memory(config: PipelineConfig, num_groups: int) -> int:
    return config.memory_limit or num_groups * (config.num_virtual_stages or 1)
