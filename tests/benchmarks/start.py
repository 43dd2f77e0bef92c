"""CPU seconds from the command to the first row of recipes/tiny.py, in a new run and in a resumed one.

Every figure is the best of `--runs` new processes, with bytecode. "imports" are the seconds until the command starts,
and "command" those of the whole process: one step, without evaluation and sample, its checkpoint and the forecast.
`--against` is a folder with another version of flax_mesh, whose processes alternate with those of this one.

Target: the first row of a resumed run in at most 0.6 of the CPU time of version 0.2.0 before this change (6d05fe17).

    python -m tests.benchmarks start [--runs 3] [--recipe recipes/tiny.py] [--against FOLDER] [--settings "..."]
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.common.report import options, print_json, print_table

ROOT = Path(__file__).parent.parent.parent
TARGET = 0.6
QUICK = ("run.eval_every=0", "run.sample_tokens=0")
CODE = """
import json, sys, time
from flax_mesh.cli import train
from flax_mesh.cli.main import command
times = {"imports": time.process_time()}
row = train._Display.row
def timed(*arguments):
    times.setdefault("first row", time.process_time())
    row(*arguments)
train._Display.row = timed
code = command()
print(json.dumps(times | {"command": time.process_time()}))
sys.exit(code)
"""


def start_once(package: Path, folder: Path, steps: int, recipe: str, settings: Sequence[str]) -> dict[str, float]:
    """CPU seconds of one command, which trains up to step `steps`."""
    left_out = ("JAX_COMPILATION_CACHE_DIR", "PYTHONDONTWRITEBYTECODE")
    variables = {name: value for name, value in os.environ.items() if name not in left_out}
    variables |= {"PYTHONPATH": str(package), "PYTHONPYCACHEPREFIX": str(folder.parent / "bytecode")}
    command = [sys.executable, "-c", CODE, "train", recipe, f"run.folder={folder}", f"run.steps={steps}", *QUICK]
    done = subprocess.run(
        [*command, *settings], cwd=package, env=variables, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: Sequence[str] | None = None) -> int:
    given = options("start", arguments, runs=3, recipe="recipes/tiny.py", against="", settings="")
    packages = {"this": ROOT} | ({"against": Path(given.against).absolute()} if given.against else {})
    best: dict[tuple[str, str], dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for run in range(given.runs + 1):  # the first one writes bytecode
            for name, package in packages.items():
                for steps, kind in ((1, "new"), (2, "resumed")):
                    place = Path(folder) / name / str(run)
                    times = start_once(package, place, steps, given.recipe, given.settings.split())
                    known = best.get((name, kind), times) if run > 1 else times
                    best[name, kind] = {what: min(known[what], value) for what, value in times.items()}
    rows = [{"version": name, "run": kind, **times} for (name, kind), times in best.items()]
    last = [*packages][-1]
    ratio = {kind: best["this", kind]["first row"] / best[last, kind]["first row"] for kind in ("new", "resumed")}
    print_table(rows)
    print(f"\nfirst row, this over {last}: " + ", ".join(f"{kind} {value:.2f}" for kind, value in ratio.items()))
    print_json("start", arguments, target=TARGET, rows=rows, ratio=ratio)
    return 0
