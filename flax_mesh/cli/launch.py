"""`flax-mesh launch`: `train` in several processes on this machine."""

import argparse
from collections.abc import Sequence

from flax_mesh.errors import ConfigError
from flax_mesh.processes.launch import launch
from flax_mesh.processes.watchdog import LOST


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Start N processes of train, which talk over 127.0.0.1, and merge their output. Signals go to all."
    )
    parser.epilog = "Exit codes: that of the first process that ended with an error, 5 where a signal ended it; else 0."
    parser.add_argument("-n", "--processes", type=int, required=True, metavar="N", help="how many processes")
    parser.add_argument("--devices-per-process", type=int, metavar="K", help="virtual CPU devices of each")
    parser.add_argument("what", nargs="+", metavar="-- train RECIPE ...", help="the command that each of them runs")


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    what, devices = arguments.what, arguments.devices_per_process
    problems = []
    if arguments.processes < 1:
        problems.append(f"-n must be at least 1, got {arguments.processes}")
    if devices is not None and devices < 1:
        problems.append(f"--devices-per-process must be at least 1, got {devices}")
    if what[0] != "train":
        problems.append(f"launch starts train alone, got {what[0]}; write flax-mesh launch -n 4 -- train RECIPE ...")
    if problems:
        raise ConfigError(problems)
    extra = [] if devices is None else [f"--devices-per-process={devices}"]
    return launch(["-m", "flax_mesh.cli", *what], arguments.processes, extra, lost=LOST)
