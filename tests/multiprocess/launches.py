"""Runs of a small model by `flax-mesh launch`."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from tests.multiprocess.processes import Running

SETTINGS = (
    "recipes/tiny.py",
    "model.hidden_size=32",
    "model.mlp_size=64",
    "data.sequence_length=16",
    "data.batch_size=16",  # four rows per microbatch, for fsdp:4
    "pipeline.num_microbatches=4",
    "run.eval_every=0",
    "run.sample_tokens=0",
    "checkpoint.keep=100",
)
LIMIT_S = 400
TIMES = {"seconds", "data_wait_seconds", "resumed_from"}


def train(folder: Path, *more: str, settings: tuple[str, ...] = SETTINGS) -> list[str]:
    return ["train", *settings, f"run.folder={folder}", *more]


def start(processes: int, devices: int, folder: Path, *more: str, settings: tuple[str, ...] = SETTINGS) -> Running:
    options = ["-n", str(processes), "--devices-per-process", str(devices)]
    arguments = train(folder, *more, settings=settings)
    return Running(["-u", "-m", "flax_mesh.cli", "launch", *options, "--", *arguments])


def run(processes: int, devices: int, folder: Path, *more: str, settings: tuple[str, ...] = SETTINGS) -> str:
    """The output of a launch, or of a run in one process; asserts that it succeeds."""
    if processes == 1:
        arguments = train(folder, f"run.platform=cpu:{devices}", *more, settings=settings)
        running = Running(["-m", "flax_mesh.cli", *arguments])
    else:
        running = start(processes, devices, folder, *more, settings=settings)
    with running:
        ended = running.ended(LIMIT_S)
    assert ended.code == 0, ended.output
    return ended.output


def stored(folder: Path, step: int) -> dict[str, np.ndarray]:
    """The state of a step of a run as plain Orbax reads it: path -> array."""
    path, plain = folder / "checkpoints" / str(step) / "state", ocp.PyTreeCheckpointer()
    tree: Any = plain.metadata(path).item_metadata
    numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree.tree)
    tree = plain.restore(path, args=ocp.args.PyTreeRestore(restore_args=numpy))
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x) for path, x in leaves}


def rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run without times."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES and "_per_" not in k} for line in lines]


def assert_same_run(folder: Path, other: Path, step: int) -> None:
    """Asserts that the rows of two runs, and their states after `step`, are equal bit for bit."""
    assert rows(folder) == rows(other)
    found, expected = stored(folder, step), stored(other, step)
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)
