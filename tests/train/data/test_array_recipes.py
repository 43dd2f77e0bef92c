"""recipes/vit.py and recipes/encoder_decoder.py: short, they learn, and pipelines have the same losses."""

from pathlib import Path
from typing import Any

import pytest

from flax_mesh.cli import main
from flax_mesh.cli.common import DONE
from flax_mesh.train import apply_overrides, load_recipe, train
from tests.train.support.runs import run

ROOT = Path(__file__).parents[3]
RECIPES = ("vit", "encoder_decoder")
MESHES = {
    "fsdp": ("mesh.shape=fsdp:4",),
    "microbatches": ("mesh.shape=dp:2,fsdp:2", "pipeline.num_microbatches=2"),
    "pp": ("mesh.shape=pp:2,fsdp:2", "pipeline.num_microbatches=2"),
}
MOST_LINES = 40


def rows_of(name: str, folder: Path, *settings: str) -> dict[int, dict[str, Any]]:
    """The rows of all steps by step."""
    common = ["run.platform=auto", "run.steps=5", "run.eval_every=5", "checkpoint.every=2", f"run.folder={folder}"]
    config = load_recipe(str(ROOT / "recipes" / f"{name}.py"))
    return {row["step"]: row for row in run(apply_overrides(config, [*common, *settings])).rows}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_short(name):
    assert len((ROOT / "recipes" / f"{name}.py").read_text().splitlines()) <= MOST_LINES


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["pp", "microbatches"])
@pytest.mark.parametrize("name", RECIPES)
def test_the_losses_are_equal_on_every_mesh(name, mesh, tmp_path):
    expected, rows = (rows_of(name, tmp_path / each, *MESHES[each]) for each in ("fsdp", mesh))
    assert len(expected) == len(rows) == 5
    for step, row in rows.items():
        assert row["loss"] == pytest.approx(expected[step]["loss"], rel=1e-4)
        assert row["accuracy"] == pytest.approx(expected[step]["accuracy"], abs=0.02)
    assert rows[5]["held_out/loss"] == pytest.approx(expected[5]["held_out/loss"], rel=1e-4)
    assert 0 <= rows[5]["held_out/accuracy"] <= 1


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", RECIPES)
def test_the_commands_work(name, mesh, capsys):
    recipe = str(ROOT / "recipes" / f"{name}.py")
    for command in (["explain"], ["plan", "--topology", "v5e:2x2"], ["train", "--print-config"]):
        assert main([*command[:1], recipe, *MESHES[mesh], *command[1:]]) == DONE, command
    assert "tok/s" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_learns(name, tmp_path):
    config = load_recipe(str(ROOT / "recipes" / f"{name}.py"))
    assert train(apply_overrides(config, [f"run.folder={tmp_path}"])).last_row["held_out/accuracy"] > 0.95
