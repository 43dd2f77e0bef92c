"""The output of the benchmarks: a table, then a line of JSON with results, command, date, versions and hardware."""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).parents[3]
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint", "eformer", "scalax")


def use_cpu(devices: int = 8) -> None:
    """Use `devices` virtual CPU devices only. Must be called before the first array is created."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)


def options(benchmark: str, arguments: Sequence[str] | None, **defaults: Any) -> Any:
    """The options --name of a benchmark. A tuple is separated by commas; False is a switch."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.benchmarks {benchmark}")
    for name, default in defaults.items():
        if default is False:
            parser.add_argument(f"--{name}", action="store_true")
        elif isinstance(default, tuple):
            parser.add_argument(f"--{name}", type=partial(_parts, type(default[0])), default=default)
        else:
            parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args(arguments)


def _parts(kind: type, text: str) -> tuple[Any, ...]:
    return tuple(map(kind, text.split(",")))


def in_fresh_process(benchmark: str, *words: str) -> dict[str, Any]:
    """The JSON that a benchmark prints in its last line, in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks", benchmark, *words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def report(benchmark: str, arguments: Sequence[str] | None, rows: Sequence[Mapping[str, Any]], **figures: Any) -> int:
    """Print the table of `rows`, and the line of JSON; return the exit code of the benchmark."""
    print_table(rows)
    print_json(benchmark, arguments, rows=rows, **figures)
    return 0


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print one column per key, in order of first appearance. Cells of missing keys are empty."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, *([_text(row.get(key)) for key in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *rest in lines:
        cells = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        print("  ".join([first.ljust(widths[0]), *cells]).rstrip())


def origin(benchmark: str, arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Command, date, versions and hardware of a measurement. `arguments`: as given to `main`."""
    options = sys.argv[1:] if arguments is None else arguments
    return {
        "benchmark": benchmark,
        "command": " ".join(["python -m tests.benchmarks", benchmark, *options]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **_versions()},
        "hardware": {"machine": platform.machine(), "cpus": len(os.sched_getaffinity(0)), "load": os.getloadavg()},
    }


def print_json(benchmark: str, arguments: Sequence[str] | None = None, **figures: Any) -> None:
    """Print one line with `figures`, rounded to four digits, and their origin."""
    print(json.dumps(origin(benchmark, arguments) | _rounded(figures)), flush=True)


def _versions() -> dict[str, str]:
    installed = {found.metadata["Name"]: found.version for found in importlib.metadata.distributions()}
    return {name: installed[name] for name in PACKAGES if name in installed}


def _rounded(value: Any) -> Any:
    """Round floats to four digits, also inside lists and dicts: measured times do not have more precision."""
    if isinstance(value, Mapping):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return "" if value is None else str(value)
