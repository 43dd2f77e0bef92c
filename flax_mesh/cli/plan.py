"""`flax-mesh plan`: memory, time and traffic of a recipe's step, for devices that need not be here."""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import jax

from flax_mesh.cli.common import (
    DONE,
    FINDINGS,
    add_recipe,
    check_writable,
    config_of,
    table_width,
    use_platform,
    with_files,
    write_file,
)
from flax_mesh.errors import ConfigError
from flax_mesh.hardware import load_chip
from flax_mesh.plan import plan
from flax_mesh.plan.calibrate import calibrate
from flax_mesh.plan.report import WIDTH, memory_line
from flax_mesh.plan.search import report as search_report
from flax_mesh.plan.search import search_layouts
from flax_mesh.plan.search.search import PLANS
from flax_mesh.plan.search.space import SEARCHED
from flax_mesh.plan.topology import EXAMPLES, Topology, parse_topology
from flax_mesh.text import shortened
from flax_mesh.train import TrainConfig
from flax_mesh.train.checks import check_config
from flax_mesh.train.config import PLATFORM
from flax_mesh.train.overrides import setting_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Forecast the memory per device and the time of a training step, without compiling it and without devices."
    )
    parser.epilog = (
        "Exit codes: 0 it fits, or the capacity is unknown, 1 unexpected error, 2 invalid input, 3 it does not fit."
    )
    add_recipe(parser, optional=True)
    parser.add_argument(
        "--topology", metavar="T", help=f"the devices, such as {EXAMPLES} (default: the devices that are here)"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument("--html", metavar="FILE", help="write an HTML page with drawings")
    parser.add_argument(
        "--search",
        metavar="CHIPS",
        help="search the mesh and the other settings that are fastest, on v5p:512 or a topology; settings that are "
        "passed stay as they are",
    )
    parser.add_argument(
        "--plans", type=int, metavar="N", help=f"plans that a search makes, about one second each (default: {PLANS})"
    )
    output.add_argument(
        "--calibrate",
        metavar="FILE",
        help="measure the devices that are here, and write the file that run.hardware=FILE reads; without a RECIPE, "
        "with run.platform=P for the devices of another platform",
    )


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    if arguments.calibrate is not None:
        return run_calibration(arguments)
    if arguments.recipe is None:
        raise ConfigError("the following arguments are required: RECIPE; see flax-mesh plan --help")
    config = config_of(arguments.recipe, arguments.overrides)
    if problems := check_config(config):
        raise ConfigError(problems)
    if arguments.search is not None:
        return run_search(arguments, config)
    if arguments.plans is not None:
        raise ConfigError("--plans needs --search CHIPS")
    found = plan(config, topology_of(arguments.topology, config))
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=1))
    elif arguments.html:
        title = f"{arguments.recipe} {' '.join(arguments.overrides)}"
        write_file("--html", arguments.html, found.to_html(title=title))
        print(f"{arguments.html}: {memory_line(found.memory)}")
    else:
        print(found.to_text(width=min(table_width(), WIDTH)))
    return FINDINGS if found.fits is False else DONE


def run_calibration(arguments: argparse.Namespace) -> int:
    settings = [arguments.recipe, *arguments.overrides] if arguments.recipe is not None else []
    platform = settings[-1].removeprefix("run.platform=") if settings else "auto"
    if len(settings) > 1 or not PLATFORM.fullmatch(platform) or arguments.topology is not None:
        raise ConfigError(
            "--calibrate FILE measures the devices that are here: no RECIPE and no --topology; of the settings only "
            f"run.platform=auto, cpu, cpu:N (N devices), gpu or tpu; got {shortened(' '.join(settings), 80)!r}"
        )
    check_writable("--calibrate", arguments.calibrate)
    use_platform(platform)
    found = calibrate(jax.devices())
    write_file("--calibrate", arguments.calibrate, found.to_toml())
    load_chip(arguments.calibrate)  # a ConfigError if a figure is not a positive number
    print(f"{found.to_text()}\n\n{arguments.calibrate}: written; use it with run.hardware={arguments.calibrate}")
    return DONE


def topology_of(text: str | None, config: TrainConfig) -> Topology | None:
    """The topology that is named, whose chip may be that of `run.hardware`; None for the devices that are here."""
    use_platform(config.run.platform if text is None else "cpu")  # for a topology, accelerators are left alone
    if text is None:
        return None
    return parse_topology(text, load_chip(config.run.hardware) if config.run.hardware else None)


@contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """A line on standard error that each call replaces; nothing if that is not a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("") as status:
        yield lambda text: status.update(text)


def run_search(arguments: argparse.Namespace, config: TrainConfig) -> int:
    if arguments.topology or arguments.html:
        raise ConfigError("--search names the devices, and prints text or --json; leave out --topology and --html")
    use_platform("cpu")
    fixed = [name for text in with_files(arguments.overrides) if (name := setting_of(text)) in SEARCHED]
    with progress_line() as say:
        found = search_layouts(
            config, arguments.search, fixed=fixed, plans=PLANS if arguments.plans is None else arguments.plans, say=say
        )
    if arguments.json:
        print(json.dumps(search_report.to_dict(found), indent=1))
    else:
        command = ["flax-mesh", "train", arguments.recipe, *arguments.overrides]
        print(search_report.to_text(found, command, table_width()))
    return DONE if found.planned[0].plan.fits is not False else FINDINGS
