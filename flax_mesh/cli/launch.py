"""`flax-mesh launch`: `train` in several processes on this machine."""

import argparse
from collections.abc import Sequence

from flax_mesh.errors import ConfigError
from flax_mesh.processes.launch import launch
from flax_mesh.processes.watchdog import LOST


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run train in N processes connected over 127.0.0.1, and merge their output. Signals are sent to all."
    )
    parser.epilog = (
        "Exit code: the code of the first process that failed, 5 if a signal ended it; 4 if all stopped after saving; "
        "0 if none failed."
    )
    parser.add_argument("-n", "--processes", type=int, required=True, metavar="N", help="number of processes")
    parser.add_argument("--devices-per-process", type=int, metavar="K", help="virtual CPU devices per process")
    parser.add_argument("what", nargs="+", metavar="-- train RECIPE ...", help="the command that every process runs")


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    what, devices = arguments.what, arguments.devices_per_process
    problems: list[str] = []
    if arguments.processes < 1:
        problems.append(f"-n must be at least 1, got {arguments.processes}")
    if devices is not None and devices < 1:
        problems.append(f"--devices-per-process must be at least 1, got {devices}")
    if what[0] != "train":
        problems.append(
            f"launch runs only the command train, got {what[0]}; use flax-mesh launch -n 4 -- train RECIPE ..."
        )
    if problems:
        raise ConfigError(problems)
    extra = [] if devices is None else [f"--devices-per-process={devices}"]
    return launch(["-m", "flax_mesh.cli", *what], arguments.processes, extra, lost=LOST)
