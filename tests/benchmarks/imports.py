"""Time to import flax_mesh where jax and flax.nnx are imported already, and what it brings with it.

Each run is a fresh process; the best CPU time counts, since reading files for the first time says nothing of the code.
Target: at most 50 ms, no module of orbax or tensorstore. eformer and scalax take part where they are installed.

    python -m tests.benchmarks imports [--runs 7]
"""

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tests.benchmarks._report import print_json, print_table

TARGET_MS = 50
NAMES = ("flax_mesh", "flax_mesh.train", "eformer.escale", "scalax.sharding")
HEAVY = ("orbax", "tensorstore")
CODE = """
import json, sys, time
import jax, flax.nnx
before, began = set(sys.modules), time.process_time()
import {name}
spent = time.process_time() - began
print(json.dumps([1e3 * spent, sorted(set(sys.modules) - before)]))
"""


def measure(name: str, number: int) -> dict[str, Any]:
    """Milliseconds, the number of modules, and how many of them belong to HEAVY, of so many runs."""
    runs = []
    for _ in range(number):
        done = subprocess.run(
            [sys.executable, "-c", CODE.format(name=name)], capture_output=True, text=True, check=True
        )
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    modules = runs[0][1]
    heavy = [module for module in modules if module.split(".")[0] in HEAVY]
    return {"module": name, "ms": min(ms for ms, _ in runs), "modules": len(modules), "heavy": len(heavy)}


def measure_all(number: int) -> list[dict[str, Any]]:
    """A row for every module of NAMES that is installed."""
    return [measure(name, number) for name in NAMES if importlib.util.find_spec(name.split(".")[0])]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks imports")
    parser.add_argument("--runs", type=int, default=7)
    given = parser.parse_args(arguments)
    rows = measure_all(given.runs)
    print_table(rows)
    print_json("imports", arguments, target_ms=TARGET_MS, rows=rows)
    return 0
