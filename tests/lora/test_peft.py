"""Adapters that are exported for PEFT, on top of the Hugging Face folder of the run, are the merged weights."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from flax_mesh import ConfigError, abstract_state, create_mesh, named_leaves
from flax_mesh.checkpoint import Checkpointer
from flax_mesh.checkpoint.hf.decoders import open_decoder
from flax_mesh.checkpoint.hf.kept import keep_files
from flax_mesh.checkpoint.hf.peft import ADAPTER, ADAPTER_CONFIG
from flax_mesh.checkpoint.hf.safetensors import open_safetensors
from flax_mesh.cli.common import DONE
from flax_mesh.cli.main import main
from flax_mesh.lora.config import LoraConfig
from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss
from flax_mesh.recipe.overrides import to_texts
from flax_mesh.train import CheckpointConfig, TrainConfig
from flax_mesh.train.export import export
from tests.checkpoint.hf.make_reference import DATA

ALL = "attention/.*kernel|mlp/.*kernel|head"
SCALE = 3 / 2
FACTORS = "base_model.model."
LAYERS = ("down", "gate", "k", "o", "q", "up", "v")
LATENT = ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj")
DELTA = "in_proj_a in_proj_b in_proj_qkv in_proj_z k_proj o_proj out_proj q_proj shared_expert_gate v_proj"
CASES: dict[str, tuple[str, str, bool, Sequence[str]]] = {  # folder, lora.modules, scan, target_modules
    "llama": ("llama", ALL, False, sorted(["lm_head", *(f"{one}_proj" for one in LAYERS)])),
    "one layer": ("llama", "1/attention/(q|o)", False, [f"model.layers.1.self_attn.{one}_proj" for one in "oq"]),
    "stack": ("qwen3", "attention/(q|v)/|down", True, ["down_proj", "q_proj", "v_proj"]),
    "biases": ("qwen2", "attention/(k|o)/kernel", True, ["k_proj", "o_proj"]),
    "experts": ("qwen3_moe", "attention/(q|o)/kernel", False, ["o_proj", "q_proj"]),
    "mixtral": ("mixtral", "attention/v/kernel", True, ["v_proj"]),
    "latent": ("deepseek_v3", "attention/.*kernel", True, sorted(LATENT)),
    "delta nets": ("qwen3_5_moe", "(attention|delta|shared_gate)/.*kernel", True, DELTA.split()),
    "joined delta nets": (
        "qwen3_next",
        "(attention/q|delta/.*)/kernel",
        False,
        ["in_proj_ba", "in_proj_qkvz", "out_proj", "q_proj"],
    ),
    "joined": ("phi3", "attention/(k|v)|mlp", True, ["down_proj", "gate_up_proj", "qkv_proj"]),
    "one joined layer": ("glm", "mlp/gate|1/mlp/up", False, ["gate_up_proj"]),
    "shared": ("granitemoehybrid", "mlp/.*kernel", True, ["input_linear", "output_linear"]),
}
# Of layers with several parameters.
RANKS: dict[str, dict[str, int]] = {
    "delta nets": {"in_proj_qkv": 6, "q_proj": 4},
    "joined delta nets": {"in_proj_qkvz": 8, "in_proj_ba": 4},
    "joined": {"qkv_proj": 4, "gate_up_proj": 4},
    "one joined layer": {"model.layers.1.mlp.gate_up_proj": 4},
    "shared": {"input_linear": 4},
}


def save(folder: Path, start_from: str, modules: str, scan: bool, rank: int = 2, base: Path | None = None) -> None:
    """Step 0 with the parameters of a folder of `DATA` and random adapters; `base` is another checkpoint.start_from."""
    source = open_decoder(DATA / start_from)
    model = DecoderConfig(**source.settings, scan=scan)
    lora, make = LoraConfig(rank, SCALE * rank, modules), lambda: make_decoder(model, nnx.Rngs(0))
    batch = dict.fromkeys(("inputs", "targets"), np.zeros((2, 9), np.int32))
    one = create_mesh((1, 1, 1, 1, 1), devices=jax.devices()[:1])
    frozen = dict(named_leaves(source.load(abstract_state(make, one))))
    adapted = lora.adapted(make, next_token_loss, batch, 0) if rank else make
    shapes, draw = nnx.state(nnx.eval_shape(adapted)), np.random.default_rng(0)
    leaves = [
        frozen[path] if path in frozen else jax.numpy.asarray(draw.standard_normal(x.shape, np.float32) / 8)
        for path, x in named_leaves(shapes)
    ]
    checkpoint = CheckpointConfig(start_from=str(base or DATA / start_from))
    config = TrainConfig(make_decoder, next_token_loss, model, lora=lora, checkpoint=checkpoint)
    with Checkpointer(folder, layers=("dense_layers", "layers")) as checkpointer:
        state = {"model": jax.tree.unflatten(jax.tree.structure(shapes), leaves)}
        checkpointer.save(0, state, {"config": to_texts(config)})
    keep_files(DATA / start_from, folder)  # as a run does


def exported(tmp_path: Path, *case: Any) -> tuple[Path, Path]:
    """The folders of the adapters and of the merged weights."""
    save(tmp_path / "run", *case)
    for to in ("peft", "safetensors"):
        export(str(tmp_path / "run"), str(tmp_path / to), to, None, None)
    return tmp_path / "peft", tmp_path / "safetensors"


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES)
def test_the_base_and_the_factors_are_the_merged_weights(case, tmp_path):
    start_from, modules, scan, targets = CASES[case]
    adapters, merged = exported(tmp_path, start_from, modules, scan)
    factors, weights, base = (open_safetensors(x) for x in (adapters / ADAPTER, merged, DATA / start_from))
    for layer, weight in weights.items():
        name = FACTORS + layer.removesuffix(".weight")
        a, b = (factors.pop(f"{name}.lora_{each}.weight", None) for each in "AB")
        change = 0 if a is None or b is None else SCALE * (b @ a)
        assert np.abs(change).max() == 0 or np.abs(change).max() > 0.01
        np.testing.assert_allclose(base[layer] + change, weight, atol=1e-6, err_msg=layer)
    assert not factors
    ranks = RANKS.get(case, {})
    patterns = {"rank_pattern": ranks, "alpha_pattern": {layer: SCALE * rank for layer, rank in ranks.items()}}
    assert json.loads((adapters / ADAPTER_CONFIG).read_text()) == (patterns if ranks else {}) | {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(DATA / start_from), "r": 2},
        **{"lora_alpha": 3, "lora_dropout": 0.0, "target_modules": targets, "bias": "none"},
        **{"fan_in_fan_out": False, "inference_mode": True},
    }


def test_runs_without_adapters_and_weights_that_are_no_linear_layers_are_refused(tmp_path):
    for name, modules, rank, text in (
        ("qwen2", ALL, 0, "/0 has no adapters, since lora.rank is 0; --to safetensors writes"),
        ("qwen3_moe", "router|q/kernel", 2, "layers/0/moe/router/kernel: model.layers.0.mlp.gate.weight\n"),
    ):
        save(tmp_path / name, name, modules, True, rank)
        with pytest.raises(ConfigError) as caught:
            export(str(tmp_path / name), str(tmp_path / "out"), "peft", None, None)
        assert text in f"{caught.value}\n" and "q_proj" not in str(caught.value)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("images", [False, True])
def test_a_base_with_images_or_without_parameters_is_not_named_and_adapters_can_be_cast(images, tmp_path, capsys):
    if images:
        (tmp_path / "config.json").write_text('{"model_type": "mistral3", "text_config": {}}')
        (tmp_path / "model.safetensors").touch()
    save(tmp_path / "run", "qwen2", "attention/q/kernel", True, base=tmp_path)
    command = ["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "peft"]
    assert main([*command, "--dtype", "bfloat16"]) == DONE
    out = capsys.readouterr().out
    assert out.startswith(f"note: base_model_name_or_path is null: the run started from {tmp_path}, which ")
    assert ("reads images too" in out) == images
    assert "adapters for PEFT, 4 arrays, " in out
    assert json.loads((tmp_path / "out" / ADAPTER_CONFIG).read_text())["base_model_name_or_path"] is None
    assert {x.dtype.name for x in open_safetensors(tmp_path / "out" / ADAPTER).values()} == {"bfloat16"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT calls it
@pytest.mark.parametrize("name", CASES)
def test_peft_computes_the_logits_of_the_merged_weights_in_transformers(name, tmp_path):
    torch = pytest.importorskip("torch", reason="comes with the extra hf")
    transformers = pytest.importorskip("transformers", reason="comes with the extra hf")
    peft = pytest.importorskip("peft", reason="comes with the extra hf")
    start_from, modules, scan, _ = CASES[name]
    adapters, merged = exported(tmp_path, start_from, modules, scan)
    load = partial(
        transformers.AutoModelForCausalLM.from_pretrained, pad_token_id=0
    )  # some have one above the vocabulary
    tokens = torch.from_numpy(np.load(DATA / start_from / "reference.npz")["tokens"]).long()
    with torch.no_grad():
        base = load(DATA / start_from)
        before = base(tokens).logits.numpy()
        found = peft.PeftModel.from_pretrained(base, adapters)(tokens).logits.numpy()
        expected = load(merged)(tokens).logits.numpy()
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
    assert np.abs(before - expected).max() > 0.05 * np.abs(expected).max()
