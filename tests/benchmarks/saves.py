"""Resident memory of this process over many saves, to a disk and to a store of files, each in a process of its own."""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

PLACES = ("disk", "store")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks saves", description=__doc__)
    parser.add_argument("--saves", type=int, default=100)
    parser.add_argument("--in", dest="place", choices=PLACES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.place:
        _measure(arguments.place, arguments.saves)
        return 0
    command = [sys.executable, "-m", "tests.benchmarks", "saves", "--saves", str(arguments.saves), "--in"]
    rows = {x: json.loads(subprocess.run([*command, x], capture_output=True, check=True).stdout) for x in PLACES}
    print("resident MiB after saves of 40 MB in 40 arrays")
    for place, row in rows.items():
        print(f"{place:6}", *(f"{number}: {size}" for number, size in row.items()))
    print(json.dumps(rows))
    return 0


def _measure(place: str, saves: int) -> None:
    import jax
    import numpy as np
    import pytest

    from flax_mesh.checkpoint import Checkpointer
    from tests.checkpoint.stores import store_of_files

    jax.config.update("jax_platforms", "cpu")
    rng, sizes = np.random.default_rng(0), dict[int, int]()
    state = {f"a{i}": jax.numpy.asarray(rng.standard_normal(250_000, np.float32)) for i in range(40)}
    with tempfile.TemporaryDirectory() as folder:
        path = store_of_files(pytest.MonkeyPatch(), Path(folder)) if place == "store" else Path(folder)
        with Checkpointer(path / "run", keep=2) as checkpointer:
            for number in range(1, saves + 1):
                checkpointer.save(number, state)
                checkpointer.wait()
                if number in (1, 5, 10, 20, 40, 60, 80, 100):
                    pages = int(Path("/proc/self/statm").read_text().split()[1])
                    sizes[number] = pages * resource.getpagesize() // 2**20
    print(json.dumps(sizes))
