"""The arguments of commands whose help needs no JAX."""

import argparse
import os


def add_recipe(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    parser.add_argument("recipe", nargs="?" if optional else None, metavar="RECIPE", help="FILE.py or FILE.py:function")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="section.key=value",
        help="settings, such as run.steps=20; @FILE reads settings from a file",
    )


def add_train(parser: argparse.ArgumentParser) -> None:
    parser.description = "Train a recipe. The same command run again resumes from the newest valid checkpoint."
    parser.epilog = (
        "Exit codes: 0 success, 1 unexpected error or a checkpoint that could not be written, 2 invalid input, "
        "3 all checkpoints are damaged, 4 stopped by a signal or a closed standard output after saving, "
        "5 another process was lost or a step timed out, "
        "6 the loss or the gradients of a step were not finite, or above run.spike_factor."
    )
    add_recipe(parser)
    parser.add_argument(
        "--print-config", action="store_true", help="print all settings, in the format that @FILE reads, and exit"
    )
    parser.add_argument("--restart", action="store_true", help="start a new run in a new folder beside run.folder")
    parser.add_argument(
        "--allow-changes",
        action="store_true",
        help="resume, or start from checkpoint.start_from, even if settings that change the result differ from those "
        "of the checkpoint",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE.json",
        type=os.path.expanduser,
        help="write the times of all actions of a pipeline's third step, and a picture beside it",
    )
    parser.add_argument(
        "--process",
        metavar="I/N@HOST:PORT",
        help="run as process I of N, with process 0 listening at HOST:PORT (default: detected by JAX on a cluster)",
    )
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        default="",
        help="process 0 listens there; the launcher, such as MPI, numbers the processes",
    )
    parser.add_argument(
        "--devices-per-process",
        type=int,
        metavar="K",
        help="virtual CPU devices per process (default: the N of run.platform=cpu:N divided among the processes)",
    )
    parser.add_argument(
        "--step-timeout",
        type=float,
        metavar="SECONDS",
        help="if no step ends for this long, print all stacks and exit with code 5 "
        "(default: 1800 with several processes, else no timeout)",
    )
