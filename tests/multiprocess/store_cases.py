"""Saves of several processes to a store or to a disk: `python -m tests.multiprocess.store_cases CASE ...`.

A folder is an address of a store, a path of a disk, or `files:PATH`, a store of files in which an object is a file.
"""

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from flax_mesh import store
from flax_mesh.checkpoint import Checkpointer
from flax_mesh.checkpoint.find import CHECKPOINTS, committed_steps
from flax_mesh.errors import SaveError
from flax_mesh.store import StorePath, stored_path
from flax_mesh.train import apply_overrides, train
from tests.checkpoint.stores import store_of_files
from tests.multiprocess.cases import put_and_get_all
from tests.multiprocess.processes import run_case
from tests.train import bigram

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


class Requests(Counter[str]):
    """The requests of this process by kind, except those for the content of arrays and their index.

    Before the request after `most` others the process kills itself.
    """

    most, lock = 10**6, threading.Lock()

    def add(self, kind: str) -> None:
        with self.lock:  # files are uploaded in several threads
            if self.total() == self.most:
                os.kill(os.getpid(), signal.SIGKILL)
            self[kind] += 1


class Counted:
    """A key-value store that counts requests."""

    def __init__(self, inner: Any, requests: Requests):
        self.inner, self.requests = inner, requests

    def __truediv__(self, prefix: str) -> "Counted":
        return Counted(self.inner / prefix, self.requests)

    def __getattr__(self, name: str) -> Callable[..., object]:
        method = getattr(self.inner, name)
        if name not in ("list", "read", "write", "delete_range"):
            return method

        def count(*arguments: object, **options: object) -> object:
            self.requests.add("delete" if name == "write" and arguments[1] is None else name)
            return method(*arguments, **options)

        return count


def counted(folder: str) -> tuple[Path, Requests]:
    path, requests, bucket = opened(folder), Requests(), store._bucket
    store._bucket = lambda *at: Counted(bucket(*at), requests)  # pyright: ignore
    return path, requests


def saves(folder: str, fault: str, who: str) -> None:
    """Saves steps 1 to 3 and prints the requests of each; in the second save the `fault` occurs in process `who`."""
    (path, requests), patch = counted(folder), pytest.MonkeyPatch()
    with Checkpointer(path, keep=2, layers=["layers"], compress=False) as checkpointer:
        for step in (1, 2, 3):
            if step == 2 and jax.process_index() == int(who) and fault == "answers 500":
                patch.setattr(StorePath, "write_bytes", refused)
            requests.clear()
            try:
                checkpointer.save(step, state(step))
                checkpointer.wait()
            except SaveError as error:
                print("reported:", error, flush=True)
            put_and_get_all(f"saved {step}", "yes")
            patch.undo()
            if deleting := checkpointer._writer._deleting:
                deleting.join()
            print(f"requests of {step}:", json.dumps(requests), flush=True)


def is_killed(folder: str, who: str, most: str) -> None:
    """Restores the newest step and saves the next two; `who` is killed after `most` requests of the second save."""
    reader = Checkpointer(opened(folder))
    newest = reader.latest_step() or 0
    assert not reader.damaged
    if newest:
        restores(folder, str(newest))
    path, requests = counted(folder)
    with Checkpointer(path, keep=2, layers=["layers"], compress=False) as checkpointer:
        checkpointer.save(newest + 1, state(newest + 1))
        checkpointer.wait()
        if jax.process_index() == int(who):
            requests.most = requests.total() + int(most)
        checkpointer.save(newest + 2, state(newest + 2))


def trains(disk: str, folder: str, last: str) -> None:
    """Trains 6 steps on the `disk` unless it is "", and in `folder`, where all processes end at step `last`."""
    settings = ["run.steps=6", "checkpoint.every=2", "run.eval_every=0", "mesh.shape=dp:2,fsdp:2"]
    steps = stored_path(folder) / CHECKPOINTS

    def kill(row: dict[str, Any]) -> None:
        if row["step"] == int(last):
            while int(last) - 1 not in committed_steps(steps):  # it is saved in the background
                time.sleep(0.05)
            put_and_get_all("the step is there", "yes")
            os.kill(os.getpid(), signal.SIGKILL)

    if disk:
        train(apply_overrides(bigram.recipe(), [*settings, f"run.folder={disk}"]))
    train(apply_overrides(bigram.recipe(), [*settings, f"run.folder={folder}"]), say=print, hooks=[kill])


def refused(path: StorePath, data: bytes) -> int:
    raise OSError(5, "the store answered 500", str(path))


def restores(folder: str, step: str) -> None:
    """Restores a step: every shard of this process has its bits."""
    path, requests = counted(folder)
    with Checkpointer(path, layers=["layers"]) as checkpointer:
        restored = checkpointer.restore(state(0), int(step), verify=False)
    print("requests of a restore:", json.dumps(requests), flush=True)
    expected = jax.tree.leaves(state(int(step)))
    for wanted, found in zip(expected, jax.tree.leaves(restored), strict=True):
        for one, other in zip(wanted.addressable_shards, found.addressable_shards, strict=True):
            assert np.array_equal(one.data, other.data)


if __name__ == "__main__":
    run_case(globals())
