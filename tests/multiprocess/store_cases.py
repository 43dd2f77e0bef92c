"""Saves of several processes to a store or to a disk: `python -m tests.multiprocess.store_cases CASE ...`.

A folder is an address of a store, a path of a disk, or `files:PATH`, a store of files in which an object is a file.
"""

import os
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from flax_mesh.checkpoint import Checkpointer
from flax_mesh.checkpoint import writer as saving
from flax_mesh.errors import SaveError
from flax_mesh.store import StorePath, stored_path
from tests.checkpoint.stores import store_of_files
from tests.multiprocess.cases import put_and_get_all
from tests.multiprocess.processes import run_case

# Path -> shape and split, on a mesh with the axes dp and fsdp. 1025 can be divided by neither 2 nor 4.
ARRAYS = {
    "whole": ((1024, 512), ()),
    "split": ((512, 1024), (None, "fsdp")),
    "odd": ((1025, 513), ()),
    "uneven": ((1025, 513), ()),
    "odder": ((1025, 513), ()),
    "oddest": ((1025, 513), ()),
    "small": ((7,), ()),
    "layers/stack": ((3, 1024, 512), (None, "fsdp")),
    "layers/vectors": ((3, 4), ()),
}


def values(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {path: rng.standard_normal(shape, np.float32) for path, (shape, _) in ARRAYS.items()}


def state(step: int) -> nnx.State:
    mesh = jax.make_mesh((-1 * jax.device_count() // -2, min(2, jax.device_count())), ("dp", "fsdp"))
    tree: dict[str, object] = {"layers": {}}
    for path, value in values(step).items():
        parent, _, name = path.rpartition("/")
        inner = tree[parent] if parent else tree
        assert isinstance(inner, dict)
        inner[name] = jax.device_put(value, NamedSharding(mesh, PartitionSpec(*ARRAYS[path][1])))
    return nnx.State(tree)


def opened(folder: str) -> Path:
    if folder.startswith("files:"):
        return store_of_files(pytest.MonkeyPatch(), Path(folder.removeprefix("files:"))) / "run"
    return stored_path(folder)


def saves(folder: str, fault: str, who: str) -> None:
    """Saves steps 1 to 3; in the second save the `fault` occurs in process `who`."""
    path, patch = opened(folder), pytest.MonkeyPatch()
    with Checkpointer(path, layers=["layers"], compress=False) as checkpointer:
        for step in (1, 2, 3):
            is_faulty = step == 2 and jax.process_index() == int(who)
            if is_faulty and fault == "answers 500":
                patch.setattr(StorePath, "write_bytes", refused)
            if is_faulty and fault == "killed":
                patch.setattr(saving._Store, "commit", lambda place: os._exit(9))
            try:
                checkpointer.save(step, state(step))
                checkpointer.wait()
            except SaveError as error:
                print("reported:", error, flush=True)
            put_and_get_all(f"saved {step}", "yes")
            patch.undo()


def refused(path: StorePath, data: bytes) -> int:
    raise OSError(5, "the store answered 500", str(path))


def restores(folder: str, step: str) -> None:
    """Restores a step: every shard of this process has its bits."""
    with Checkpointer(opened(folder), layers=["layers"]) as checkpointer:
        restored = checkpointer.restore(state(0), int(step))
    expected = jax.tree.leaves(state(int(step)))
    for wanted, found in zip(expected, jax.tree.leaves(restored), strict=True):
        for one, other in zip(wanted.addressable_shards, found.addressable_shards, strict=True):
            assert np.array_equal(one.data, other.data)


if __name__ == "__main__":
    run_case(globals())
