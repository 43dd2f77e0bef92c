"""Time to import flax_mesh where jax and flax.nnx are imported already, and what it brings with it.

Each run is a fresh process; the best CPU time counts, since reading files for the first time says nothing of the code.
Target: at most 50 ms, no module of orbax or tensorstore. eformer and scalax take part where they are installed.
"""

import importlib.util
import json
import subprocess
import sys

RUNS = 7
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


def measure(name: str) -> dict[str, object]:
    """Milliseconds, the number of modules, and how many of them belong to HEAVY."""
    runs = []
    for _ in range(RUNS):
        done = subprocess.run(
            [sys.executable, "-c", CODE.format(name=name)], capture_output=True, text=True, check=True
        )
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    modules = runs[0][1]
    heavy = [module for module in modules if module.split(".")[0] in HEAVY]
    return {"ms": min(ms for ms, _ in runs), "modules": len(modules), "heavy": len(heavy)}


def main() -> int:
    rows = {}
    for name in NAMES:
        if importlib.util.find_spec(name.split(".")[0]) is None:
            continue
        row = rows[name] = measure(name)
        print(f"{name:16} {row['ms']:7.1f} ms, {row['modules']} modules, {row['heavy']} of {' and '.join(HEAVY)}")
    print(json.dumps({"benchmark": "imports", "rows": rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
