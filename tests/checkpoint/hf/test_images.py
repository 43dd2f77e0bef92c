"""The text decoders of models that also read images."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from flax_mesh import create_mesh
from flax_mesh.checkpoint.hf.decoders import read_config, text_config
from flax_mesh.checkpoint.hf.family import TEXT_NAMES, WITH_IMAGES
from flax_mesh.checkpoint.hf.kept import read_kept_config
from flax_mesh.checkpoint.hf.safetensors import open_safetensors, write_safetensors
from flax_mesh.cli import main
from flax_mesh.errors import ConfigError
from flax_mesh.models import load_decoder
from flax_mesh.tree import named_leaves
from tests.checkpoint.hf.make_reference import CASES, DATA, SMALL, randomize, tokens_of

ONE = (1, 1, 1, 1, 1)
TEXT = {"gemma3": "gemma3", "mistral3": "mistral", "qwen3_5": "qwen3_5", "qwen3_5_moe": "qwen3_5_moe"}
TOLERANCE = 1e-5  # of the largest logit, in float32


def wrapped(case: str, model_type: str, folder: Path, names: tuple[str, str], change: Any = lambda arrays: arrays):
    """A folder of `model_type` whose text decoder is the model of a case."""
    config = {**read_config(DATA / case)}
    outer = {"model_type": model_type, "architectures": ["Other"], "vision_config": {}, "image_token_id": 3}
    outer |= {key: config.pop(key) for key in ("torch_dtype", "dtype", "architectures") if key in config}
    arrays: dict[str, np.ndarray] = {}
    for name, array in open_safetensors(DATA / case).items():
        first, _, rest = name.partition(".")
        arrays[names[first == "lm_head"] + rest] = np.array(array)
    arrays["model.visual.weight"] = np.ones(3, np.float32)
    arrays = change(arrays)
    files = {"config.json": {**outer, "model_type": model_type, "text_config": config}}
    shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays.items()}
    write_safetensors(folder, shapes, arrays.items(), json_files=files)
    return folder


def parameters(folder: Path) -> dict[str, np.ndarray]:
    model, _ = load_decoder(folder, create_mesh(ONE, devices=jax.devices()[:1]), dtype="float32")
    return {path: np.asarray(x) for path, x in named_leaves(nnx.state(model, nnx.Param))}


def fused(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays with one array for all experts of a layer, as the published folders have them."""
    parts: dict[str, dict[str, list[np.ndarray]]] = {}
    for name in [name for name in arrays if ".experts." in name]:
        layer, _, rest = name.partition(".experts.")
        parts.setdefault(f"{layer}.experts", {}).setdefault(rest.split(".")[1], []).append(arrays.pop(name))
    for layer, kinds in parts.items():
        gate, up, down = (np.stack(kinds[f"{kind}_proj"]) for kind in ("gate", "up", "down"))
        arrays |= {f"{layer}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{layer}.down_proj": down}
    return arrays


@pytest.mark.parametrize(("model_type", "names"), [*zip(("qwen3_5_moe", "mistral3"), TEXT_NAMES, strict=True)])
def test_the_text_decoder_is_read_and_exported_bit_for_bit(model_type, names, tmp_path):
    case = TEXT[model_type]
    folder = wrapped(case, model_type, tmp_path / "model", names, fused if model_type == "qwen3_5_moe" else dict)
    expected, found = parameters(DATA / case), parameters(folder)
    assert expected.keys() == found.keys()
    assert all(np.array_equal(found[path], expected[path]) for path in expected)
    assert main(["checkpoint", "import", str(folder), str(tmp_path / "imported")]) == 0
    config = read_kept_config(tmp_path / "imported")
    assert config["model_type"] == WITH_IMAGES[model_type]["model_type"] and "vision_config" not in config
    assert (
        main(["checkpoint", "export", str(tmp_path / "imported"), str(tmp_path / "text"), "--to", "safetensors"]) == 0
    )
    exported, stored = open_safetensors(tmp_path / "text"), open_safetensors(DATA / case)
    assert exported.keys() == stored.keys() and read_config(tmp_path / "text") == config
    assert all(np.array_equal(exported[name], stored[name]) for name in stored)


def test_keys_outside_of_the_text_and_defaults_of_gemma_3(tmp_path):
    config = {
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "eos_token_id": [1, 106],
        "vision_config": {"depth": 1},
    }
    part = text_config({**config, "text_config": {"num_attention_heads": 16, "torch_dtype": "float32"}})
    assert part == {
        **{"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "torch_dtype": "float32"},
        **{"eos_token_id": [1, 106], "vocab_size": 262_208, "num_attention_heads": 16, "num_key_value_heads": 4},
    }
    assert text_config(config) is config and text_config(part) is part
    quantized = {**config, "text_config": {}, "quantization_config": {"quant_method": "fp8"}}
    assert text_config(quantized)["quantization_config"], "as it is refused in a folder without images"
    folder = wrapped("llama3", "gemma3", tmp_path / "other", TEXT_NAMES[0])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "text_config": {"model_type": "mamba"}}))
    with pytest.raises(ConfigError, match=r"model_type must be one of .* got 'mamba'"):
        load_decoder(folder, create_mesh(ONE, devices=jax.devices()[:1]))


CLIP = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
CLIP |= {"image_size": 8, "patch_size": 4}
VISION = {
    "gemma3": {"vision_config": {**CLIP, "model_type": "siglip_vision_model"}, "mm_tokens_per_image": 4},
    "mistral3": {"vision_config": {**CLIP, "model_type": "pixtral", "head_dim": 8}},
}
VISION["qwen3_5"] = VISION["qwen3_5_moe"] = {
    "vision_config": {
        **{"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16},
        **{"patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": []},
    }
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TEXT)
def test_logits_equal_transformers_and_so_do_those_of_the_export(model_type, tmp_path):
    torch = pytest.importorskip("torch", reason="comes with the extra hf")
    transformers = pytest.importorskip("transformers", reason="comes with the extra hf")
    text, rng = {**SMALL, **CASES[TEXT[model_type]]}, np.random.default_rng(3)
    tied = {"tie_word_embeddings": text["tie_word_embeddings"]}
    config = transformers.AutoConfig.for_model(model_type, text_config=text, **tied, **VISION[model_type])
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    randomize(model, rng, scale=0.3, norm=float(model_type == "mistral3"))
    model.save_pretrained(tmp_path / "model")
    tokens = np.maximum(tokens_of(rng), 2)
    ids = torch.from_numpy(tokens).long()
    logits = model(ids).logits.detach().numpy()
    ours, _ = load_decoder(tmp_path / "model", create_mesh(ONE, devices=jax.devices()[:1]), dtype="float32")
    assert np.abs(np.asarray(ours(jax.numpy.asarray(tokens))) - logits).max() < TOLERANCE * np.abs(logits).max()
    assert main(["checkpoint", "import", str(tmp_path / "model"), str(tmp_path / "imported")]) == 0
    assert (
        main(["checkpoint", "export", str(tmp_path / "imported"), str(tmp_path / "text"), "--to", "safetensors"]) == 0
    )
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text", attn_implementation="eager").eval()
    assert np.abs(exported(ids).logits.detach().numpy() - logits).max() < TOLERANCE * np.abs(logits).max()
    if model_type == "qwen3_5_moe":
        arrays = fused({name: np.array(x) for name, x in open_safetensors(tmp_path / "model").items()})
        shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays.items()}
        files = {"config.json": read_config(tmp_path / "model")}
        write_safetensors(tmp_path / "fused", shapes, arrays.items(), json_files=files)
        again = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "fused").eval()
        assert np.abs(again(ids).logits.detach().numpy() - logits).max() < TOLERANCE * np.abs(logits).max()
