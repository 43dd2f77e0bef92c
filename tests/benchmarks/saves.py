"""Resident memory of this process over many saves, to a disk and to a store of files, each in a process of its own."""

import json
import resource
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pytest

from flax_mesh.checkpoint import Checkpointer
from tests.benchmarks.common.report import in_fresh_process, options, report
from tests.checkpoint.stores import store_of_files

PLACES = ("disk", "store")
SHOWN = (1, 5, 10, 20, 40, 60, 80, 100)


def main(arguments: Sequence[str] | None = None) -> int:
    given = options("saves", arguments, saves=100, place="")
    if given.place:
        print(json.dumps(measure(given.place, given.saves)))
        return 0
    words = {place: (f"--saves={given.saves}", f"--place={place}") for place in PLACES}
    rows = [{"MiB after saves": place, **in_fresh_process("saves", *words[place])} for place in PLACES]
    return report("saves", arguments, rows)


def measure(place: str, saves: int) -> dict[str, int]:
    """MiB by the number of saves of 40 arrays, 40 MB in all."""
    jax.config.update("jax_platforms", "cpu")
    rng, sizes = np.random.default_rng(0), dict[str, int]()
    state = {f"a{i}": jax.numpy.asarray(rng.standard_normal(250_000, np.float32)) for i in range(40)}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = store_of_files(patch, Path(folder)) if place == "store" else Path(folder)
        with Checkpointer(path / "run", keep=2) as checkpointer:
            for number in range(1, saves + 1):
                checkpointer.save(number, state)
                checkpointer.wait()
                if number in SHOWN:
                    pages = int(Path("/proc/self/statm").read_text().split()[1])
                    sizes[str(number)] = pages * resource.getpagesize() // 2**20
    return sizes
