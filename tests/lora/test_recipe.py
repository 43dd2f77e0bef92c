"""A recipe with `lora.rank` trains adapters alone; evaluation, samples and exports have them merged."""

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_mesh import named_leaves
from flax_mesh.checkpoint.hf.safetensors import open_safetensors
from flax_mesh.checkpoint.orbax import stored_arrays
from flax_mesh.errors import ConfigError
from flax_mesh.inference import open_trained
from flax_mesh.lora.adapters import A, B
from flax_mesh.lora.config import LoraConfig
from flax_mesh.models import DecoderConfig, make_decoder
from flax_mesh.recipe import abstract_target, resolve
from flax_mesh.recipe.checks import check_config
from flax_mesh.recipe.explain import explain
from flax_mesh.recipe.overrides import current_settings
from flax_mesh.sharding.abstract import abstract_split
from flax_mesh.train import TrainConfig, apply_overrides, load_recipe
from flax_mesh.train.export import export, reshard
from tests.train.support.runs import rows_of, run, state_of

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny.py"
SMALL = ["model.num_layers=2", "data.batch_size=8", "data.sequence_length=32", "optimizer.learning_rate=0.01"]
SMALL += [
    "run.sample_tokens=4",
    "run.eval_every=4",
    "checkpoint.every=2",
    "run.platform=auto",
    "optimizer.warmup_steps=0",
]
LORA = ["lora.rank=4", "lora.alpha=8", "lora.modules=attention/.*kernel|mlp/(up|down)/kernel"]


FROZEN = lambda path: path.startswith("model/") and not path.endswith((A, B))  # noqa: E731


@pytest.mark.parametrize("query_latent_size", [0, 4])
def test_the_default_pattern_finds_every_product_of_latent_attention(query_latent_size):
    config = DecoderConfig(num_layers=1, latent_size=8, query_latent_size=query_latent_size, rotary_dims=4)
    _, state = abstract_split(lambda: make_decoder(config, nnx.Rngs(0)))
    paths = [path for path, x in named_leaves(state) if "/attention/" in path and x.ndim > 1]
    assert len(paths) == 4 + bool(query_latent_size)
    assert all(re.search(LoraConfig().modules, path) for path in paths), paths
    old = "attention/(q|k|v|o)/kernel"  # of earlier runs, whose decoders have no other paths
    assert current_settings({"lora.modules": old}) == {"lora.modules": LoraConfig().modules}


def config_of(*settings: str) -> TrainConfig:
    return apply_overrides(load_recipe(str(RECIPE)), [*SMALL, *settings])


def test_settings_that_adapters_leave_without_a_meaning_are_errors():
    found = check_config(config_of("lora.rank=4", "lora.modules=q(", "optimizer.name=muon"))
    assert [line.split("=")[0] for line in found] == ["lora.modules", "optimizer.name"]
    config = config_of("lora.rank=4", "lora.modules=norm")
    with pytest.raises(ConfigError, match=r"lora\.modules: 'norm' matches .*norm/scale.*, which no product uses"):
        resolve(config, abstract_target(config.mesh, "tpu"))


def test_only_adapters_have_moments_and_gradients():
    config = config_of(*LORA)
    recipe = resolve(config, abstract_target(config.mesh, "tpu"))
    moments = [path for path, _ in named_leaves(abstract_split(recipe.make)[1]) if "/mu/" in path]
    assert moments and all(path.endswith((A, B)) for path in moments)
    report = explain(config).report
    factors = [leaf for leaf in report.leaves if leaf.kind == "parameter" and leaf.path.endswith((A, B))]
    assert report.gradient_bytes == sum(leaf.device_bytes for leaf in factors) < report.parameter_bytes / 4


@pytest.mark.slow
def test_a_run_starts_resumes_is_evaluated_and_exported_with_its_adapters(tmp_path: Path):
    base, folder = tmp_path / "base", tmp_path / "lora"
    run(config_of("run.steps=4", f"run.folder={base}", "mesh.shape=fsdp:8"))
    common = [*LORA, f"run.folder={folder}", f"checkpoint.start_from={base}", "run.steps=8"]
    killed = run(config_of(*common, "mesh.shape=dp:2,fsdp:2,tp:2"), kill_at=3)
    said = f"checkpoints: they leave out 20 frozen arrays; keep {base}/checkpoints/4, where they are read"
    assert said in killed.lines and not {path for path in stored_arrays(folder / "checkpoints/2") if FROZEN(path)}
    ran = run(config_of(*common, "mesh.shape=pp:2,fsdp:2,tp:2", "pipeline.num_microbatches=2"))
    whole = run(config_of(*LORA, *common[len(LORA) + 1 :], f"run.folder={tmp_path / 'whole'}", "mesh.shape=fsdp:8"))
    assert [row["step"] for row in ran.rows] == [3, 4, 5, 6, 7, 8]
    np.testing.assert_allclose([r["loss"] for r in ran.rows], [r["loss"] for r in whole.rows][2:], rtol=1e-4)

    before, after = state_of(base, 4), state_of(folder, 8)
    frozen = [path for path in before if path.startswith("model/")]
    assert frozen and all(before[path] == after[path] for path in frozen)
    assert all(x.strip(b"\0") for path, x in after.items() if path.endswith(B))

    (held_out,) = {row["eval_loss"] for row in rows_of(folder) if row["step"] == 8}
    trained = open_trained(folder, ["mesh.shape=fsdp:2,tp:2"])
    assert not any(path.endswith((A, B)) for path, _ in named_leaves(nnx.state(trained.model)))
    out = tmp_path / "exported"
    export(str(folder), str(out), "safetensors", None, None)
    exported, tokens = open_trained(out, ["mesh.shape=fsdp:8"]), jnp.arange(64).reshape(2, 32)
    logits: list[Any] = [np.asarray(one.model(tokens)) for one in (trained, exported)]
    np.testing.assert_allclose(*logits, rtol=1e-5, atol=1e-5)
    reshard(str(folder), str(tmp_path / "all"), config_of(*LORA, "mesh.shape=fsdp:8"), None)
    assert {path for path in stored_arrays(tmp_path / "all/8") if FROZEN(path)} == {*filter(FROZEN, before)}
    export(str(tmp_path / "all"), str(tmp_path / "of all"), "safetensors", None, None)
    pairs = [(open_safetensors(x)) for x in (out, tmp_path / "of all")]
    assert pairs[0].keys() == pairs[1].keys() and all((x == pairs[1][name]).all() for name, x in pairs[0].items())
    again = run(config_of(*LORA, f"checkpoint.start_from={out}", f"run.folder={tmp_path / 'again'}", "run.steps=1"))
    assert any("restored all 20 arrays of the model" in line for line in again.lines)
    without = np.asarray(open_trained(base, ["mesh.shape=fsdp:8"]).model(tokens))
    assert np.abs(logits[0] - without).max() > 0.01
    assert trained.evaluate("stdlib", max_tokens=2001).loss > 0 and held_out > 0


@pytest.mark.slow
def test_a_killed_adapter_run_resumes_bit_for_bit_and_without_a_base_saves_everything(tmp_path):
    base, whole, killed = (tmp_path / name for name in ("base", "whole", "killed"))
    own = run(config_of(*LORA, "run.steps=2", f"run.folder={base}"))
    assert {*filter(FROZEN, stored_arrays(base / "checkpoints/2"))} and any(
        "the frozen weights too" in x for x in own.lines
    )
    start = [*LORA, f"checkpoint.start_from={base}", "run.steps=6"]
    expected = run(config_of(*start, f"run.folder={whole}"))
    run(config_of(*start, f"run.folder={killed}"), kill_at=3)
    resumed = run(config_of(*start, f"run.folder={killed}"))
    assert resumed.losses == {step: loss for step, loss in expected.losses.items() if step > 2}
    assert state_of(killed, 6) == state_of(whole, 6)
    assert not {*filter(FROZEN, stored_arrays(killed / "checkpoints/6"))}
    (base / "checkpoints/2").rename(base / "checkpoints/3")
    with pytest.raises(ConfigError, match=f"(?s)are read in {base}/checkpoints/2, .* the folder is gone"):
        run(config_of(*start[:-1], "run.steps=7", f"run.folder={killed}"))
