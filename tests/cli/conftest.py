"""Recipes of these tests, and commands that are called in this process."""

from pathlib import Path

import jax
import pytest

from flax_mesh.cli import main
from tests.inference.small_run import run as run
from tests.train import bigram

TINY = str(Path(__file__).parents[2] / "recipes" / "tiny.py")


@pytest.fixture(scope="module")
def on_eight_cpu_devices():
    if jax.default_backend() != "cpu":
        pytest.skip("recipes/tiny.py requires CPU devices")


@pytest.fixture
def small(tmp_path):
    """The command that trains on the text and in the folder of this test."""
    return "train", bigram.__file__, f"data.source={bigram.write_text(tmp_path)}", f"run.folder={tmp_path / 'run'}"


@pytest.fixture
def call(capsys):
    """Runs a command and returns (exit code, standard output, standard error)."""

    def call(*argv: object) -> tuple[int, str, str]:
        code = main([*map(str, argv)])
        return code, *capsys.readouterr()

    return call
