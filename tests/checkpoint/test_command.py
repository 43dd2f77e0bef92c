"""`flax-mesh checkpoint`, run as from the command line: its output, the files it writes; reading changes no files."""

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from flax_mesh import named_leaves
from flax_mesh.checkpoint import Checkpointer
from flax_mesh.checkpoint.find import find_valid
from flax_mesh.checkpoint.hf.safetensors import open_safetensors
from flax_mesh.cli.common import BAD_INPUT, DONE, FAILED, FINDINGS
from flax_mesh.errors import CheckpointCorruptedError
from tests.checkpoint.small_decoder import CHANGED, DELTA, QWEN, RECIPE, program_of
from tests.checkpoint.states import largest, listing
from tests.train.bigram import snapshot

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def as_json(command, *argv, code=DONE):
    got, out, err = command(*argv, "--json")
    assert (got, err) == (code, "")
    return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def damage(step: Path) -> str:
    """Flip a bit in the largest file of a step; returns its name."""
    file = largest(step)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return file.relative_to(step).as_posix()


@pytest.mark.slow
def test_list_reports_steps_sizes_validity_metrics_and_mesh(command, saved):
    for folder in (saved, saved / "checkpoints"):
        five, ten = as_json(command, "list", folder)["checkpoints"]
        assert [five["step"], ten["step"]] == [5, 10] and five["problems"] == ten["problems"] == []
        files = snapshot(saved / "checkpoints" / "5")
        assert (five["files"], five["bytes"]) == (len(files), sum(map(len, files.values())))
        assert five["metrics"] == {"step": 5, "loss": 2.5, "eval_loss": 2.25} and five["saved"].endswith("+00:00")
        assert ten["metrics"]["loss"] is None
        assert five["mesh"] == {"dp": 2, "fsdp": 2, "tp": 2}
    code, out, _ = command("list", saved)
    assert code == DONE and out.startswith(f"{saved / 'checkpoints'}: 2 checkpoints, ")
    assert [line.split()[0] for line in out.splitlines()[3:]] == ["5", "10"]
    assert out.splitlines()[3].count("  valid  ") == out.splitlines()[4].count("  valid, not finite  ") == 1
    assert (five["finite"], ten["finite"]) == (True, False) and out.count("dp:2,fsdp:2,tp:2") == 2
    assert [step["step"] for step in as_json(command, "list", saved / "checkpoints" / "5")["checkpoints"]] == [5]


def test_list_and_verify_name_the_damaged_file(command, copy):
    file = damage(copy / "checkpoints" / "10")
    shutil.copytree(copy / "checkpoints" / "10", copy / "checkpoints" / "7.damaged")
    (copy / "checkpoints" / "12.orbax-checkpoint-tmp").mkdir()
    code, out, _ = command("verify", copy)
    assert code == FINDINGS
    lines = out.splitlines()
    assert lines[1].startswith("step 5: valid, ") and lines[2] == "step 10: damaged"
    assert lines[3].startswith(f"  {file}: damaged within bytes ")
    assert lines[4] == "quarantined as damaged, not verified: 7.damaged"
    assert lines[5] == "1 of 2 checkpoints damaged"
    five, ten = as_json(command, "verify", copy, code=FINDINGS)["checkpoints"]
    assert not five["problems"] and [line.split(":")[0] for line in ten["problems"]] == [file]
    assert command("verify", copy, "--step", 5)[0] == DONE
    assert command("verify", copy / "checkpoints" / "5")[0] == DONE
    assert command("verify", copy / "checkpoints" / "7.damaged")[0] == FINDINGS
    code, out, _ = command("list", copy)
    assert code == FINDINGS and f"  {file}: damaged" in out and "  quarantined  " in out
    assert out.rstrip().endswith("in progress or interrupted: 12.orbax-checkpoint-tmp")
    code, out, _ = command("list", copy, "--quick")
    assert code == DONE and out.count("not verified") == 2


def test_the_checkpoint_of_another_step_is_reported_as_damage(command, copy):
    (copy / "checkpoints" / "5").rename(copy / "checkpoints" / "20")
    problem = "the folder is named 20, but contains the checkpoint of step 5: it was renamed or overwritten."
    for arguments in (("list",), ("list", "--quick"), ("verify",), ("inspect",)):
        code, out, err = command(arguments[0], copy, *arguments[1:])
        assert (code, err) == (FINDINGS, "") and problem in " ".join(out.split()), arguments
    assert "not verified" in command("list", copy, "--quick")[1].splitlines()[3]  # step 10
    assert as_json(command, "inspect", copy, code=FINDINGS)["problems"][0].startswith(problem)
    assert as_json(command, "inspect", copy, "--step", 10)["problems"] is None
    found, damaged = find_valid(copy)
    assert found.name == "10" and damaged[copy / "checkpoints" / "20"][0].startswith(problem)


def test_a_step_without_its_state_is_listed_as_damaged(command, copy):
    for step in ("5", "10"):
        shutil.rmtree(copy / "checkpoints" / step / "state")
        shutil.rmtree(copy / "checkpoints" / step / "metadata")
    code, out, _ = command("list", copy)
    assert code == FINDINGS and out.count("  damaged  ") == 2 and "state/_METADATA: missing" in out
    assert [step["mesh"] for step in as_json(command, "list", copy, "--quick")["checkpoints"]] == [None, None]
    code, _, err = command("inspect", copy)
    assert code == FINDINGS and "its tree cannot be read" in err and "checkpoint verify" in err


def test_inspect_reports_every_array_and_subtotals(command, saved, state):
    data = as_json(command, "inspect", saved, "--step", 5)
    arrays = {one["path"]: one for one in data["arrays"]}
    assert arrays.keys() == {path for path, _ in named_leaves(state)}
    for path, x in named_leaves(state):
        one = arrays[path]
        assert (tuple(one["shape"]), one["dtype"], one["bytes"]) == (x.shape, str(x.dtype), x.nbytes)
    assert arrays[CHANGED]["split"] == "fsdp, tp"
    sums, model = data["subtotals"], jax.tree.leaves(state["model"])
    sizes = {"values": sum(x.size for x in model), "bytes": sum(x.nbytes for x in model)}
    assert sums["model"] == {"arrays": len(model), **sizes}
    assert sums["model"]["bytes"] + sums["optimizer"]["bytes"] == sums[""]["bytes"]
    assert data["config"]["model.num_layers"] == "3" and data["versions"]["jax"] == jax.__version__


def test_inspect_shows_equal_layers_as_one_line(command, saved):
    code, out, _ = command("inspect", saved)
    assert code == DONE
    lines = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()}
    assert lines["model/layers/{0..2}/mlp/up/kernel"] == ["3", "x", "f32[16,32]", "fsdp,", "tp", "6.00", "KiB"]
    assert lines["optimizer/opt_state/1/0/mu/*"][1:4] == ["like", "the", "model's"]
    assert "embed/embedding$  ('vocab', 'embed')" in out and "data.sequence_length=32" in out
    code, out, _ = command("inspect", saved, "--all")
    paths = [line.split()[0] for line in out.splitlines() if line.startswith(("model/", "optimizer/"))]
    assert "model/layers/1/mlp/up/kernel" in paths and not any("{" in path or "*" in path for path in paths)


def test_list_inspect_verify_and_diff_change_no_files(command, saved):
    before, content = listing(saved), snapshot(saved)
    for argv in (["list"], ["inspect"], ["verify"], ["diff", saved / "checkpoints" / "5", "--values"]):
        command(argv[0], saved, *argv[1:])
    command("diff", saved, RECIPE)
    assert (listing(saved), snapshot(saved)) == (before, content)


def test_diff_of_values_reports_the_changed_array_and_its_difference(command, saved):
    five, ten = saved / "checkpoints" / "5", saved / "checkpoints" / "10"
    assert as_json(command, "diff", five, ten)["differences"] == []
    found = as_json(command, "diff", five, ten, "--values", code=FINDINGS)
    assert found["differences"] == [] and found["values"]["compared"] > 80
    assert found["values"]["differing"] == {CHANGED: pytest.approx(DELTA, rel=1e-6)}
    code, out, _ = command("diff", five, ten, "--values")
    assert code == FINDINGS and "values: 1 of " in out and f"0.5  {CHANGED}" in out
    code, out, _ = command("diff", five, five, "--values")
    assert code == DONE and "arrays, bit for bit" in out


def test_diff_with_the_recipe_of_the_run_reports_only_changed_settings_and_shardings(command, saved):
    code, out, _ = command("diff", saved, RECIPE)
    assert code == DONE and "the same: settings, mesh, axes, rules, tree, layout" in out
    assert "not compared, only in one of them: data, versions" in out  # a recipe has neither
    found = as_json(command, "diff", saved, RECIPE, "model.scan=true", code=FINDINGS)["differences"]
    assert [(one["name"], one["a"], one["b"]) for one in found] == [("model.scan", "false", "true")]
    sharded = ["diff", saved, RECIPE, "model.axes.vocab_axis=none"]
    found = {one["name"]: (one["a"], one["b"]) for one in as_json(command, *sharded, code=FINDINGS)["differences"]}
    assert found["model/embed/embedding"] == ("tp, fsdp", "-, fsdp")


def test_diff_with_another_recipe_reports_settings_mesh_tree_and_layout(command, saved):
    argv = [saved, RECIPE, "model.num_layers=2", "mesh.shape=fsdp:8", "model.head_dim=8", "optimizer.shard_over=fsdp"]
    found = as_json(command, "diff", *argv, code=FINDINGS)["differences"]
    by_section = {}
    for one in found:
        by_section.setdefault(one["section"], {})[one["name"]] = (one["a"], one["b"])
    assert by_section["settings"].keys() == {text.split("=")[0] for text in argv[2:]}
    assert by_section["mesh"] == {"mesh": ("dp:2,fsdp:2,tp:2", "fsdp:8")}
    assert by_section["tree"]["model/layers/0/attention/q/kernel"] == ("f32[16,4,4]", "f32[16,4,8]")
    assert by_section["tree"]["model/layers/2/mlp/up/kernel"] == ("f32[16,32]", None)
    assert "model/layers/1/mlp/up/kernel" not in by_section["tree"]
    out = command("diff", *argv)[1]
    assert "  model/layers/2/mlp/up/kernel: only in A, f32[16,32]" in out
    assert "arrays with the same differences as their parameters" in out


def test_export_to_safetensors_and_import_are_bitwise(command, saved, state, tmp_path):
    code, out, _ = command("export", saved, tmp_path / "hf", "--to", "safetensors", "--step", 5)
    assert code == DONE and "safetensors of llama, " in out
    arrays = open_safetensors(tmp_path / "hf")
    kernel = np.asarray(dict(named_leaves(state))["model/layers/1/attention/q/kernel"])
    np.testing.assert_array_equal(arrays["model.layers.1.self_attn.q_proj.weight"], kernel.reshape(16, 16).T)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["max_position_embeddings"] == 32
    data = as_json(command, "import", tmp_path / "hf", tmp_path / "imported")
    assert data["model_type"] == "llama"
    found = as_json(command, "diff", saved / "checkpoints" / "5", tmp_path / "imported", "--values", code=FINDINGS)
    assert found["values"] == {"compared": data["arrays"], "differing": {}}
    only = {one["name"].split("/")[0] for one in found["differences"] if one["section"] == "tree"}
    assert only == {"optimizer"}


def test_plain_orbax_reads_the_exported_tree(command, saved, state, tmp_path):
    assert command("export", saved, tmp_path / "tree", "--to", "orbax", "--step", 5)[0] == DONE
    tree = dict(named_leaves(ocp.StandardCheckpointer().restore(tmp_path / "tree")))
    model = {path.removeprefix("model/"): x for path, x in named_leaves(state) if path.startswith("model/")}
    assert tree.keys() == model.keys()
    for path, x in model.items():
        assert isinstance(tree[path], np.ndarray) and np.array_equal(tree[path], x), path
    assert command("export", saved, tmp_path / "cast", "--to", "orbax", "--dtype", "bfloat16")[0] == DONE
    cast = ocp.StandardCheckpointer().restore(tmp_path / "cast")
    assert {x.dtype for x in jax.tree.leaves(cast)} == {jnp.dtype("bfloat16")}


@pytest.mark.slow
def test_reshard_writes_the_same_values_in_the_layout_of_the_recipe(command, saved, tmp_path):
    out = tmp_path / "run2" / "checkpoints"
    argv = ["mesh.shape=fsdp:4,tp:2", "model.scan=true"]
    code, text, _ = command("reshard", saved, out, RECIPE, *argv)
    assert code == DONE and "mesh dp:2,fsdp:2,tp:2 -> fsdp:4,tp:2" in text
    found = as_json(command, "diff", saved, out, "--values", code=FINDINGS)
    assert found["values"]["differing"] == {}
    assert {one["section"] for one in found["differences"]} == {"settings", "mesh"}
    found = as_json(command, "diff", out, RECIPE, *argv, code=FINDINGS)["differences"]
    assert [one["name"] for one in found] == ["model.scan"]  # a run of this recipe resumes from it
    program = program_of(*argv)
    with Checkpointer(out) as checkpointer:
        assert checkpointer.latest_step() == 10 and checkpointer.metadata(10)["metrics"]["eval_loss"] == 2.25
        target = checkpointer.check(program.layout, 10)
        stored: Any = checkpointer.arrays(10)
        for path, x in target.items():  # the chunks on disk match the new layout
            assert stored[path].storage.chunk_shape == x.sharding.shard_shape(x.shape), path
        checkpointer.restore(program.layout, 10)


def test_a_damaged_step_is_skipped_or_refused(command, copy, tmp_path):
    damage(copy / "checkpoints" / "10")
    code, out, _ = command("export", copy, tmp_path / "a", "--to", "orbax")
    assert code == DONE and out.startswith("warning: step 10 is damaged and was skipped (")
    code, _, err = command("export", copy, tmp_path / "b", "--to", "orbax", "--step", 10)
    assert code == FINDINGS and "10 is damaged:" in err and not (tmp_path / "b").exists()
    damage(copy / "checkpoints" / "5")
    code, out, err = command("diff", copy, copy / "checkpoints" / "5", "--values")
    assert code == FINDINGS and not out and "is damaged:" in err
    code, _, err = command("reshard", copy, tmp_path / "c", RECIPE)
    assert code == FINDINGS and "5 is damaged:" in err and "10 is damaged:" in err and not (tmp_path / "c").exists()
    with pytest.raises(CheckpointCorruptedError, match="5 is damaged"):
        find_valid(copy)


def test_a_full_disk_is_one_line_of_error_and_leaves_no_files(command, saved, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        code, _, err = command("export", saved, tmp_path / "out" / "hf", "--to", "safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == FAILED
    problem = "could not be written: File too large; the partial output was removed"
    assert err == f"flax-mesh: {tmp_path / 'out' / 'hf'} {problem}\n"
    assert list((tmp_path / "out").iterdir()) == []


# --- wrong arguments, and folders that it cannot import or export ---


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
