"""`flax-mesh checkpoint` with wrong arguments, and folders that it cannot import or export."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx

from flax_mesh.checkpoint import Checkpointer
from flax_mesh.cli.common import BAD_INPUT, DONE
from tests.checkpoint.small_decoder import QWEN, RECIPE

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["list", "{tmp}/none"], "{tmp}/none is not a folder; pass a run folder, its checkpoints/, or the folder of"),
        (["list", "{tmp}"], "{tmp} contains no checkpoint (only 3.orbax-checkpoint-tmp, of a save in progress or in"),
        (["inspect", "{run}", "--step", "6"], "{run} has no step 6; it has 5, 10"),
        (["inspect", "{run}/checkpoints/5", "--step", "10"], "{run}/checkpoints/5 has no step 10; it has 5"),
        (["diff", "{run}", "{run}", "run.steps=3"], "run.steps=3: settings require a recipe, but {run} is a checkpoi"),
        (["diff", "{run}", "{recipe}", "--values"], "--values requires two checkpoints, but {recipe} is a recipe"),
        (["diff", "{run}", "{recipe}", "run.stps=3"], "run.stps is not a setting; did you mean run.steps?"),
        (["diff", "{run}", "{recipe}", "run.steps=0"], "run.steps must be at least 1, got 0"),
        (["diff", "{run}", "none.py"], "recipe none.py: no such file"),
        (["export", "{run}", "{run}", "--to", "orbax"], "{run} exists; nothing was overwritten"),
        (["export", "{run}", "/dev/null/x", "--to", "orbax"], "/dev/null/x cannot be written"),
        (["export", "{run}", "{tmp}/x[1]", "--to", "orbax"], "{tmp}/x[1]: Orbax takes a path with *, ? or [ for a pa"),
        (["reshard", "{run}", "{tmp}/x[1]", "{recipe}"], "{tmp}/x[1]: Orbax takes a path with *, ? or [ for a pattern"),
        (["export", "{run}", "{tmp}/x"], "the following arguments are required: --to; see flax-mesh checkpoint export"),
        (["import", "{run}", "{tmp}/x"], "{run}/config.json: no such file"),
        (["reshard", "{run}", "{tmp}/x", "{recipe}", "mesh.shape=tp:3"], "mesh.shape=tp:3: "),
        (["reshard", "{run}", "{tmp}/x", "{recipe}", "model.mlp_size=8"], "checkpoint {run}/checkpoints/10 does not"),
        (["lst", "{run}"], "argument WHAT: invalid choice: 'lst'"),
    ],
)
def test_a_mistake_is_told_and_nothing_is_written(command, saved, tmp_path, argv, line):
    (tmp_path / "3.orbax-checkpoint-tmp").mkdir()
    names = {"tmp": tmp_path, "run": saved, "recipe": RECIPE}
    code, out, err = command(*(text.format(**names) for text in argv))
    assert code == BAD_INPUT and not out
    assert err.startswith(f"flax-mesh: {line.format(**names)}"), err
    assert [path.name for path in tmp_path.iterdir()] == ["3.orbax-checkpoint-tmp"]


def test_a_model_without_hugging_face_names_is_exported_only_to_orbax(command, tmp_path):
    with Checkpointer(tmp_path / "a") as checkpointer:
        checkpointer.save(1, nnx.State({"model": {"kernel": jnp.ones(3)}}), {"config": {"model.size": "3"}})
    code, _, err = command("export", tmp_path / "a", tmp_path / "b", "--to", "safetensors")
    assert code == BAD_INPUT and "--to orbax exports any model" in err
    assert command("export", tmp_path / "a", tmp_path / "b", "--to", "orbax")[0] == DONE


def test_import_refuses_unknown_keys_unless_they_are_ignored(command, tmp_path):
    folder = Path(shutil.copytree(QWEN, tmp_path / "hf"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"new_key": 1}))
    code, _, err = command("import", folder, tmp_path / "out")
    assert code == BAD_INPUT and "new_key=1 is an unknown key" in err and "--ignore NAME" in err
    assert command("import", folder, tmp_path / "out", "--ignore", "new_key")[0] == DONE
    code, _, err = command("import", folder, tmp_path / "out2", "--ignore", "new_key", "--ignore", "(")
    assert code == BAD_INPUT and "ignore='(' is not a valid regular expression" in err
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    code, _, err = command("import", folder, tmp_path / "out2")
    assert code == BAD_INPUT and "1000000000 layers" in err  # at once: no model of that size is built
