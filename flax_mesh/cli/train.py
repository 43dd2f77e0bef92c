"""`flax-mesh train`: train a recipe, in one process or as one of several."""

import argparse
import atexit
import gc
import logging
import math
import shlex
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import jax

from flax_mesh.cli.common import (
    DIVERGED,
    DONE,
    STOPPED,
    config_of,
    files_read,
    output_problems,
    report_failure,
    use_compilation_cache,
    use_platform,
)
from flax_mesh.cli.text.forecast import Forecast
from flax_mesh.cli.text.generated import printable
from flax_mesh.cli.text.start import Programs, Start
from flax_mesh.data.chats import LOGGER
from flax_mesh.errors import ConfigError
from flax_mesh.processes import Watch, start_processes
from flax_mesh.processes.launch import handled_signals
from flax_mesh.processes.output import reader_has_ended, write_stderr
from flax_mesh.processes.start import parse_processes
from flax_mesh.processes.watchdog import step_timeout_problem
from flax_mesh.recipe.checks import check_config
from flax_mesh.recipe.overrides import to_lines
from flax_mesh.store import working_copy
from flax_mesh.train import TrainConfig, TrainProgram, TrainResult, train
from flax_mesh.train.run_folder import COMPILED, Row

STEP_TIMEOUT_S = 1800.0


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    config = config_of(arguments.recipe, arguments.overrides)
    if arguments.print_config:
        print("\n".join([f"# flax-mesh train {arguments.recipe} @THIS_FILE", *to_lines(config)]))
        return DONE
    problems = check_config(config)
    if problem := step_timeout_problem("--step-timeout", arguments.step_timeout):
        problems = [*problems, problem]
    if arguments.trace is not None:
        files = files_read(arguments.recipe, arguments.overrides, config)
        problems = [*problems, *trace_problems(arguments.trace, files)]
    if problems:
        raise ConfigError(problems)
    given = parse_processes(arguments.process) if arguments.process else None
    count = start_processes(given, coordinator=arguments.coordinator)
    use_platform(devices_of_process(config.run.platform, count, arguments.devices_per_process))
    atexit.register(gc.freeze)  # otherwise the garbage collection at exit takes most of a second
    first, limit = jax.process_index() == 0, arguments.step_timeout or (STEP_TIMEOUT_S if count > 1 else None)
    with (
        _stop_requests(sys.stdout) as should_stop,
        _display(config.run.steps, config.eval_fns.keys()) as display,
        _progress(display.say if first else lambda text: None),
        Watch(report_failure, limit) as watch,
        Forecast(display.say) as forecast,
        Programs() as programs,
    ):
        start = Start(display.say, programs)

        def on_start(program: TrainProgram, folder: Path) -> None:
            compiled = working_copy(folder) / COMPILED
            has_compiled = compiled.is_dir()  # by an earlier start
            kept = use_compilation_cache(compiled) if config.run.compilation_cache else None
            if first:
                start.begin(program, kept)
                forecast.start(program, after_step=has_compiled)

        result = train(
            config,
            recipe=arguments.recipe,
            restart=arguments.restart,
            allow_changes=arguments.allow_changes,
            say=display.say,
            hooks=[forecast.row, start.row, display.row, watch.step_ended] if first else [watch.step_ended],
            on_start=on_start,
            should_stop=should_stop,
            trace=arguments.trace,
            watch=watch,
        )
    if first:
        _print_result(result, same_command(argv, arguments.process), config, forecast.measured())
    return {"stopped": STOPPED, "diverged": DIVERGED}.get(result.status, DONE)


def trace_problems(trace: str, files: Mapping[str, str]) -> list[str]:
    """One line if --trace is not a file, or if the trace or the picture beside it is one of `files`."""
    problems = output_problems("--trace", trace, files)
    return problems or output_problems("the picture of --trace", str(Path(trace).with_suffix(".svg")), files)


def devices_of_process(platform: str, count: int, devices: int | None) -> str:
    """`run.platform` of one of `count` processes: cpu:`devices` if given, else its share of cpu:N."""
    name, _, total = platform.partition(":")
    if devices is not None:
        if name not in ("cpu", "auto"):
            raise ConfigError(f"--devices-per-process requires run.platform=cpu or auto, got run.platform={platform}")
        return f"cpu:{devices}"
    if not total or count == 1:
        return platform
    if int(total) % count:
        raise ConfigError(
            f"run.platform={platform} cannot be divided among {count} processes; use a multiple of {count}, or set "
            "--devices-per-process"
        )
    return f"cpu:{int(total) // count}"


def same_command(argv: Sequence[str], process: str | None) -> list[str]:
    """The arguments that repeat `argv`, by `launch` if this process was started by it."""
    remaining = [text for text in argv if not text.startswith(("--process=", "--devices-per-process="))]
    if process is None:
        return remaining
    devices = [text for text in argv if text.startswith("--devices-per-process=")]
    return ["launch", "-n", str(parse_processes(process).count), *devices, "--", *remaining]


class _Display:
    """Prints one line per step, above a progress bar if the output is a terminal and the run has one process.

    The remaining time follows from the steps after the first row: a resumed run does not begin at step 1, and its time
    includes compilation.
    """

    def __init__(self, progress: Any, task: Any, eval_fns: Collection[str]):
        self._progress, self._task, self._eval_fns = progress, task, eval_fns
        self._has_rows = False

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def row(self, row: Row) -> None:
        if not self._has_rows:
            self._progress.reset(self._task, completed=row["step"])
        self._has_rows = True
        self._progress.update(self._task, completed=row["step"])
        self.say(step_line(row, self._eval_fns))


def step_line(row: Row, eval_fns: Collection[str] = ()) -> str:
    """One step in one line; `eval_fns` are the names of the recipe's evaluation functions."""
    parts = [f"step {row['step']:>6}", f"loss {row['loss']:.4f}", f"grad {row['grad_norm']:.3f}"]
    if "learning_rate" in row:
        parts.append(f"lr {row['learning_rate']:.2e}")
    units = {"examples_per_s": "examples/s", "tokens_per_s": "tok/s"}
    parts += [f"{row[name]:,.0f} {unit}" for name, unit in units.items() if name in row]
    if row.get("mfu") is not None:
        parts.append(f"mfu {row['mfu']:.1%}")
    if row.get("device_bytes") is not None:
        parts.append(f"{row['device_bytes'] / 2**30:.1f} GiB")
    if row.get("eval_loss") is not None:
        bits = row.get("bits_per_byte")
        parts.append(f"held-out {row['eval_loss']:.4f}" + ("" if bits is None else f" = {bits:.3f} bits/byte"))
    parts += [f"{name} {value:.4f}" for name, value in row.items() if name.partition("/")[0] in eval_fns]
    return "  ".join(parts)


@contextmanager
def _display(steps: int, eval_fns: Collection[str]) -> Iterator[_Display]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console()
    with Progress(
        *columns,
        console=console,
        disable=not console.is_terminal or jax.process_count() > 1,  # mpirun merges the output of its processes
        transient=True,
        speed_estimate_period=math.inf,  # not the last 30 s: a step may take longer
    ) as progress:
        yield _Display(progress, progress.add_task("training", total=steps), eval_fns)


@contextmanager
def _progress(say: Callable[[str], None]) -> Iterator[None]:
    """Print the progress of reading data."""
    handler, level = logging.Handler(), LOGGER.level
    handler.emit = lambda record: say(record.getMessage())
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)


@contextmanager
def _stop_requests(output: TextIO) -> Iterator[Callable[[], bool]]:
    """Whether the run must save and stop: after a signal (SIGTERM, SIGHUP, SIGUSR1, the first SIGINT), or if the reader
    of `output` has ended. A second SIGINT ends the process at once."""
    reasons: list[str] = []

    def request(reason: str) -> None:
        reasons.append(reason)
        write_stderr(f"\n{reason}: saving after this step\n")

    def on_signal(number: int, frame: object) -> None:
        if signal.getsignal(signal.SIGINT) is on_signal:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Python handler would have to wait for compiled code
        request(signal.Signals(number).name)

    def should_stop() -> bool:
        if not reasons and reader_has_ended(output):
            request("standard output is closed")
        return bool(reasons)

    with handled_signals(on_signal):
        yield should_stop


def _print_result(result: TrainResult, argv: Sequence[str], config: TrainConfig, measured: Sequence[str]) -> None:
    row, lines = result.last_row, [*measured]
    if row.get("bits_per_byte") is not None:
        lines.append(f"held-out: {row['bits_per_byte']:.3f} bits per byte at step {result.step}")
    if result.sample:
        lines.append(f"sample, after the first bytes of the held-out text:\n{printable(result.sample)}\n")
    left_out = ["run.on_nonfinite="] if result.status == "diverged" else []
    left_out += [] if config.data.resumable else ["checkpoint.start_from="]
    repeated = [a for a in argv if a != "--restart" and not a.startswith(("run.folder=", "run.steps=", *left_out))]
    command = shlex.join(["flax-mesh", *repeated, f"run.folder={result.folder}"])
    lines.append(f"{result.status} at step {result.step}; metrics and checkpoints: {result.folder}")
    steps = config.run.steps
    if not config.data.resumable:
        start = shlex.join(["--restart", f"run.steps={steps}", f"checkpoint.start_from={result.folder}"])
        lines.append(f"start from its parameters: {command} {start}")
    elif result.status == "stopped":
        lines.append(f"resume: {command} run.steps={steps}")
    elif result.status == "diverged":
        lines.append(f"resume without such updates: {command} run.steps={steps} run.on_nonfinite=skip")
    else:
        lines.append(f"train on: {command} run.steps={2 * result.step}")
    print("\n".join(lines), file=sys.stderr if reader_has_ended(sys.stdout) else sys.stdout)
