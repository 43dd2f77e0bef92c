"""The arguments of `flax-mesh launch`, and those of `flax-mesh train` as one of several processes."""

import argparse
from collections.abc import Sequence

from flax_mesh.errors import ConfigError
from flax_mesh.processes import LOST, launch, parse_processes

STEP_TIMEOUT_S = 1800.0


def add_process_arguments(command: argparse.ArgumentParser) -> None:
    """Those of `train`."""
    command.add_argument(
        "--process",
        metavar="I/N@HOST:PORT",
        help="be process I of N, of which process 0 listens at HOST:PORT; by default as the cluster tells JAX",
    )
    command.add_argument(
        "--devices-per-process",
        type=int,
        metavar="K",
        help="virtual CPU devices of each process; by default N of run.platform=cpu:N are divided among them",
    )
    command.add_argument(
        "--step-timeout",
        type=float,
        metavar="SECONDS",
        help="end with all stacks and code 5 when no step ends for so long; 1800 with several processes, else none",
    )


def add_launch_arguments(command: argparse.ArgumentParser) -> None:
    """Those of `launch`."""
    command.add_argument("-n", "--processes", type=int, required=True, metavar="N", help="how many processes")
    command.add_argument("--devices-per-process", type=int, metavar="K", help="virtual CPU devices of each")
    command.add_argument("what", nargs="+", metavar="-- train RECIPE ...", help="the command that each of them runs")


def launch_answer(arguments: argparse.Namespace) -> int:
    """Run the command in several processes; the exit code of the whole."""
    what: Sequence[str] = arguments.what
    devices = arguments.devices_per_process
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


def devices_of_process(platform: str, count: int, devices: int | None) -> str:
    """`run.platform` for one of `count` processes: of cpu:N its share, or `devices` where that is given."""
    name, _, total = platform.partition(":")
    if devices is not None:
        if name not in ("cpu", "auto"):
            raise ConfigError(f"--devices-per-process is for virtual CPU devices, and run.platform={platform}")
        return f"cpu:{devices}"
    if not total or count == 1:
        return platform
    if int(total) % count:
        raise ConfigError(
            f"run.platform={platform} cannot be divided among {count} processes; give --devices-per-process, or a "
            "multiple"
        )
    return f"cpu:{int(total) // count}"


def same_command(argv: Sequence[str], process: str | None) -> list[str]:
    """What to type to run `argv` again: launched again, where it was launched."""
    kept = [text for text in argv if not text.startswith(("--process=", "--devices-per-process="))]
    if process is None:
        return kept
    devices = [text for text in argv if text.startswith("--devices-per-process=")]
    return ["launch", "-n", str(parse_processes(process).count), *devices, "--", *kept]
