"""`flax-mesh plan`: memory, time and traffic of a recipe's step, for devices that need not be here."""

import argparse
import json
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import jax

from flax_mesh.cli.common import (
    DONE,
    FINDINGS,
    check_writable,
    config_of,
    table_width,
    use_platform,
    with_files,
    write_file,
)
from flax_mesh.cli.text import layouts
from flax_mesh.cli.text.arguments import add_recipe
from flax_mesh.errors import ConfigError
from flax_mesh.hardware import load_chip
from flax_mesh.plan import plan
from flax_mesh.plan.calibrate import calibrate
from flax_mesh.plan.compile import compile_recipe
from flax_mesh.plan.compile.recipe import LIMIT_S
from flax_mesh.plan.report import WIDTH
from flax_mesh.plan.search import search_layouts
from flax_mesh.plan.search.search import PLANS, SEARCHED
from flax_mesh.plan.topology import EXAMPLES
from flax_mesh.recipe.checks import check_config
from flax_mesh.recipe.config import PLATFORM, TrainConfig
from flax_mesh.recipe.overrides import setting_of
from flax_mesh.text import shortened

SEARCH_WIDTH = 100  # columns of the tables of a search, whose rows contain settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Forecast the memory per device and the time of a training step, without devices and, unless --compile is "
        "passed, without compiling it."
    )
    parser.epilog = (
        "Exit codes: 0 it fits, or the capacity is unknown, 1 unexpected error, 2 invalid input, 3 it does not fit."
    )
    add_recipe(parser, optional=True)
    parser.add_argument(
        "--topology", metavar="T", help=f"the devices, such as {EXAMPLES} (default: the devices that are here)"
    )
    parser.add_argument("--compile", action="store_true", help="compile the step, in another process")
    parser.add_argument(
        "--limit", type=float, metavar="SECONDS", help=f"stop a compilation after this time (default: {LIMIT_S:g})"
    )
    parser.add_argument(
        "--search",
        metavar="CHIPS",
        help="search the mesh and the other settings that are fastest, on v5p:512 or a topology; settings that are "
        "passed stay as they are",
    )
    parser.add_argument(
        "--plans", type=int, metavar="N", help=f"plans that a search makes, about one second each (default: {PLANS})"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument(
        "--calibrate",
        metavar="FILE",
        type=os.path.expanduser,
        help="measure the devices that are here, and write the file that run.hardware=FILE reads; without a RECIPE, "
        "with run.platform=P for the devices of another platform",
    )


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    if problems := _option_problems(arguments):
        raise ConfigError(problems)
    if arguments.calibrate is not None:
        return _calibrate(arguments)
    if arguments.recipe is None:
        raise ConfigError("the following arguments are required: RECIPE; see flax-mesh plan --help")
    config = config_of(arguments.recipe, arguments.overrides)
    if problems := check_config(config):
        raise ConfigError(problems)
    if arguments.search is not None:
        return _search(arguments, config)
    if arguments.compile:
        return _compile(arguments)
    use_platform(config.run.platform if arguments.topology is None else "cpu")  # no accelerator for a topology
    forecast = plan(config, arguments.topology)
    width = min(table_width(), WIDTH)
    print(json.dumps(forecast.to_dict(), indent=1) if arguments.json else forecast.to_text(width=width))
    return FINDINGS if forecast.fits is False else DONE


def _option_problems(arguments: argparse.Namespace) -> list[str]:
    """One line per missing or conflicting option."""
    compiles, searches, calibrates = arguments.compile, arguments.search is not None, arguments.calibrate is not None
    wrong = {
        "--limit requires --compile": arguments.limit is not None and not compiles,
        "--plans requires --search CHIPS": arguments.plans is not None and not searches,
        "--search names the devices; leave out --topology": searches and arguments.topology is not None,
        "--search makes plans only; pass --compile with the settings of a layout": searches and compiles,
        "--compile requires --topology T, such as cpu:8": (
            compiles and not (searches or calibrates) and arguments.topology is None
        ),
        "--calibrate measures the devices that are here; leave out --topology, --search and --compile": (
            calibrates and (arguments.topology is not None or searches or compiles)
        ),
    }
    return [text for text, is_wrong in wrong.items() if is_wrong]


def _calibrate(arguments: argparse.Namespace) -> int:
    settings = [arguments.recipe, *arguments.overrides] if arguments.recipe is not None else []
    platform = settings[-1].removeprefix("run.platform=") if settings else "auto"
    if len(settings) > 1 or not PLATFORM.fullmatch(platform):
        raise ConfigError(
            "--calibrate FILE measures the devices that are here: no RECIPE; of the settings only "
            f"run.platform=auto, cpu, cpu:N (N devices), gpu or tpu; got {shortened(' '.join(settings), 80)!r}"
        )
    check_writable("--calibrate", arguments.calibrate)
    use_platform(platform)
    calibration = calibrate(jax.devices())  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    write_file("--calibrate", arguments.calibrate, calibration.to_toml())
    load_chip(arguments.calibrate)  # a ConfigError if a figure is not a positive number
    print(f"{calibration.to_text()}\n\n{arguments.calibrate}: written; use it with run.hardware={arguments.calibrate}")
    return DONE


def _compile(arguments: argparse.Namespace) -> int:
    use_platform("cpu")
    words = with_files(arguments.overrides)
    with progress_line() as say:
        limit = LIMIT_S if arguments.limit is None else arguments.limit
        compiled = compile_recipe(arguments.recipe, words, arguments.topology, limit=limit, say=say)
    if arguments.json:
        print(json.dumps({**compiled.plan.to_dict(), "compiled": compiled.to_dict()}, indent=1))
    else:
        width = min(table_width(), WIDTH)
        print(f"{compiled.plan.to_text(width=width)}\n\n{compiled.to_text(width=width)}")
    return FINDINGS if compiled.fits is False else DONE


def _search(arguments: argparse.Namespace, config: TrainConfig) -> int:
    use_platform("cpu")
    words, plans = with_files(arguments.overrides), PLANS if arguments.plans is None else arguments.plans
    fixed = [name for text in words if (name := setting_of(text)) in SEARCHED]
    with progress_line() as say:
        search = search_layouts(config, arguments.search, fixed=fixed, plans=plans, say=say)
    if arguments.json:
        print(json.dumps(layouts.to_dict(search), indent=1))
    else:
        command = ["flax-mesh", "train", arguments.recipe, *arguments.overrides]
        print(layouts.to_text(search, command, min(table_width(), SEARCH_WIDTH)))
    return FINDINGS if search.planned[0].plan.fits is False else DONE


@contextmanager
def progress_line() -> Generator[Callable[[str], None]]:
    """A line on standard error that each call replaces; nothing if that is not a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("") as status:
        yield lambda text: status.update(text)
