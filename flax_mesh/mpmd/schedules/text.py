"""Schedules as text: simulated ones for the terminal, and files, which a person can read and edit."""

import os

from flax_mesh.errors import ConfigError
from flax_mesh.fields import check_types, path_problem, read_file
from flax_mesh.mpmd.schedules.schedule import Schedule
from flax_mesh.mpmd.schedules.simulate import Costs, Simulation, StageCost, simulate, stage_costs
from flax_mesh.mpmd.schedules.validate import check_schedule
from flax_mesh.text import count_text, lines_of, table_text

_MOST_BLOCKS = 6  # of lines, if the schedule is longer than the width
_MOST_BYTES = 2**27  # the largest file that is read: ten times the size of the largest schedule that can be made


@check_types
def schedule_table(schedule: Schedule, costs: Costs = StageCost(), *, width: int = 120) -> str:  # noqa: B008  immutable
    """Makespan, bubble, peak activations of every group, and a timeline; `width` is in characters.

    Time runs to the right and continues in the next block of lines. Dots are idle time. The shortest action is wide
    enough for its name if the timeline then has at most six blocks.

    Example:
        >>> from flax_mesh.mpmd.schedules import make_schedule, schedule_table
        >>> print(schedule_table(make_schedule("gpipe", num_groups=2, num_microbatches=2), width=60))
        gpipe: 2 groups, 2 microbatches, F=1 B=2
        makespan 9, period 9, bubble 33.3%, 4 transfers
        <BLANKLINE>
        group  stages  busy   peak activations
        0      0       66.7%  2
        1      1       66.7%  2
        <BLANKLINE>
        group 0  0F0 0F1 ............0B0---- 0B1----
        group 1  ....1F0 1F1 1B0---- 1B1---- ........
    """
    result = simulate(schedule, costs)
    lines = [heading(schedule, costs), summary(result), "", _groups_text(schedule, result), ""]
    name = len(f"group {schedule.num_groups - 1}")
    per_block = max(width - name - 2, 20)
    per_block -= per_block % (_label(result) + 1)  # no name is split over two blocks if all actions have equal length
    bars = _bars(schedule, result, per_block)
    for first in range(0, max(map(len, bars), default=0), per_block):
        for group, bar in enumerate(bars):
            lines.append(f"{f'group {group}':{name}}  {bar[first : first + per_block]}".rstrip())
        lines.append("")
    return "\n".join(lines[:-1])


def heading(schedule: Schedule, costs: Costs = StageCost()) -> str:  # noqa: B008  immutable
    sizes = [(schedule.num_groups, "group")]
    if schedule.num_stages > schedule.num_groups:
        sizes.append((schedule.num_stages, "stage"))
    sizes.append((schedule.num_microbatches, "microbatch"))
    text = ", ".join(count_text(count, noun) for count, noun in sizes)
    stages = stage_costs(costs, schedule.num_stages)
    if len(set(stages)) > 1:
        return f"{schedule.name}: {text}, uneven costs"
    names = [("F", stages[0].forward), ("B", stages[0].backward), ("W", stages[0].weights), ("T", stages[0].transfer)]
    if not schedule.splits_backward:
        names = [("F", stages[0].forward), ("B", stages[0].backward + stages[0].weights), ("T", stages[0].transfer)]
    return f"{schedule.name}: {text}, " + " ".join(f"{name}={cost:g}" for name, cost in names if name != "T" or cost)


def time_text(time: float, unit: str = "") -> str:
    return f"{time:.6g} {unit}".rstrip()


def summary(result: Simulation, unit: str = "") -> str:
    times = f"makespan {time_text(result.makespan, unit)}, period {time_text(result.period, unit)}"
    return f"{times}, bubble {result.bubble:.1%}, {result.transfers} transfers"


def _groups_text(schedule: Schedule, result: Simulation) -> str:
    rows: list[tuple[str, ...]] = []
    for group, (busy, peak) in enumerate(zip(result.busy, result.peak_activations, strict=True)):
        stages = [str(stage) for stage, owner in enumerate(schedule.stage_to_group) if owner == group]
        share = busy / result.makespan if result.makespan else 1.0
        rows.append((str(group), ",".join(stages), f"{share:.1%}", str(peak)))
    return table_text(["group", "stages", "busy", "peak activations"], rows)


def _bars(schedule: Schedule, result: Simulation, per_block: int) -> list[str]:
    spans = [end - start for start, end in result.times.values() if end > start]
    if not spans:
        return [" ".join(map(str, row)) for row in schedule.rows]
    scale = min((_label(result) + 1) / min(spans), _MOST_BLOCKS * per_block / result.makespan)
    bars: list[str] = []
    for row in schedule.rows:
        bar = ["."] * round(result.makespan * scale)
        for action in row:
            first, last = (round(time * scale) for time in result.times[action])
            text, width = str(action), max(last - first - 1, 1)
            text = text if len(text) <= width else action.kind
            bar[first:last] = list(f"{text:-<{width}} ")[: last - first]
        bars.append("".join(bar))
    return bars


def _label(result: Simulation) -> int:
    return max((len(str(action)) for action in result.times), default=1)


def is_schedule_file(text: str) -> bool:
    """Whether a setting names a file: names of schedules contain neither "." nor a separator of folders."""
    return "." in text or "/" in text or os.sep in text


def schedule_text(schedule: Schedule, notes: str = "") -> str:
    """The content of a file; every line of `notes` becomes a comment."""
    head = "".join(f"# {line}\n" for line in notes.splitlines())
    return f"{head}# The name and the group of every stage, then a line of actions for each group.\n{schedule}\n"


def read_schedule(path: str) -> Schedule:
    """The schedule of a file that `schedule_text` has made or a person has edited.

    Raises a ConfigError that names the lines if the file does not contain a schedule, or the schedule is invalid.
    """
    if problem := path_problem(path):
        raise ConfigError(f"{path[:80]!r} {problem}")
    try:
        text = read_file(path, _MOST_BYTES).decode()
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file; write one with flax-mesh schedule NAME --out {path}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a text file in UTF-8") from error
    try:
        schedule = Schedule.parse(text)
        check_schedule(schedule)
    except ValueError as error:
        raise ConfigError([f"{path}: {line}" for line in lines_of(error)]) from error
    return schedule
