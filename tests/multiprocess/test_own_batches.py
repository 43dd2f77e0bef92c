"""Batches of a recipe in several processes: the losses of one process, and an error if their batches differ."""

import json
from pathlib import Path

import pytest

from tests.multiprocess.processes import Running

LIMIT_S = 400
SHORT = ("run.steps=4", "run.eval_every=4", "checkpoint.every=2", "data.batch_size=16", "pipeline.num_microbatches=2")
DIFFERENT = """
import dataclasses

import jax
from flax_mesh.train import load_recipe


def recipe():
    made = load_recipe({vit!r})

    def make_batches(config):
        batches = made.make_batches(config)
        return lambda step: batches(step + jax.process_index())

    return dataclasses.replace(made, make_batches=make_batches)
"""
VIT = str(Path(__file__).parents[2] / "recipes" / "vit.py")


def launch(recipe: str, folder: Path, *more: str) -> tuple[int, str]:
    command = ["launch", "-n", "2", "--devices-per-process", "2", "--", "train", recipe, f"run.folder={folder}"]
    with Running(["-u", "-m", "flax_mesh.cli", *command, *SHORT, *more]) as running:
        ended = running.ended(LIMIT_S)
    return ended.code, ended.output


def alone(folder: Path, *more: str) -> None:
    command = ["train", VIT, f"run.folder={folder}", "run.platform=cpu:4", *SHORT, *more]
    with Running(["-m", "flax_mesh.cli", *command]) as running:
        ended = running.ended(LIMIT_S)
    assert ended.code == 0, ended.output


def numbers(folder: Path) -> list[list[float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    return [[row["loss"], row.get("held_out/loss", 0.0)] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["mesh.shape=pp:2,fsdp:2"])
def test_two_processes_have_the_losses_of_one(mesh, tmp_path):
    alone(tmp_path / "one", mesh)
    code, output = launch(VIT, tmp_path / "two", mesh)
    assert code == 0, output
    expected = numbers(tmp_path / "one")
    for found, wanted in zip(numbers(tmp_path / "two"), expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-4)


@pytest.mark.slow
def test_processes_with_other_batches_are_found_at_the_start(tmp_path):
    recipe = tmp_path / "different.py"
    recipe.write_text(DIFFERENT.format(vit=VIT))
    code, output = launch(str(recipe), tmp_path / "run", "mesh.shape=fsdp:4")
    assert code == 2 and "first batch of make_batches: " in output, output
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
