"""`flax-mesh schedule`: print a named schedule, or search one, as a table, JSON or a picture."""

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from flax_mesh.cli.common import DONE, check_writable, table_width, write_file
from flax_mesh.errors import ConfigError, Mistakes
from flax_mesh.mpmd.schedules import (
    Schedule,
    SearchResult,
    StageCost,
    draw_schedule_svg,
    make_schedule,
    schedule_table,
    search_schedule,
    simulate,
)
from flax_mesh.mpmd.schedules.schedule import SCHEDULE_NAMES, check_size
from flax_mesh.mpmd.schedules.simulate import Costs, peak_activations, stage_costs
from flax_mesh.mpmd.schedules.text import is_schedule_file, read_schedule, schedule_text, summary
from flax_mesh.mpmd.schedules.validate import memory_limits
from flax_mesh.text import one_line

SEARCH = "search"
DEFAULT_SECONDS = 5.0


class Found(NamedTuple):
    schedule: Schedule
    costs: tuple[StageCost, ...]  # one per stage
    result: SearchResult | None = None  # None for a named schedule


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print makespan, bubble, memory and order of a pipeline schedule. Needs no devices."
    parser.epilog = "Exit codes: 0 success, 1 unexpected error, 2 invalid input."
    add = parser.add_argument
    add(
        "name",
        metavar="NAME",
        help=f"{', '.join(SCHEDULE_NAMES)}; v-K, with memory for K activations per group; a FILE; or search, for the "
        "best schedule at given costs and memory",
    )
    add("--stages", metavar="S", type=int, help="number of groups of devices; each has V stages")
    add("--microbatches", metavar="M", type=int, help="number of microbatches")
    add("--virtual", metavar="V", type=int, help="stages per group (default: the schedule's number)")
    costs = (
        "times of forward, backward to input, backward to weights and transfer (default 1,1,1); to set them per stage, "
        "join them by /: 1,1,1/2,2,2"
    )
    add("--costs", metavar="F,B,W[,T]", default="1,1,1", help=costs)
    add(
        "--memory",
        metavar="K",
        help="maximum number of activations that a group may store; one number, or one per group: 4,3,2,1",
    )
    add(
        "--activations",
        metavar="A",
        help="search: size of an activation in the unit of --memory, such as bytes; one number or one per stage: 1,1,2",
    )
    add("--period", action="store_true", help="search: minimize the time between two steps instead of the time of one")
    add("--seconds", metavar="N", type=float, help=f"search: approximate time limit (default {DEFAULT_SECONDS:g})")
    add("--seed", metavar="N", type=int, help="search: random seed (default 0)")
    add("--whole-backward", action="store_true", help="search: do not split the backward pass into B and W")
    add("--svg", metavar="FILE", type=os.path.expanduser, help="write a picture")
    add("--out", metavar="FILE", type=os.path.expanduser, help="write the schedule as text, for pipeline.schedule=FILE")
    add("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    files = {f"the schedule {arguments.name}": arguments.name} if is_schedule_file(arguments.name) else {}
    _check_outputs(arguments, files)
    choice = _find(arguments)
    if arguments.svg is not None:
        write_file("--svg", arguments.svg, draw_schedule_svg(choice.schedule, choice.costs))
    if arguments.out is not None:
        notes = f"flax-mesh {' '.join(argv)}\n{summary(simulate(choice.schedule, choice.costs))}"
        write_file("--out", arguments.out, schedule_text(choice.schedule, notes))
    if arguments.json:
        print(json.dumps(_data(choice)))
    else:
        print(schedule_table(choice.schedule, choice.costs, width=table_width()))
        if choice.result is not None:
            print(f"\n{_summary(choice.result)}")
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


def _data(choice: Found) -> dict[str, Any]:
    schedule, result = choice.schedule, choice.result
    simulated = simulate(schedule, choice.costs)
    data: dict[str, Any] = {
        "name": schedule.name,
        "makespan": simulated.makespan,
        "period": simulated.period,
        "bubble": simulated.bubble,
        "peak_activations": list(simulated.peak_activations),
        "transfers": simulated.transfers,
        "stage_to_group": list(schedule.stage_to_group),
        "rows": [[str(action) for action in row] for row in schedule.rows],
    }
    if result is not None:
        data |= {name: value for name, value in vars(result).items() if name not in ("schedule", *data)}
    return data


def _read(arguments: argparse.Namespace) -> Schedule:
    """The schedule of a file, which defines some of the options."""
    given = {"--stages": arguments.stages, "--microbatches": arguments.microbatches, "--virtual": arguments.virtual}
    if redundant := [option for option, value in given.items() if value is not None]:
        raise ConfigError(f"{' '.join(redundant)}: {arguments.name} defines this; remove it")
    schedule = read_schedule(arguments.name)
    arguments.stages, arguments.microbatches = schedule.num_groups, schedule.num_microbatches
    return schedule


def _find(arguments: argparse.Namespace) -> Found:
    try:
        of_file = _read(arguments) if is_schedule_file(arguments.name) else None
        sizes = {"--stages": arguments.stages, "--microbatches": arguments.microbatches}
        if missing := [option for option, value in sizes.items() if value is None]:
            raise ConfigError(f"{' and '.join(missing)}: required; see flax-mesh schedule --help")
        _check_search_options(arguments)
        check_size(arguments.stages * (arguments.virtual or 1), arguments.microbatches)
        kind = int if arguments.activations is None else float
        memory = None if arguments.memory is None else _numbers("--memory", arguments.memory, kind)
        if memory is not None:
            memory = memory_limits(memory[0] if len(memory) == 1 else memory, arguments.stages)
        costs = _costs(arguments.costs)
        if arguments.name == SEARCH:
            return _search(arguments, costs, memory)
        schedule = of_file or make_schedule(
            arguments.name,
            num_groups=arguments.stages,
            num_microbatches=arguments.microbatches,
            num_virtual_stages=arguments.virtual,
        )
        _check_memory(arguments.name, schedule, memory)
        return Found(schedule, stage_costs(costs, schedule.num_stages))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(one_line(error)) from error


def _summary(result: SearchResult) -> str:
    gap = f"at most {result.gap:.2%} slower than the optimum (lower bound {result.lower_bound:.6g})"
    named = "no named schedule fits this memory"
    if result.best_named is not None:
        value = getattr(result, f"best_named_{result.objective}")
        named = f"best named schedule that fits: {result.best_named}, {result.objective} {value:.6g}"
    interrupted = "interrupted; " if result.interrupted else ""
    return f"{interrupted}{'optimal' if result.optimal else gap}; {named}"


def _search(arguments: argparse.Namespace, costs: Costs, memory: Sequence[float] | None) -> Found:
    virtual = 1 if arguments.virtual is None else arguments.virtual
    if arguments.stages < 1 or virtual < 1:
        raise ConfigError(f"--stages and --virtual must be at least 1, got {arguments.stages} and {virtual}")
    of_stages = stage_costs(costs, arguments.stages * virtual)
    result = search_schedule(
        of_stages,
        memory,
        num_microbatches=arguments.microbatches,
        num_groups=arguments.stages,
        activation_sizes=_sizes(arguments.activations, len(of_stages)),
        splits_backward=not arguments.whole_backward,
        objective="period" if arguments.period else "makespan",
        seconds=DEFAULT_SECONDS if arguments.seconds is None else arguments.seconds,
        seed=arguments.seed or 0,
    )
    return Found(result.schedule, of_stages, result)


def _sizes(text: str | None, num_stages: int) -> tuple[float, ...] | None:
    if text is None:
        return None
    sizes = _numbers("--activations", text, float)
    return sizes * num_stages if len(sizes) == 1 else sizes


def _check_memory(name: str, schedule: Schedule, memory: Sequence[float] | None) -> None:
    peaks = peak_activations(schedule)
    if memory is not None and any(peak > limit for peak, limit in zip(peaks, memory, strict=True)):
        least = schedule.num_stages // schedule.num_groups
        raise ConfigError(
            f"{name} stores {_listed(peaks)} activations, more than --memory {_listed(memory)}; "
            f"flax-mesh schedule search accepts any limit of at least {least}"
        )


def _listed(numbers: Sequence[float]) -> str:
    return str(numbers[0]) if len(set(numbers)) == 1 else ",".join(map(str, numbers))


def _check_search_options(arguments: argparse.Namespace) -> None:
    options = {"--seconds": arguments.seconds, "--seed": arguments.seed}
    options |= {"--whole-backward": arguments.whole_backward or None, "--period": arguments.period or None}
    options["--activations"] = arguments.activations
    given = [option for option, value in options.items() if value is not None]
    if given and arguments.name != SEARCH:
        raise ConfigError(f"{' '.join(given)}: only flax-mesh schedule search accepts this, not {arguments.name}")


def _costs(text: str) -> Costs:
    """One cost for all stages, or one per stage."""
    costs = [_numbers("--costs", part, float) for part in text.split("/")]
    if wrong := [part for part, cost in zip(text.split("/"), costs, strict=True) if not 3 <= len(cost) <= 4]:
        raise ConfigError(f"--costs must be F,B,W or F,B,W,T, got {' and '.join(wrong)}")
    return StageCost(*costs[0]) if len(costs) == 1 else [StageCost(*cost) for cost in costs]


def _numbers(option: str, text: str, kind: type) -> tuple:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        numbers = "integers" if kind is int else "numbers"
        raise ConfigError(f"{option} must be {numbers} joined by commas, got {text!r}") from error
