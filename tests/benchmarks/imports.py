"""Time to import flax_mesh after jax and flax.nnx, and the number of modules, of which "heavy" are orbax's.

The best CPU time of fresh, alternating processes with bytecode. Target: at most 50 ms, no heavy module.

    python -m tests.benchmarks imports [--runs 7]
"""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tests.benchmarks.common.report import options, report

TARGET_MS = 50
NAMES = ("flax_mesh", "flax_mesh.train", "eformer.escale", "scalax.sharding")
HEAVY = ("orbax", "tensorstore")
CODE = """
import json, sys, time
import jax, flax.nnx
sys.dont_write_bytecode = False
before, began = set(sys.modules), time.process_time()
import {name}
spent = time.process_time() - began
print(json.dumps([1e3 * spent, sorted(set(sys.modules) - before)]))
"""


def import_once(name: str) -> tuple[float, list[str]]:
    """Milliseconds of CPU time, and the imported modules."""
    command = [sys.executable, "-c", CODE.format(name=name)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(number: int) -> list[dict[str, Any]]:
    """One row per installed module of NAMES: the best of `number` alternating runs."""
    names = [name for name in NAMES if importlib.util.find_spec(name.split(".")[0])]
    best, modules = dict.fromkeys(names, float("inf")), {}
    for _ in range(number):
        for name in names:
            ms, modules[name] = import_once(name)
            best[name] = min(best[name], ms)
    heavy = {name: sum(module.split(".")[0] in HEAVY for module in modules[name]) for name in names}
    return [{"module": n, "ms": best[n], "modules": len(modules[n]), "heavy": heavy[n]} for n in names]


def main(arguments: Sequence[str] | None = None) -> int:
    given = options("imports", arguments, runs=7)
    return report("imports", arguments, measure(given.runs), target_ms=TARGET_MS)
