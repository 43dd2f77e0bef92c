"""`flax-mesh schedule`: print a named schedule, or a file with one, as a table, JSON or a picture."""

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

from flax_mesh.cli.common import DONE, check_writable, table_width, write_file
from flax_mesh.errors import ConfigError, Mistakes
from flax_mesh.mpmd.schedules import Schedule, StageCost, draw_schedule_svg, make_schedule, schedule_table, simulate
from flax_mesh.mpmd.schedules.file import is_schedule_file, read_schedule, schedule_text
from flax_mesh.mpmd.schedules.schedule import SCHEDULE_NAMES
from flax_mesh.mpmd.schedules.simulate import stage_costs
from flax_mesh.mpmd.schedules.text import summary
from flax_mesh.text import one_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print makespan, bubble, memory and order of a pipeline schedule. Needs no devices."
    parser.epilog = "Exit codes: 0 success, 1 unexpected error, 2 invalid input."
    add = parser.add_argument
    add(
        "name",
        metavar="NAME",
        help=f"{', '.join(SCHEDULE_NAMES)}; v-K, with memory for K activations per group; or a FILE",
    )
    add("--stages", metavar="S", type=int, help="number of groups of devices; each has V stages")
    add("--microbatches", metavar="M", type=int, help="number of microbatches")
    add("--virtual", metavar="V", type=int, help="stages per group (default: the schedule's number)")
    costs = (
        "times of forward, backward to input, backward to weights and transfer (default 1,1,1); to set them per stage, "
        "join them by /: 1,1,1/2,2,2"
    )
    add("--costs", metavar="F,B,W[,T]", default="1,1,1", help=costs)
    add("--svg", metavar="FILE", type=os.path.expanduser, help="write a picture")
    add("--out", metavar="FILE", type=os.path.expanduser, help="write the schedule as text, for pipeline.schedule=FILE")
    add("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    files = {f"the schedule {arguments.name}": arguments.name} if is_schedule_file(arguments.name) else {}
    _check_outputs(arguments, files)
    schedule, costs = _find(arguments)
    if arguments.svg is not None:
        write_file("--svg", arguments.svg, draw_schedule_svg(schedule, costs))
    if arguments.out is not None:
        notes = f"flax-mesh {' '.join(argv)}\n{summary(simulate(schedule, costs))}"
        write_file("--out", arguments.out, schedule_text(schedule, notes))
    if arguments.json:
        print(json.dumps(_data(schedule, costs)))
    else:
        print(schedule_table(schedule, costs, width=table_width()))
    return DONE


def _check_outputs(arguments: argparse.Namespace, files: dict[str, str]) -> None:
    """Raise one ConfigError for --svg and --out, which are written at the end; `files` are read."""
    mistakes = Mistakes()
    if arguments.svg is not None:
        with mistakes:
            check_writable("--svg", arguments.svg, files)
    if arguments.out is not None:
        with mistakes:
            others = {} if arguments.svg is None else {f"--svg {arguments.svg}": arguments.svg}
            check_writable("--out", arguments.out, files | others)
        if arguments.out and not is_schedule_file(arguments.out):
            mistakes.problems.append(
                f"--out {arguments.out}: a file of a schedule must contain a dot or a slash, to differ from a name"
            )
    mistakes.raise_if_any()


def _data(schedule: Schedule, costs: Sequence[StageCost]) -> dict[str, Any]:
    simulated = simulate(schedule, costs)
    return {
        "name": schedule.name,
        "makespan": simulated.makespan,
        "period": simulated.period,
        "bubble": simulated.bubble,
        "peak_activations": list(simulated.peak_activations),
        "transfers": simulated.transfers,
        "stage_to_group": list(schedule.stage_to_group),
        "rows": [[str(action) for action in row] for row in schedule.rows],
    }


def _find(arguments: argparse.Namespace) -> tuple[Schedule, tuple[StageCost, ...]]:
    """The schedule, and the costs of every stage."""
    try:
        schedule = _schedule(arguments)
        costs = [StageCost(*cost) for cost in _costs(arguments.costs)]
        return schedule, stage_costs(costs[0] if len(costs) == 1 else costs, schedule.num_stages)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(one_line(error)) from error


def _schedule(arguments: argparse.Namespace) -> Schedule:
    given = {"--stages": arguments.stages, "--microbatches": arguments.microbatches, "--virtual": arguments.virtual}
    if is_schedule_file(arguments.name):
        if redundant := [option for option, value in given.items() if value is not None]:
            raise ConfigError(f"{' '.join(redundant)}: {arguments.name} defines this; remove it")
        return read_schedule(arguments.name)
    if missing := [option for option in ("--stages", "--microbatches") if given[option] is None]:
        raise ConfigError(f"{' and '.join(missing)}: required; see flax-mesh schedule --help")
    sizes = {"num_groups": arguments.stages, "num_microbatches": arguments.microbatches}
    return make_schedule(arguments.name, **sizes, num_virtual_stages=arguments.virtual)


def _costs(text: str) -> list[tuple[float, ...]]:
    try:
        costs = [tuple(float(number) for number in part.split(",")) for part in text.split("/")]
    except ValueError as error:
        raise ConfigError(f"--costs must be numbers joined by commas, got {text!r}") from error
    if wrong := [part for part, cost in zip(text.split("/"), costs, strict=True) if not 3 <= len(cost) <= 4]:
        raise ConfigError(f"--costs must be F,B,W or F,B,W,T, got {' and '.join(wrong)}")
    return costs
