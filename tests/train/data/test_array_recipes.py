"""recipes/vit.py and recipes/encoder_decoder.py: short, and they learn. test_resume.py has their runs on meshes."""

from pathlib import Path

import pytest

from flax_mesh.cli import main
from flax_mesh.cli.common import DONE
from flax_mesh.train import apply_overrides, load_recipe, train

RECIPES = [Path(__file__).parents[3] / "recipes" / f"{name}.py" for name in ("vit", "encoder_decoder")]
MOST_LINES = 40


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_short(recipe):
    assert len(recipe.read_text().splitlines()) <= MOST_LINES


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("mesh", ["fsdp:4", "dp:2,fsdp:2", "pp:2,fsdp:2"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_commands_work(recipe, mesh, capsys):
    settings = (f"mesh.shape={mesh}", "pipeline.num_microbatches=2")
    for command in (["explain"], ["plan", "--topology", "v5e:2x2"], ["train", "--print-config"]):
        assert main([*command[:1], str(recipe), *settings, *command[1:]]) == DONE, command
    assert "tok/s" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_learns(recipe, tmp_path):
    config = apply_overrides(load_recipe(str(recipe)), [f"run.folder={tmp_path}"])
    assert train(config).last_row["held_out/accuracy"] > 0.95
