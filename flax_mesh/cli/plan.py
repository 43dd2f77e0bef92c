"""`flax-mesh plan`: memory, time and traffic of a recipe's step, for devices that need not be here."""

import argparse
import json
from collections.abc import Sequence

import jax

from flax_mesh.cli.common import (
    DONE,
    FINDINGS,
    add_recipe,
    check_writable,
    config_of,
    table_width,
    use_platform,
    write_file,
)
from flax_mesh.errors import ConfigError
from flax_mesh.hardware import load_chip
from flax_mesh.plan import plan
from flax_mesh.plan.calibrate import calibrate
from flax_mesh.plan.report import WIDTH, memory_line
from flax_mesh.plan.topology import EXAMPLES, Topology, parse_topology
from flax_mesh.text import shortened
from flax_mesh.train import TrainConfig
from flax_mesh.train.checks import check_config
from flax_mesh.train.config import PLATFORM


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
