"""flax-mesh: the command line.

Exit codes: 0 done, 1 anything unexpected, 2 bad input, 3 findings or damage, 4 stopped by a signal after saving,
5 another process of the run was lost, or no step ended in time.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from flax_mesh.cli import checkpoint, explain, launch, mesh, schedule, train
from flax_mesh.cli.common import EXIT_CODES, tell_failure
from flax_mesh.errors import ConfigError

COMMANDS = {
    "train": (train, "train from a recipe, or resume where it stopped"),
    "launch": (launch, "run train in several processes on this machine"),
    "explain": (explain, "show what the sharding rules make of a recipe, without devices"),
    "mesh": (mesh, "show how a mesh lies on the devices that are here"),
    "schedule": (schedule, "show a pipeline schedule in time, or search for one"),
    "checkpoint": (checkpoint, "list, inspect, verify, compare, export, import and reshard checkpoints"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    for name in ("absl", "asyncio"):  # Orbax logs every file it writes, and errors twice and once a task
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if sys.unraisablehook is sys.__unraisablehook__:  # where another program has its own, as pytest does, it stays
        sys.unraisablehook = _unraisable
    try:
        arguments = _parse(argv)
        return arguments.command(arguments, argv)
    except tuple(EXIT_CODES) as error:
        return tell_failure(error)


def _unraisable(found: Any) -> None:
    """As Python does, except what tensorstore prints, once an array, after a save that failed and was reported."""
    if found.object is not None or str(found.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(found)


class _ArgumentParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command and its arguments; settings may appear before, between and after options."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if options := [text for text in rest if text.startswith("-")]:
        parser.error(f"no such option: {' '.join(options)}")
    if rest and not hasattr(arguments, "overrides"):
        parser.error(f"too many arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides += rest  # argparse takes one unbroken run of them only
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = _ArgumentParser(prog="flax-mesh", description="Any Flax NNX model on any mesh.", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (module, help) in COMMANDS.items():
        command = commands.add_parser(name, help=help, allow_abbrev=False)
        command.set_defaults(command=module.run)
        module.add_arguments(command)
    return parser
