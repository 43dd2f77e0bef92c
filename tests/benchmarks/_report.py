"""The output of the benchmarks: a table, then a line of JSON with results, command, date, versions and hardware."""

import datetime
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint", "eformer", "scalax")


def use_cpu(devices: int = 8) -> None:
    """Use `devices` virtual CPU devices only. Must be called before the first array is created."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print one column per key, in order of first appearance. Cells of missing keys are empty."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, *([_text(row.get(key)) for key in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        print("  ".join(cells).rstrip())


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
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _rounded(value: Any) -> Any:
    """Round floats to four digits, also inside lists and dicts: measured times are no more precise."""
    if isinstance(value, Mapping):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return "" if value is None else str(value)
