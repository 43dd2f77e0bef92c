"""Fixtures of the tests of `flax-mesh checkpoint`: a run folder with two checkpoints, and the command itself."""

from pathlib import Path

import jax
import pytest

from flax_mesh.checkpoint import Checkpointer
from flax_mesh.cli import main
from flax_mesh.data.run_data import RunData
from flax_mesh.train.metadata import run_record, step_record
from tests.checkpoint.small_decoder import RECIPE, changed, program_of
from tests.checkpoint.states import random_values


@pytest.fixture(scope="session")
def on_cpu():
    if jax.default_backend() != "cpu":
        pytest.skip("the recipe asks for CPU devices")


@pytest.fixture(scope="session")
def state():
    """The state of the recipe with random values in every array."""
    return random_values(program_of().layout.to_nnx())


@pytest.fixture(scope="session")
def saved(state, tmp_path_factory) -> Path:
    """A run folder with the steps 5 and 10, as a run of the recipe writes them; tests change copies of it."""
    program = program_of()
    data = RunData("content of data.source", "nine zeros", "c0ffee", "tokens", lambda: None, lambda step: None)
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
