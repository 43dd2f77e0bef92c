"""flax-mesh: the command line.

Exit codes: 0 success, 1 unexpected error, 2 invalid input, 3 findings, a plan that does not fit or damaged checkpoints,
4 stopped by a signal or a closed standard output after saving, 5 another process of the run was lost, or a step timed
out, 6 the numbers of a step were not finite, or above a limit, 130 interrupted while nothing could be saved. A reader
that ends early (`| head`) does not change the code of commands that only print.
"""

import argparse
import errno
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

from flax_mesh.cli.text.arguments import add_train
from flax_mesh.errors import ConfigError
from flax_mesh.text import shortened, version_of

COMMANDS = {
    "train": "train a recipe, or resume its run",
    "launch": "run train in several processes on this machine",
    "generate": "continue prompts with a trained decoder",
    "evaluate": "measure the loss and the perplexity of a trained decoder",
    "explain": "show the sharding of every array of a recipe, without devices",
    "plan": "forecast the memory and the time of a step, for devices that need not be here",
    "mesh": "show how a mesh is placed on the available devices",
    "schedule": "show or search a pipeline schedule",
    "checkpoint": "list, inspect, verify, compare, export, import and reshard checkpoints",
}


_WITHOUT_JAX = {"-h", "--help", "--version"}  # importing JAX takes a second


def command() -> int:
    """`main` as a program, which Ctrl-C ends without a traceback while it imports JAX."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # a signal that is ignored stays ignored
        signal.signal(signal.SIGINT, _end)
    try:
        if not _WITHOUT_JAX & {*sys.argv[1:3]}:
            for name in ("common", *(name for name in COMMANDS if name in sys.argv[1:])):
                import_module(f"flax_mesh.cli.{name}")
    finally:
        signal.signal(signal.SIGINT, before)
    return main()


def _end(number: int, frame: object) -> NoReturn:
    """End at once: an extension module turns an exception during its import into an ImportError."""
    os.write(2, b"flax-mesh: interrupted\n")
    os._exit(128 + number)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Example:
        >>> from flax_mesh.cli import main
        >>> main(["train", "no_such_recipe.py"])  # prints the mistake
        2
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if _WITHOUT_JAX & {*argv[:2]}:
        with suppress(ConfigError):  # which `_run` prints
            _parse(argv)
    return _run(argv)


def _run(argv: Sequence[str]) -> int:
    from flax_mesh.cli.common import EXIT_CODES, INTERRUPTED, report_failure, with_lost_output
    from flax_mesh.processes.output import tolerant_output

    for name in ("absl", "asyncio"):  # Orbax logs every file, and every error several times
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if sys.unraisablehook is sys.__unraisablehook__:  # do not replace the hook of another program, such as pytest
        sys.unraisablehook = _unraisable
    with tolerant_output():
        try:
            arguments = _parse(argv)
            command = import_module(f"flax_mesh.cli.{arguments.command}")
            return with_lost_output(command.run(arguments, argv))
        except tuple(EXIT_CODES) as error:
            return report_failure(error)
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:  # of an argument; it may be raised wherever its file is looked for
                raise
            path = shortened(str(error.filename))
            return report_failure(ConfigError(f"{path}: {error.strerror}; use a shorter path"))
        except KeyboardInterrupt:  # while train runs, SIGINT saves instead
            print("flax-mesh: interrupted", file=sys.stderr)
            return INTERRUPTED


def _unraisable(event: Any) -> None:
    """Suppress the message that tensorstore prints for every array after a failed save, which was reported already."""
    if event.object is not None or str(event.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(event)


class _ArgumentParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Settings may appear before, between and after options."""
    parser = _parser(argv)
    arguments, rest = parser.parse_known_args(argv)
    if options := [text for text in rest if text.startswith("-")]:
        parser.error(f"unknown option: {' '.join(options)}")
    if rest and not hasattr(arguments, "overrides"):
        parser.error(f"unexpected arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides += rest  # argparse collects only the first contiguous group of settings
    return arguments


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """With the arguments of the commands in `argv` only: most commands import JAX to define theirs."""
    parser = _ArgumentParser(
        prog="flax-mesh", description="Train and inspect Flax NNX models on any device mesh.", allow_abbrev=False
    )
    version = f"flax-mesh {version_of('flax-mesh')} (jax {version_of('jax')}, flax {version_of('flax')})"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, help in COMMANDS.items():
        command = commands.add_parser(name, help=help, allow_abbrev=False)
        if name == "train":
            add_train(command)
        elif name in argv:
            import_module(f"flax_mesh.cli.{name}").add_arguments(command)
    return parser
