"""flax-mesh: the command line.

Exit codes: 0 done, 1 anything unexpected, 2 bad input, 3 findings or damage, 4 stopped by a signal after saving,
5 another process of the run was lost, or no step ended in time.
"""

import argparse
import atexit
import gc
import json
import logging
import os
import shlex
import shutil
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import jax

from flax_mesh.checkpoint.read import plain
from flax_mesh.cli.checkpoint import add_checkpoint_arguments, checkpoint_answer, recipe_of
from flax_mesh.cli.launch import (
    STEP_TIMEOUT_S,
    add_launch_arguments,
    add_process_arguments,
    devices_of_process,
    launch_answer,
    same_command,
)
from flax_mesh.cli.schedule import add_schedule_arguments, give_measured, schedule_answer
from flax_mesh.errors import CheckpointCorruptedError, ConfigError, SaveError, ShardingError
from flax_mesh.mesh import create_mesh, describe_mesh, draw_mesh_svg, parse_mesh_shape
from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss
from flax_mesh.mpmd.schedules import draw_schedule_svg
from flax_mesh.processes import Watch, parse_processes, start_processes
from flax_mesh.train import TrainConfig, TrainResult, apply_overrides, load_recipe, to_lines, train
from flax_mesh.train.checks import check_config
from flax_mesh.train.config import AXIS_NAMES, PLATFORM
from flax_mesh.train.explain import explain, measure_recipe
from flax_mesh.train.metrics import Row

DONE, FAILED, BAD_INPUT, FINDINGS, STOPPED = 0, 1, 2, 3, 4
EXIT_CODES = {CheckpointCorruptedError: FINDINGS, ConfigError: BAD_INPUT, ShardingError: BAD_INPUT, SaveError: FAILED}
PIPED_WIDTH = 200  # columns of tables that go into a file or another program


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    for name in ("absl", "asyncio"):  # Orbax tells of every file it writes, and of errors twice and once a task
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if sys.unraisablehook is sys.__unraisablehook__:  # where another program has its own, as pytest does, it stays
        sys.unraisablehook = _unraisable
    try:
        arguments = _parse(argv)
        return arguments.command(arguments, argv)
    except tuple(EXIT_CODES) as error:
        return tell_failure(error)


def tell_failure(error: BaseException) -> int:
    """Print an error as people read it, what is not expected as Python does; gives the exit code."""
    code = next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), None)
    if code is None:
        traceback.print_exception(error)
        return FAILED
    for line in str(error).splitlines():
        print(f"flax-mesh: {plain(line)}", file=sys.stderr)
    return code


def _unraisable(found: Any) -> None:
    """As Python does, but for what tensorstore prints, once an array, after a save that failed and was told of."""
    if found.object is not None or str(found.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(found)


def train_command(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    config = apply_overrides(load_recipe(arguments.recipe), _with_files(arguments.overrides))
    if arguments.print_config:
        print("\n".join([f"# flax-mesh train {arguments.recipe} @THIS_FILE", *to_lines(config)]))
        return DONE
    if problems := check_config(config):
        raise ConfigError(problems)
    count = start_processes(parse_processes(arguments.process) if arguments.process else None)
    use_platform(devices_of_process(config.run.platform, count, arguments.devices_per_process))
    atexit.register(gc.freeze)  # else Python's last collection, of all that a run has made, takes most of a second
    first, limit = jax.process_index() == 0, arguments.step_timeout or (STEP_TIMEOUT_S if count > 1 else None)
    with (
        _display(config.run.steps) as display,
        _signals(display.say) as should_stop,
        Watch(tell_failure, limit) as watch,
    ):
        result = train(
            config,
            recipe=arguments.recipe,
            restart=arguments.restart,
            allow_changes=arguments.allow_changes,
            say=display.say,
            hooks=[display.row, watch.step_ended] if first else [watch.step_ended],
            should_stop=should_stop,
            trace=arguments.trace,
            watch=watch,
        )
    if first:
        _print_result(result, same_command(argv, arguments.process), config.run.steps)
    return STOPPED if result.status == "stopped" else DONE


def explain_command(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    explanation = explain(apply_overrides(load_recipe(arguments.recipe), _with_files(arguments.overrides)))
    if arguments.json:
        print(json.dumps(explanation.to_dict(), indent=1))
    elif arguments.html:
        title = f"{arguments.recipe} {' '.join(arguments.overrides)}"
        _write("--html", arguments.html, explanation.to_html(title=title))
        print(f"{arguments.html}: {len(explanation.findings)} findings")
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPED_WIDTH
        print(explanation.to_text(width=width))
    return FINDINGS if explanation.findings else DONE


def mesh_command(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    if not PLATFORM.fullmatch(arguments.platform):
        raise ConfigError(f"--platform must be auto, cpu, cpu:N (N devices), gpu or tpu, got {arguments.platform!r}")
    use_platform(arguments.platform)
    try:
        shape = parse_mesh_shape(arguments.shape, AXIS_NAMES, omitted=1)
        shape = {name: size for name, size in shape.items() if size != 1} or {"dp": 1}
        mesh = create_mesh(tuple(shape.values()), tuple(shape))
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"{arguments.shape}: {error}") from error
    print(describe_mesh(mesh))
    if arguments.svg:
        _write("--svg", arguments.svg, draw_mesh_svg(mesh))
    return DONE


def schedule_command(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    if arguments.measure:
        recipe, *overrides = arguments.measure
        config = apply_overrides(load_recipe(recipe), _with_files(overrides))
        use_platform(config.run.platform)
        unit = give_measured(arguments, measure_recipe(config))
        print(f"measured: --costs {arguments.costs}, in units of {unit:.3g} ms", file=sys.stderr)
    found = schedule_answer(arguments)
    if arguments.svg:
        _write("--svg", arguments.svg, draw_schedule_svg(found.schedule, found.costs))
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPED_WIDTH
    print(json.dumps(found.data()) if arguments.json else found.text(width))
    return DONE


def checkpoint_command(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    recipe = recipe_of(arguments)
    config = apply_overrides(load_recipe(recipe), _with_files(arguments.overrides)) if recipe else None
    # What only looks at a checkpoint, or writes it in another form, needs no accelerator, and takes none.
    use_platform(config.run.platform if config and arguments.what == "reshard" else "cpu")
    answer = checkpoint_answer(arguments, config, _imported)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPED_WIDTH
    print(json.dumps(answer.data, indent=1) if arguments.json else answer.text(width))
    return FINDINGS if answer.findings else DONE


def use_platform(platform: str) -> None:
    """Choose the JAX backend before any device is touched: "auto", "cpu", "cpu:8", "gpu", "tpu"."""
    name, _, count = platform.partition(":")
    try:
        if name != "auto":
            # The first is the default; checkpoints are cut into layers on the CPU.
            jax.config.update("jax_platforms", {"gpu": "cuda,cpu", "cpu": "cpu"}.get(name, f"{name},cpu"))
        if count:
            jax.config.update("jax_num_cpu_devices", int(count))
        found, reason = jax.devices()[0].platform, ""
    except (RuntimeError, AssertionError) as error:  # JAX asserts that cuda has devices
        found, reason = None, f" ({' '.join(str(error).split())})" if str(error) else ""
    if name not in ("auto", found):  # without its plugin for cuda JAX goes on to the CPU, and says nothing
        reason = reason or f" (JAX found {found})"
        raise ConfigError(f"run.platform={platform} has no devices here{reason}; use auto for those that are here")


class _ArgumentParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command and its arguments; settings may stand before, between and after options."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if options := [text for text in rest if text.startswith("-")]:
        parser.error(f"no such option: {' '.join(options)}")
    if rest and not hasattr(arguments, "overrides"):
        parser.error(f"too many arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides += rest  # argparse takes one unbroken run of them only
    return arguments


def _with_files(overrides: Iterable[str]) -> list[str]:
    """The settings with every @FILE replaced by its lines; a setting given beside a file wins over the file's."""
    given = [text for text in overrides if not text.startswith("@")]
    keys = {text.partition("=")[0] for text in given}
    lines = [line for text in overrides if text.startswith("@") for line in _settings_file(text[1:])]
    return [*(line for line in lines if line.partition("=")[0] not in keys), *given]


def _imported(settings: Mapping[str, Any]) -> TrainConfig:
    """The decoder that a config.json of Hugging Face describes."""
    return TrainConfig(make_model=make_decoder, loss_fn=next_token_loss, model=DecoderConfig(**settings))


def _write(option: str, name: str, text: str) -> None:
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {name} cannot be written: {error.strerror}") from error


def _settings_file(name: str) -> list[str]:
    """Lines of a file that are neither empty nor a remark (#)."""
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"@{name} cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}") from error
    return [line for line in text.split("\n") if line.strip() and not line.startswith("#")]


def _parser() -> argparse.ArgumentParser:
    parser = _ArgumentParser(prog="flax-mesh", description="Any Flax NNX model on any mesh.", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "train",
        help="train from a recipe, or resume where it stopped",
        description="Train from a recipe. Run again, the same command resumes.",
        epilog="Exit codes: 0 done, 1 unexpected error or a checkpoint that could not be written, 2 bad input, "
        "3 no checkpoint is whole, 4 stopped by a signal after saving, "
        "5 another process was lost or no step ended in time.",
        allow_abbrev=False,
    )
    command.set_defaults(command=train_command)
    _add_recipe(command)
    command.add_argument("--print-config", action="store_true", help="print the whole config, as @FILE reads it")
    command.add_argument("--restart", action="store_true", help="start over in a new folder beside run.folder")
    command.add_argument(
        "--allow-changes", action="store_true", help="resume although settings that change the result differ"
    )
    command.add_argument(
        "--trace", metavar="FILE.json", help="of a pipeline: when each action of the third step ran, and a picture"
    )
    add_process_arguments(command)
    command = commands.add_parser(
        "launch",
        help="run train in several processes on this machine",
        description="Start N processes of train, which talk over 127.0.0.1, and merge their output. Signals go to all.",
        epilog="Exit codes: that of the first process that ended with an error, 5 where a signal ended it; else 0.",
        allow_abbrev=False,
    )
    command.set_defaults(command=lambda arguments, argv: launch_answer(arguments))
    add_launch_arguments(command)
    command = commands.add_parser(
        "explain",
        help="show what the sharding rules make of a recipe, without devices",
        description="Mesh, every array with its rule and bytes per device, and all that looks wrong. Needs no devices.",
        epilog="Exit codes: 0 clean, 1 unexpected error, 2 bad input, 3 findings.",
        allow_abbrev=False,
    )
    command.set_defaults(command=explain_command)
    _add_recipe(command)
    output = command.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument("--html", metavar="FILE", help="write one HTML page with a picture of who holds what")
    command = commands.add_parser(
        "mesh",
        help="show how a mesh lies on the devices that are here",
        description="What each axis got: links, rings, what crosses slices.",
        epilog="Exit codes: 0 done, 1 unexpected error, 2 bad input.",
        allow_abbrev=False,
    )
    command.set_defaults(command=mesh_command)
    command.add_argument("shape", metavar="SHAPE", help='such as "dp:2,fsdp:-1,tp:2"')
    command.add_argument("--platform", default="auto", help="auto, cpu, cpu:N, gpu or tpu")
    command.add_argument("--svg", metavar="FILE", help="write a picture too")
    command = commands.add_parser(
        "schedule",
        help="show a pipeline schedule in time, or search for one",
        description="Makespan, bubble, memory and order of a pipeline schedule. Needs no devices.",
        epilog="Exit codes: 0 done, 1 unexpected error, 2 bad input.",
        allow_abbrev=False,
    )
    command.set_defaults(command=schedule_command)
    add_schedule_arguments(command)
    command = commands.add_parser(
        "checkpoint",
        help="list, inspect, verify, compare, export, import and reshard checkpoints",
        description="What lies in a folder of checkpoints, and other forms of it. No checkpoint is ever changed.",
        epilog="Exit codes: 0 fine, 1 unexpected error, 2 bad input, 3 damage or differences found.",
        allow_abbrev=False,
    )
    command.set_defaults(command=checkpoint_command)
    add_checkpoint_arguments(command)
    return parser


def _add_recipe(command: argparse.ArgumentParser) -> None:
    command.add_argument("recipe", metavar="RECIPE", help="FILE.py or FILE.py:function")
    command.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="section.key=value",
        help="settings such as run.steps=20; @FILE reads them from a file",
    )


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
    """SIGTERM and the first SIGINT ask the run to save and stop; a SIGINT after that ends the process at once."""
    received: list[int] = []

    def on_signal(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the kernel's: a handler in Python waits for compiled code
        received.append(number)
        os.write(2, f"\n{signal.Signals(number).name}: saving after this step\n".encode())  # safe in a handler

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_result(result: TrainResult, argv: Sequence[str], steps: int) -> None:
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
