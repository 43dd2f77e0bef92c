"""`flax-mesh plan`: memory, time and traffic of a recipe's step, for devices that need not be here."""

import argparse
import json
import sys
from collections.abc import Sequence

from flax_mesh.cli.common import (
    DONE,
    FINDINGS,
    add_recipe,
    config_of,
    table_width,
    use_platform,
    with_files,
    write_file,
)
from flax_mesh.errors import ConfigError
from flax_mesh.hardware import load_chip
from flax_mesh.plan import plan
from flax_mesh.plan.compile import compile_recipe
from flax_mesh.plan.compile.recipe import LIMIT_S
from flax_mesh.plan.report import WIDTH, memory_line
from flax_mesh.plan.topology import EXAMPLES, Topology, parse_topology
from flax_mesh.train import TrainConfig
from flax_mesh.train.checks import check_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Forecast the memory per device and the time of a training step, without devices; --compile compiles it too."
    )
    parser.epilog = (
        "Exit codes: 0 it fits, or the capacity is unknown, 1 unexpected error, 2 invalid input, 3 it does not fit."
    )
    add_recipe(parser)
    parser.add_argument("--compile", action="store_true", help="compile the step for the topology, in another process")
    parser.add_argument(
        "--limit", type=float, metavar="SECONDS", help=f"stop --compile after this time (default: {LIMIT_S:g})"
    )
    parser.add_argument(
        "--topology", metavar="T", help=f"the devices, such as {EXAMPLES} (default: the devices that are here)"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument("--html", metavar="FILE", help="write an HTML page with drawings")


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    config = config_of(arguments.recipe, arguments.overrides)
    if problems := check_config(config):
        raise ConfigError(problems)
    topology = topology_of(arguments.topology, config)
    if arguments.compile or arguments.limit is not None:
        return _compile(arguments)
    found = plan(config, topology)
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=1))
    elif arguments.html:
        title = f"{arguments.recipe} {' '.join(arguments.overrides)}"
        write_file("--html", arguments.html, found.to_html(title=title))
        print(f"{arguments.html}: {memory_line(found.memory)}")
    else:
        print(found.to_text(width=min(table_width(), WIDTH)))
    return FINDINGS if found.fits is False else DONE


def _compile(arguments: argparse.Namespace) -> int:
    wrong = {
        "--limit requires --compile": not arguments.compile,
        "--compile requires --topology, such as cpu:8": arguments.topology is None,
        "--compile prints text or --json; --html is the page of the plan without it": arguments.html is not None,
    }
    if problems := [text for text, is_wrong in wrong.items() if is_wrong]:
        raise ConfigError(problems)
    found = compile_recipe(
        arguments.recipe,
        with_files(arguments.overrides),
        arguments.topology,
        limit=LIMIT_S if arguments.limit is None else arguments.limit,
        say=lambda text: print(f"flax-mesh: {text}", file=sys.stderr),
    )
    if arguments.json:
        print(json.dumps({**found.plan.to_dict(), "compiled": found.to_dict()}, indent=1))
    else:
        width = min(table_width(), WIDTH)
        print(f"{found.plan.to_text(width=width)}\n\n{found.to_text(width=width)}")
    return FINDINGS if found.fits is False else DONE


def topology_of(text: str | None, config: TrainConfig) -> Topology | None:
    """The topology that is named, whose chip may be that of `run.hardware`; None for the devices that are here."""
    use_platform(config.run.platform if text is None else "cpu")  # for a topology, accelerators are left alone
    if text is None:
        return None
    return parse_topology(text, load_chip(config.run.hardware) if config.run.hardware else None)
