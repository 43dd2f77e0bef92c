"""`flax-mesh checkpoint` with invalid input: wrong arguments, and names and metadata of untrusted checkpoints."""

import contextlib
import io
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_mesh.checkpoint import Checkpointer
from flax_mesh.checkpoint.read import finite, plain
from flax_mesh.cli import main
from flax_mesh.cli.common import BAD_INPUT, DONE, FINDINGS
from tests.checkpoint.small_decoder import QWEN, RECIPE

pytestmark = pytest.mark.usefixtures("on_cpu")


# --- bad input ---


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            ["list", "{tmp}/none"],
            "{tmp}/none is not a folder; pass a run folder, its checkpoints/, or the folder of one step",
        ),
        (
            ["list", "{tmp}"],
            "{tmp} contains no checkpoint (only 3.orbax-checkpoint-tmp, of a save in progress or interrupted)",
        ),
        (["inspect", "{run}", "--step", "6"], "{run} has no step 6; it has 5, 10"),
        (["inspect", "{run}/checkpoints/5", "--step", "10"], "{run}/checkpoints/5 has no step 10; it has 5"),
        (
            ["diff", "{run}", "{run}", "run.steps=3"],
            "run.steps=3: settings require a recipe, but {run} is a checkpoint",
        ),
        (["diff", "{run}", "{recipe}", "--values"], "--values requires two checkpoints, but {recipe} is a recipe"),
        (["diff", "{run}", "{recipe}", "run.stps=3"], "run.stps is not a setting; did you mean run.steps?"),
        (["diff", "{run}", "{recipe}", "run.steps=0"], "run.steps must be at least 1, got 0"),
        (["diff", "{run}", "none.py"], "recipe none.py: no such file"),
        (["export", "{run}", "{run}", "--to", "orbax"], "{run} exists; nothing was overwritten"),
        (["export", "{run}", "/dev/null/x", "--to", "orbax"], "/dev/null/x cannot be written"),
        (
            ["export", "{run}", "{tmp}/x[1]", "--to", "orbax"],
            "{tmp}/x[1]: Orbax takes a path with *, ? or [ for a pattern",
        ),
        (["reshard", "{run}", "{tmp}/x[1]", "{recipe}"], "{tmp}/x[1]: Orbax takes a path with *, ? or [ for a pattern"),
        (["export", "{run}", "{tmp}/x"], "the following arguments are required: --to; see flax-mesh checkpoint export"),
        (["import", "{run}", "{tmp}/x"], "{run}/config.json: no such file"),
        (["reshard", "{run}", "{tmp}/x", "{recipe}", "mesh.shape=tp:3"], "mesh.shape=tp:3: "),
        (
            ["reshard", "{run}", "{tmp}/x", "{recipe}", "model.mlp_size=8"],
            "checkpoint {run}/checkpoints/10 does not ma",
        ),
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


# --- untrusted checkpoints ---


@pytest.mark.slow
def test_control_characters_in_a_checkpoint_are_never_printed(command, tmp_path):
    evil = "a\x1b[31m\r\n\x07\u202e\x9b../../x"
    metadata = {
        "recipe": evil,
        "config": {evil: evil, "n": 1},
        "mesh": {"axis_names": [evil, "b"], "shape": [2, "x"]},
        "axes": evil,
        "rules": [[evil, [evil]], 5],
        "layout": {f"model/{evil}": evil},
        "metrics": {"loss": 10**400, "eval_loss": evil, evil: float("inf")},
        "data": {"description": evil},
        "versions": [evil],
    }
    for name, value in (("one", 1.0), ("two", 2.0)):
        with Checkpointer(tmp_path / name) as checkpointer:
            state = nnx.State({"model": {evil.replace("/", ":"): value * jnp.ones(3)}})
            checkpointer.save(1, state, metadata)
    one, two = tmp_path / "one", tmp_path / "two"
    for argv in (
        ["list", one],
        ["inspect", one],
        ["verify", one],
        ["diff", one, two, "--values"],
        ["diff", one, RECIPE],
    ):
        for more in ([], ["--json"]):
            code, out, err = command(*argv, *more)
            assert code in (DONE, FINDINGS) and not err and len(out) > 20
            assert all(char.isprintable() or char == "\n" for char in out), argv
    assert "a\\x1b[31m" in command("inspect", one)[1]
    _, _, err = command("reshard", one, tmp_path / "out", RECIPE)
    assert "only in the checkpoint" in err and all(char.isprintable() or char == "\n" for char in err)


@given(st.text())
def test_plain_escapes_only_unprintable_characters(text):
    assert plain(text).isprintable()
    assert plain(text) == text or not text.isprintable()


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(json_like)
def test_finite_is_portable_json(value):
    assert json.loads(json.dumps(finite(value), allow_nan=False)) == finite(value)


@pytest.fixture(scope="module")
def strange(saved, tmp_path_factory) -> Path:
    return Path(shutil.copytree(saved / "checkpoints" / "5", tmp_path_factory.mktemp("strange") / "5"))


SECTIONS = ("config", "mesh", "axes", "rules", "layout", "data", "metrics", "versions", "recipe", "sharding")


@settings(max_examples=6, deadline=None)
@given(st.dictionaries(st.sampled_from(SECTIONS), json_like) | json_like)
def test_any_json_as_metadata_is_accepted(saved, strange, metadata):
    file = strange / "metadata" / "metadata"
    valid = json.loads((saved / "checkpoints" / "5" / "metadata" / "metadata").read_text())
    file.write_text(json.dumps(valid | metadata if isinstance(metadata, dict) else metadata))
    for argv in (["list", "--quick"], ["inspect"], ["diff", str(saved)]):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert main(["checkpoint", argv[0], str(strange), *argv[1:]]) in (DONE, FINDINGS)
        assert all(char.isprintable() or char == "\n" for char in out.getvalue())
