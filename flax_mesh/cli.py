"""flax-mesh: the command line. Exit codes: 0 done, 1 anything unexpected, 2 bad input, 4 stopped by a signal after saving."""

import argparse
import logging
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from flax_mesh.errors import ConfigError, ShardingError
from flax_mesh.train import Result, load_recipe, override, to_lines, train
from flax_mesh.train.metrics import Row

DONE, BAD_INPUT, STOPPED = 0, 2, 4


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    arguments = _parser().parse_args(argv)
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax tells of every file it writes
    try:
        return arguments.command(arguments, argv)
    except (ConfigError, ShardingError) as error:
        for line in str(error).splitlines():
            print(f"flax-mesh: {line}", file=sys.stderr)
        return BAD_INPUT


def train_command(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    config = override(load_recipe(arguments.recipe), arguments.overrides)
    if arguments.print_config:
        print("\n".join([f"# flax-mesh train {arguments.recipe} @THIS_FILE", *to_lines(config)]))
        return DONE
    use_platform(config.run.platform)
    with _display(config.run.steps) as display, _signals(display.say) as should_stop:
        result = train(
            config,
            recipe=arguments.recipe,
            restart=arguments.restart,
            allow_changes=arguments.allow_changes,
            say=display.say,
            hooks=[display.row],
            should_stop=should_stop,
        )
    _print_result(result, argv, config.run.steps)
    return STOPPED if result.status == "stopped" else DONE


def use_platform(platform: str) -> None:
    """Choose the JAX backend before any device is touched: "auto", "cpu", "cpu:8", "gpu", "tpu"."""
    name, colon, count = platform.partition(":")
    if name not in ("auto", "cpu", "gpu", "cuda", "tpu") or (colon and (name != "cpu" or not count.isdecimal())):
        raise ConfigError(f"run.platform must be auto, cpu, cpu:N, gpu or tpu, got {platform!r}")
    if colon and int(count) < 1:
        raise ConfigError(f"run.platform={platform} asks for no device; use cpu:1 or more")
    if name != "auto":
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(name, name))
    if count:
        jax.config.update("jax_num_cpu_devices", int(count))
    try:
        jax.devices()
    except RuntimeError as error:
        raise ConfigError(f"run.platform={platform} is not to be had here: {error}") from error


class _ArgumentParser(argparse.ArgumentParser):
    """Reads arguments from @FILE too, one a line; lines that start with # are remarks."""

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        return [] if not arg_line.strip() or arg_line.startswith("#") else [arg_line]


def _parser() -> argparse.ArgumentParser:
    parser = _ArgumentParser(
        prog="flax-mesh", description="Any Flax NNX model on any mesh.", fromfile_prefix_chars="@"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "train",
        help="train from a recipe, or resume where it stopped",
        description="Train from a recipe. Run again, the same command resumes.",
        epilog="Exit codes: 0 done, 1 unexpected error, 2 bad input, 4 stopped by a signal after saving.",
        fromfile_prefix_chars="@",
    )
    command.set_defaults(command=train_command)
    command.add_argument("recipe", metavar="RECIPE", help="FILE.py or FILE.py:function")
    command.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="settings such as run.steps=20; @FILE reads them"
    )
    command.add_argument("--print-config", action="store_true", help="print the whole config, as @FILE reads it")
    command.add_argument("--restart", action="store_true", help="start over in a new folder beside run.folder")
    command.add_argument(
        "--allow-changes", action="store_true", help="resume although settings that change the result differ"
    )
    return parser


class _Display:
    """Prints a line per step, above a progress bar where the output is a terminal."""

    def __init__(self, progress: Any, task: Any):
        self._progress, self._task = progress, task

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def row(self, row: Row) -> None:
        self._progress.update(self._task, completed=row["step"])
        self.say(step_line(row))


def step_line(row: Row) -> str:
    """One readable line of a row of metrics."""
    parts = [f"step {row['step']:>6}", f"loss {row['loss']:.4f}", f"grad {row['grad_norm']:.3f}"]
    if "learning_rate" in row:
        parts.append(f"lr {row['learning_rate']:.2e}")
    parts.append(f"{row['tokens_per_s']:,.0f} tok/s")
    if row.get("mfu") is not None:
        parts.append(f"mfu {row['mfu']:.1%}")
    if row.get("device_bytes") is not None:
        parts.append(f"{row['device_bytes'] / 2**30:.1f} GiB")
    if row.get("eval_loss") is not None:
        bits = row.get("bits_per_byte")
        parts.append(f"held-out {row['eval_loss']:.4f}" + ("" if bits is None else f" = {bits:.3f} bits/byte"))
    return "  ".join(parts)


@contextmanager
def _display(steps: int) -> Iterator[_Display]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        yield _Display(progress, progress.add_task("training", total=steps))


@contextmanager
def _signals(say: Any) -> Iterator[Any]:
    """SIGTERM and the first SIGINT ask the run to save and stop; a second SIGINT interrupts it at once."""
    received: list[int] = []

    def on_signal(number: int, frame: object) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        os.write(2, f"\n{signal.Signals(number).name}: saving after this step\n".encode())  # safe in a handler

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_result(result: Result, argv: Sequence[str], steps: int) -> None:
    row = result.last_row
    if row.get("bits_per_byte") is not None:
        print(f"held-out: {row['bits_per_byte']:.3f} bits per byte at step {result.step}")
    if result.sample:
        print(f"sample, after the first bytes of the held-out text:\n{result.sample}\n")
    kept = [a for a in argv if a != "--restart" and not a.startswith(("run.folder=", "run.steps="))]
    command = shlex.join(["flax-mesh", *kept, f"run.folder={result.folder}"])
    print(f"{result.status} at step {result.step}; metrics and checkpoints: {result.folder}")
    if result.status == "stopped":
        print(f"resume: {command} run.steps={steps}")
    else:
        print(f"train on: {command} run.steps={2 * result.step}")


if __name__ == "__main__":
    sys.exit(main())
