"""`flax-mesh explain`: findings, exit codes, no use of devices; and the golden text of every recipe."""

import dataclasses
import difflib
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh, PartitionSpec

import flax_mesh as fm
from flax_mesh import explain_sharding
from flax_mesh.cli import main
from flax_mesh.cli.common import BAD_INPUT, DONE, FINDINGS
from flax_mesh.recipe.explain import explain
from flax_mesh.recipe.target import abstract_target
from flax_mesh.train import apply_overrides, load_recipe
from tests.golden_text import golden_text
from tests.mpmd.runtime.pipelines import build, make_net, net_batch, net_loss

P = PartitionSpec
ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "recipes" / "tiny.py")
ONE_LAYER = "model.num_layers=1"
GOLDEN = ROOT / "tests" / "golden"
RECIPES = sorted((ROOT / "recipes").glob("*.py"))
LLAMA_405B = """
mesh.shape=dp:4,fsdp:128,tp:8 data.batch_size=512 model.vocab_size=128256 model.hidden_size=16384 model.num_layers=126
model.num_heads=128 model.num_kv_heads=8 model.head_dim=128 model.mlp_size=53248 model.tied=false
"""


# --- recipes ---


def test_attention_in_blocks_is_reported_for_the_batch_of_the_recipe():
    config = apply_overrides(
        load_recipe(str(ROOT / "recipes" / "tiny.py")), ["run.platform=cpu:8", "data.sequence_length=1024", ONE_LAYER]
    )
    notes = [explain(apply_overrides(config, [f"run.attention={x}"])).note for x in ("blockwise", "as_written")]
    assert [", q 1024 k 1024, 3 of 4 blocks, dim 1 over" in note for note in notes] == [True, False]


@pytest.mark.sampled
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_sharding_of_every_recipe_equals_its_golden_text(recipe, request):
    assert {file.stem for file in GOLDEN.glob("*.txt")} <= {file.stem for file in RECIPES}
    config = load_recipe(str(recipe))
    explanation = explain(apply_overrides(config, ["run.platform=cpu:8"]))  # for a mesh of all devices
    assert not explanation.findings
    file, text = GOLDEN / f"{recipe.stem}.txt", golden_text(explanation.report)
    if request.config.getoption("--update-golden"):
        file.write_text(text, encoding="utf-8")
    expected = file.read_text(encoding="utf-8") if file.exists() else ""
    if text != expected:
        lines = difflib.unified_diff(expected.splitlines(), text.splitlines(), str(file), "now", lineterm="", n=0)
        diff = "\n".join(lines)
        pytest.fail(f"the sharding of {recipe.name} changed; if intended: pytest {__file__} --update-golden\n{diff}")


# --- large models, no backend ---


@pytest.mark.slow
@pytest.mark.parametrize("scan", ["true", "false"])
def test_405b_on_4096_devices_is_explained_in_seconds_without_a_backend(scan):
    """JAX_PLATFORMS is not a platform, so that any access to a device fails."""
    settings = [*LLAMA_405B.split(), f"model.scan={scan}"]
    command = [sys.executable, "-m", "flax_mesh.cli", "explain", TINY, *settings, "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    run = subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "nowhere"}, capture_output=True, text=True)
    assert run.returncode == DONE, run.stderr
    # CPU seconds, since other processes share the cores: 3 as a stack, 10 as a list, 130 without short_tracer_errors.
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 45
    data = json.loads(run.stdout)
    assert data["total_parameters"] == 405_853_388_800
    split = 405_849_243_648 // (128 * 8) + 4_145_152  # norms are replicated
    assert data["parameter_bytes"] == data["gradient_bytes"] == 4 * split
    assert data["optimizer_bytes"] == 8 * split + 3 * 4
    assert data["num_devices"] == 4096


def test_tracing_time_grows_linearly_with_the_model():
    """In all places that trace a model: a pipeline, its state, and the state without a pipeline."""
    tracer, seen = partial_eval.DynamicJaxprTracer, []
    before = tracer._origin_msg

    def make():
        seen.append(tracer._origin_msg is before)
        return make_net()

    build(make, net_loss, net_batch(4), 2, optax.sgd(1.0)).init_state()
    fm.init_state(make, fm.abstract_state(make, fm.create_mesh(), [(".*", ())]))
    assert len(seen) > 3 and not any(seen)


# --- findings ---

RULES = [("first/kernel", ("embed", "mlp")), ("first/kernel$", ("mlp", "embed")), ("large", ())]


class Net(nnx.Module):
    def __init__(self):
        self.first = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0))
        self.tables = nnx.List([nnx.Param(jnp.zeros((5, 5))) for _ in range(3)])
        self.scale, self.large = nnx.Param(jnp.zeros(())), nnx.Param(jnp.zeros((64, 64)))


MESH = AbstractMesh((2, 2, 2), ("dp", "fsdp", "tp"))


def test_all_findings_are_in_data_and_text():
    """Each kind of finding has its test in tests/sharding/report."""
    explanation = explain_sharding(Net, MESH, RULES, large=64 * 64 * 4)
    found = [str(finding) for finding in explanation.findings]
    starts = [
        "tables/{0..2}: no rule matches",
        "large: 16.0 KiB are replicated",
        "rule 2, 'first/kernel$': applies to no",
    ]
    assert all(text.startswith(start) for text, start in zip(found, starts, strict=True)), found
    assert "(reported for 16.0 KiB or more)" in found[1]
    leaves = {leaf.path: leaf for leaf in explanation.report.leaves}
    assert leaves["first/kernel"].spec == P("fsdp", "tp")
    assert leaves["first/kernel"].rule == 0 and leaves["tables/0"].rule is None
    data, text = json.loads(json.dumps(explanation.to_dict())), explanation.to_text()
    assert [finding["path"] for finding in data["findings"]] == [finding.path for finding in explanation.findings]
    assert data["rules"][1] == {"pattern": "first/kernel$", "dims": "mlp, embed", "arrays": 0, "shadowed_by": 0}
    assert {leaf["path"] for leaf in data["leaves"]} >= {"tables/0", "tables/2", "scale"}
    assert text.startswith(f"mesh dp:2,fsdp:2,tp:2, 8 devices; fingerprint {data['fingerprint'][:12]}\n")
    assert "3 findings:" in text and all(f"- {finding}" in text for finding in found)


def test_if_nothing_is_split_as_in_plain_data_parallelism_replicated_arrays_are_not_findings():
    assert not explain_sharding(Net, AbstractMesh((8,), ("dp",)), [(".*", ())], large=1).findings


def test_unmatched_rules_are_not_findings_in_the_table_of_a_model():
    model = fm.partitioned(rules=[("head", ("embed", "vocab")), (".*", ()), ("first", ())])(type("Own", (Net,), {}))
    (only,) = explain_sharding(model, MESH).findings
    assert only.path == "rule 3, 'first'" and "rule 2, '.*', matches first" in only.problem
    assert len(explain_sharding(Net, MESH, fm.partition_rules(model())).findings) == 2


def test_annotated_models_are_explained_by_their_annotations():
    class Annotated(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "tp"))
            strange = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("strange", None))
            self.a = nnx.Linear(8, 8, kernel_init=init, rngs=rngs)
            self.b = nnx.Linear(8, 8, kernel_init=strange, rngs=rngs)

    explanation = explain_sharding(lambda: Annotated(nnx.Rngs(0)), MESH)
    leaves = {leaf.path: leaf for leaf in explanation.report.leaves}
    assert leaves["a/kernel"].spec == P("fsdp", "tp") and leaves["a/kernel"].logical == ("embed", "tp")
    of_recipe = explain(dataclasses.replace(load_recipe(TINY), make_model=lambda config, rngs: Annotated(rngs)))
    for found in (explanation, of_recipe):
        (finding,) = found.findings
        assert finding.path == "b/kernel"
        assert "'strange', neither a mesh axis nor a logical axis" in finding.problem
    assert of_recipe.axes == fm.PartitionAxis()
    text = explanation.to_text()
    assert "no table: the model is annotated" in text
    assert re.search(r"^ *a?/?kernel +f32\[8,8\] +- +embed, tp +fsdp, tp ", text, re.MULTILINE), text
    with pytest.raises(fm.ShardingError, match="Net has neither a rule table nor annotations"):
        explain_sharding(Net, MESH)


def test_a_recipe_that_does_not_fit_its_mesh_has_findings_for_settings_and_arrays():
    config = apply_overrides(load_recipe(TINY), ["mesh.shape=dp:3,tp:4", "model.vocab_size=258"])
    explanation = explain(config)
    assert "model.num_kv_heads=2 is not divisible by tp=4, whose devices have copies" in explanation.note
    texts = [str(finding) for finding in explanation.findings]
    assert texts[0] == "data.batch_size=16: not divisible by 3 (dp=3). Use a multiple, or another mesh.shape"
    start = "embed/embedding: dim 0 has size 258, not divisible by 4"
    assert any(text.startswith(start) for text in texts)
    with_rules = dataclasses.replace(config, rules=[("nothing", ()), (".*", ())])
    assert any("matches no array" in str(finding) for finding in explain(with_rules).findings)


ATTENTION = "attention: xla, because the devices are CPUs (model.attention=auto)"


def test_a_pipeline_is_explained_as_one_of_its_groups(capsys):
    settings = ["mesh.shape=pp:2,fsdp:2,tp:2", "pipeline.num_microbatches=4"]
    note = "pipeline: 1f1b over 2 groups of this mesh (pp), 4 microbatches"
    explained = explain(apply_overrides(load_recipe(TINY), settings))
    first, kernel, second, *lines = explained.to_text().splitlines()[:8]
    assert first.startswith("mesh fsdp:2,tp:2, 4 devices;") and second.startswith(note)
    assert kernel == ATTENTION
    assert [line.split(" stores ")[0] for line in lines[:2]] == ["group 0", "group 1"]
    stored = [float(line.split()[3]) for line in lines[:2]]
    unsplit = explain(apply_overrides(load_recipe(TINY), ["mesh.shape=fsdp:2,tp:2"])).report
    assert sum(stored) == pytest.approx(max(unsplit.memory_per_device.values()) / 2**20, abs=0.02)
    stages = ["stage 0: layers/0 .. layers/1", "stage 1: layers/2 .. layers/3"]
    assert [line.split(";")[0] for line in lines[2:4]] == stages
    assert note in explained.to_html()
    assert main(["explain", TINY, ONE_LAYER, "mesh.shape=pp:8"]) == FINDINGS
    assert "too few for 8 stages" in capsys.readouterr().out


@pytest.mark.sampled
@pytest.mark.parametrize("mesh", ["dp:2,fsdp:2", "pp:2"])
def test_cudnn_attention_is_explained_without_cudnn(mesh, capsys):
    base = ["explain", TINY, f"mesh.shape={mesh}", "pipeline.num_microbatches=2", "model.dtype=bfloat16"]
    assert main([*base, "model.attention=cudnn"]) == DONE
    explained = capsys.readouterr().out
    assert "\nattention: cudnn (model.attention=cudnn)\n" in explained
    assert main([*base, "model.attention=xla"]) == DONE
    assert explained.replace("attention: cudnn (model.attention=cudnn)\n", "") == capsys.readouterr().out
    assert main([*base, "model.attention=cudnn", "model.head_dim=12"]) == BAD_INPUT  # the settings are still checked


# --- the mesh and the command ---


def test_the_mesh_is_the_one_of_the_recipe():
    for settings, shape in (
        ("mesh.shape=dp:4,fsdp:128,tp:8 run.platform=auto", {"dp": 4, "fsdp": 128, "tp": 8}),
        ("mesh.shape=pp:4,fsdp:-1,tp:2 run.platform=cpu:64", {"fsdp": 8, "tp": 2}),
        ("mesh.shape=tp:64 run.platform=cpu:8", {"tp": 64}),  # not shrunk to 8 devices
    ):
        config = apply_overrides(load_recipe(TINY), settings.split())
        mesh = abstract_target(config.mesh, config.run.platform).abstract_mesh("auto")
        assert {name: size for name, size in mesh.shape.items() if size > 1} == shape


def test_exit_codes_distinguish_clean_from_findings(capsys, tmp_path):
    assert main(["explain", TINY, ONE_LAYER]) == DONE
    out = capsys.readouterr().out
    assert f"\n{ATTENTION}\n" in out and out.endswith("no findings\n")
    page, settings = tmp_path / "page.html", [ONE_LAYER, "mesh.shape=tp:8", "model.attention=xla"]
    assert main(["explain", TINY, *settings, "--json"]) == FINDINGS
    found = json.loads(capsys.readouterr().out)
    count = len(found["findings"])
    assert count >= 2
    assert main(["explain", TINY, *settings, "--html", str(page)]) == FINDINGS
    assert capsys.readouterr().out == f"{page}: {count} findings\n"
    text = page.read_text(encoding="utf-8")
    assert f"<h2>{count} findings</h2>" in text and "attention: " not in text
