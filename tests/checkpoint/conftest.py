"""Fixtures of the tests of `flax-mesh checkpoint`: a run folder with two checkpoints, and the command itself."""

from pathlib import Path

import jax
import numpy as np
import pytest

from flax_mesh import named_leaves
from flax_mesh.checkpoint import Checkpointer
from flax_mesh.cli import main
from flax_mesh.train.data.run_data import RunData
from flax_mesh.train.metadata import run_record, step_record
from tests.checkpoint.small_decoder import RECIPE, changed, program_of


@pytest.fixture(scope="module")
def on_cpu():
    if jax.default_backend() != "cpu":
        pytest.skip("the recipe asks for CPU devices")


@pytest.fixture(scope="module")
def state():
    """The state of the recipe with random values in every array, made without compiling a program."""
    abstract = program_of().layout.to_nnx()
    random = np.random.default_rng(0)
    leaves = [
        jax.device_put(random.normal(size=x.shape).astype(x.dtype), x.sharding) for _, x in named_leaves(abstract)
    ]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


@pytest.fixture(scope="module")
def saved(state, tmp_path_factory) -> Path:
    """A run folder with the steps 5 and 10, as a run of the recipe writes them."""
    program = program_of()
    data = RunData("content of data.source", "nine zeros", "c0ffee", lambda: None, lambda step: None)
    record = run_record(RECIPE, program, data)
    folder = tmp_path_factory.mktemp("runs") / "small"
    with Checkpointer(folder / "checkpoints", layers=program.rules.layers) as checkpointer:
        for step, loss, what in ((5, 2.5, state), (10, float("nan"), changed(state))):
            row = {"step": step, "loss": loss, "eval_loss": 2.25}
            checkpointer.save(step, what, step_record(record, step, row, {}, data))
    return folder


@pytest.fixture
def command(capsys):
    """Run `flax-mesh checkpoint ...`: (exit code, stdout, stderr)."""

    def run(*argv: object) -> tuple[int, str, str]:
        code = main(["checkpoint", *map(str, argv)])
        out, err = capsys.readouterr()
        return code, out, err

    return run
