"""Losses and gradients of every family against transformers; published configurations; random ones; meshes."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from flax_mesh import create_mesh
from flax_mesh.checkpoint.hf.convert import save_safetensors
from flax_mesh.checkpoint.hf.decoders import decoder_config_from_hf, huggingface_config, read_config, text_config
from flax_mesh.checkpoint.hf.families import FAMILIES
from flax_mesh.checkpoint.hf.kept import updated_config
from flax_mesh.checkpoint.hf.layer_keys import DELTA
from flax_mesh.checkpoint.hf.mapping import map_params
from flax_mesh.checkpoint.hf.names import DECODER_NAMES
from flax_mesh.checkpoint.hf.peft import adapted_arrays
from flax_mesh.checkpoint.hf.safetensors import open_safetensors, write_safetensors
from flax_mesh.errors import ConfigError
from flax_mesh.models import DecoderConfig, load_decoder, make_decoder, next_token_loss
from flax_mesh.tree import named_leaves
from tests.checkpoint.hf.make_reference import CASES, DATA, LLAMA3, MSCALE_YARN, SMALL, randomize, tokens_of
from tests.models.reference import with_random_parameters

pytestmark = pytest.mark.usefixtures("quick_compilation")
TOLERANCE = 1e-5  # of the largest value of a leaf, in float32
PUBLISHED = json.loads((Path(__file__).parent / "hub" / "published.json").read_text())
ONE, MESH = (1, 1, 1, 1, 1), (1, 2, 1, 2, 1)
NO_ROUTER_LOSSES = {"load_balance_loss": 0.0, "router_z_loss": 0.0}


def write_gradients(config: dict[str, Any], folder, seed=3):
    """Write a model of transformers and a second one whose parameters are its gradients; the loss, the tokens."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoConfig, AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    rng = np.random.default_rng(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="eager").eval()
    # The weights of norms are around 1, also where the model adds 1.
    adds_1 = FAMILIES[config["model_type"]].settings.get("zero_centered", False)
    # With 0.5, the gradients of delta nets in float32 are further from float64, here and in torch, than the limit.
    scale = 0.3 if any(key.startswith("linear_") for key in config) else 0.5
    randomize(model, rng, scale=scale, norm=float(not adds_1))
    model.save_pretrained(folder / "model")
    tokens = np.maximum(tokens_of(rng), 2)  # torch has no gradient of the embedding of pad_token_id, 0 or 1
    ids = torch.from_numpy(tokens).long()
    logits = model(ids[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(folder / "gradients")
    return tokens, logits.detach().numpy(), loss.item()


@nnx.jit
def mean_loss_and_gradients(model, batch):
    def mean(model):
        loss, weight, *_ = next_token_loss(model, batch)
        return loss / weight

    return nnx.value_and_grad(mean)(model)


logits_of = nnx.jit(lambda model, tokens: model(tokens))


def check(config, folder, shape=ONE, **change):
    tokens, logits, loss = write_gradients(config, folder)
    mesh = create_mesh(shape, devices=jax.devices()[: int(np.prod(shape))])
    model, _ = load_decoder(folder / "model", mesh, dtype="float32", **NO_ROUTER_LOSSES, **change)
    tokens = np.repeat(tokens, mesh.size, axis=0)  # equal rows, whose mean loss and its gradients are those of one
    with jax.set_mesh(mesh):
        ours = np.asarray(logits_of(model, tokens[:, :-1]))
        found, gradients = mean_loss_and_gradients(model, {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]})
    assert np.abs(ours - logits).max() < TOLERANCE * np.abs(logits).max()
    assert abs(float(found) - loss) < TOLERANCE * loss
    expected, _ = load_decoder(folder / "gradients", mesh, dtype="float32", **change)
    expected = dict(named_leaves(nnx.state(expected, nnx.Param)))
    assert expected.keys() == dict(named_leaves(gradients)).keys()
    for path, value in named_leaves(gradients):
        want = np.asarray(expected[path])
        difference = np.abs(np.asarray(value) - want).max() / max(np.abs(want).max(), 1e-6)
        assert difference < TOLERANCE, (path, difference)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True], ids=["list", "scan"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_transformers(case, scan, tmp_path):
    pytest.importorskip("torch", reason="comes with the extra hf")
    pytest.importorskip("transformers", reason="comes with the extra hf")
    check({**SMALL, **CASES[case]}, tmp_path, scan=scan)


@pytest.mark.slow
def test_gradients_of_delta_nets_and_experts_over_fsdp_ep_and_tp_equal_transformers(tmp_path):
    pytest.importorskip("torch", reason="comes with the extra hf")
    pytest.importorskip("transformers", reason="comes with the extra hf")
    check({**SMALL, **CASES["qwen3_5_moe"]}, tmp_path, shape=(1, 2, 2, 2, 1), scan=True)


WINDOWED = {"full_attention", "sliding_attention"}
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu2")
SCALINGS = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "attention_factor": 0.8},
    {**LLAMA3, "original_max_position_embeddings": 32},
)


def random_experts(config: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Groups, shared experts, first dense layers and latents, for the families that have them."""
    pick = lambda values: values[rng.integers(len(values))]  # noqa: E731
    layers, model_type = config["num_hidden_layers"], config["model_type"]
    dense, (groups, top) = int(rng.integers(layers)), pick([(1, 1), (2, 1), (3, 2), (3, 3)])
    found = {"n_group": groups, "topk_group": top, "n_shared_experts": pick([1, 2])}
    found |= {"routed_scaling_factor": pick([1.0, 1.5]), "first_k_dense_replace": dense}
    if model_type == "glm4_moe_lite":
        del found["first_k_dense_replace"]
        found["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (layers - dense)
    if model_type == "deepseek_v2":
        found["topk_method"] = "greedy" if groups == 1 else "group_limited_greedy"
    if model_type == "glm4_moe":
        return found | {"partial_rotary_factor": pick([0.5, 1.0]), "use_qk_norm": bool(rng.integers(2))}
    heads, rotary = config["num_attention_heads"], pick([4, 8])
    found |= {"num_key_value_heads": heads, "head_dim": rotary, "qk_rope_head_dim": rotary}
    found |= {"q_lora_rank": pick([None, 10]), "qk_nope_head_dim": pick([6, 10]), "v_head_dim": pick([4, 8, 12])}
    return found | {"rope_scaling": dict(pick([*SCALINGS, MSCALE_YARN]))}


def random_config(seed: int) -> dict[str, Any]:
    """A case with other sizes, and with each of the switches that its family has on or off."""
    rng = np.random.default_rng(seed)
    pick = lambda values: values[rng.integers(len(values))]  # noqa: E731
    config = {**SMALL, **CASES[[*CASES][seed % len(CASES)]]}
    family, layers = FAMILIES[config["model_type"]], int(rng.integers(1, 5))
    heads, kv_heads = pick([(4, 1), (4, 2), (4, 4), (2, 2)])
    config |= {"num_hidden_layers": layers, "num_key_value_heads": kv_heads, "num_attention_heads": heads}
    if config["head_dim"] * 4 == config["hidden_size"]:  # derived, in some families
        config["head_dim"] = config["hidden_size"] // heads
    config |= {"rms_norm_eps": pick([1e-5, 1e-2]), "tie_word_embeddings": bool(rng.integers(2))}
    if family.layers == DELTA:
        kinds, layers = ["linear_attention", "full_attention"], max(layers, 2)
        keys, each = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        config |= {"linear_num_key_heads": keys, "linear_num_value_heads": keys * each}
        config |= {"linear_key_head_dim": pick([4, 6, 8]), "linear_value_head_dim": pick([4, 6, 8])}
        config |= {"linear_conv_kernel_dim": pick([1, 2, 4]), "partial_rotary_factor": pick([0.25, 0.5, 1.0])}
        config |= {"layer_types": [*kinds, *(pick(kinds) for _ in range(layers - 2))], "num_hidden_layers": layers}
    elif "layer_types" in config:
        kinds = ["attention"] if config["model_type"] == "granitemoehybrid" else sorted(WINDOWED)
        config["layer_types"] = [pick(kinds) for _ in range(layers)]
    if config.get("sliding_window"):
        config["sliding_window"] = int(rng.integers(1, 12))
    for key in sorted(
        {"attention_bias", "mlp_bias", "norm_topk_prob", "qkv_bias", "rope_interleave"} & family.keys.keys()
    ):
        config[key] = config["model_type"] == "gpt_oss" or bool(rng.integers(2))
    for key in sorted({"hidden_act", "hidden_activation"} & family.keys.keys()):
        config[key] = pick(ACTIVATIONS) if config["model_type"] not in ("gpt_oss", "gemma") else config.get(key, "silu")
    for key in sorted({"attn_logit_softcapping", "final_logit_softcapping"} & family.keys.keys()):
        config[key] = pick([None, 3.0])
    for key in sorted({"embedding_multiplier", "residual_multiplier", "logits_scaling"} & family.keys.keys()):
        config[key] = pick([1.0, 0.7, 2.0])
    if config["model_type"] == "phi3":
        del config["rope_scaling"], config["partial_rotary_factor"]
    else:
        config["rope_scaling"] = dict(pick(SCALINGS))
    if config["model_type"] == "smollm3":
        config["no_rope_layers"] = [int(rng.integers(2)) for _ in range(layers)]
    if "n_routed_experts" in config:
        config |= random_experts(config, rng)
    return config


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 3 * len(CASES), len(CASES)))
def test_random_configs_have_the_logits_of_transformers(first, tmp_path):
    """Three for every case."""
    torch = pytest.importorskip("torch", reason="comes with the extra hf")
    transformers = pytest.importorskip("transformers", reason="comes with the extra hf")
    mesh = create_mesh(ONE, devices=jax.devices()[:1])
    for seed in range(first, first + len(CASES)):
        config, folder = random_config(seed), tmp_path / str(seed)
        of_case = transformers.AutoConfig.for_model(**config)
        # grouped_mm, the default for experts, takes no float64.
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
        model = transformers.AutoModelForCausalLM.from_config(of_case, **eager).eval()
        rng = np.random.default_rng(seed)
        randomize(model, rng, scale=0.5)
        model.save_pretrained(folder)
        tokens = np.maximum(tokens_of(rng), 2)
        ids = torch.from_numpy(tokens).long()
        with torch.no_grad():
            want = model(ids).logits.numpy()
        ours, settings = load_decoder(folder, mesh, dtype="float32", scan=seed % 2 == 1)
        found, limit = np.asarray(logits_of(ours, tokens)), TOLERANCE * np.abs(want).max()
        if np.abs(found - want).max() >= limit:  # random weights can amplify the rounding of transformers, too
            with torch.no_grad():
                exact = model.double()(ids).logits.numpy()
            limit, want = 2 * np.abs(want - exact).max(), exact
        difference = np.abs(found - want).max()
        assert difference < limit, (seed, difference, limit, settings)


def mxfp4(blocks, scales):
    """One number at a time: sign, two bits of the exponent, one of the mantissa."""
    values = []
    for byte in blocks.reshape(-1):
        for half in (byte & 15, byte >> 4):
            exponent, mantissa = (half >> 1) & 3, half & 1
            size = (1 + mantissa / 2) * 2.0 ** (int(exponent) - 1) if exponent else mantissa / 2
            values.append(-size if half & 8 else size)
    numbers = np.asarray(values).reshape(*blocks.shape[:-1], 32) * 2.0 ** (scales.astype(int)[..., None] - 127)
    return np.swapaxes(numbers.reshape(*blocks.shape[:2], -1), 1, 2)


def test_experts_in_mxfp4_are_read_as_bfloat16(tmp_path):
    config = {**read_config(DATA / "gpt_oss"), "hidden_size": 32, "intermediate_size": 32}
    config = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}  # as gpt-oss has it
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    settings = DecoderConfig(**decoder_config_from_hf(config))
    state = nnx.state(with_random_parameters(lambda: make_decoder(settings, nnx.Rngs(0))))
    save_safetensors(tmp_path / "plain", state, DECODER_NAMES["gpt_oss"])
    arrays, rng = dict(open_safetensors(tmp_path / "plain")), np.random.default_rng(0)
    expected = {}
    for name in [name for name in arrays if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, size, width = arrays.pop(name).shape
        blocks = rng.integers(0, 256, (experts, width, size // 32, 16)).astype(np.uint8)
        scales = rng.integers(120, 130, blocks.shape[:-1]).astype(np.uint8)
        arrays |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = mxfp4(blocks, scales)
    write_safetensors(tmp_path / "packed", arrays, arrays.items(), json_files={"config.json": config})
    mesh = create_mesh(MESH, devices=jax.devices()[:4])
    model, found = load_decoder(tmp_path / "packed", mesh)
    assert found.dtype == "bfloat16"
    moe = model.layers[1].moe
    for name, value in (("gate_up_proj", (moe.gate, moe.up)), ("down_proj", (moe.down,))):
        want = expected[f"model.layers.1.mlp.experts.{name}"]
        for i, part in enumerate(value):
            np.testing.assert_array_equal(np.asarray(part.kernel[...], np.float32), want[..., i :: len(value)])
    save_safetensors(tmp_path / "exported", nnx.state(model), DECODER_NAMES["gpt_oss"])
    for name, want in expected.items():
        np.testing.assert_array_equal(open_safetensors(tmp_path / "exported")[name].astype(np.float32), want)
    assert "quantization_config" not in updated_config(config, vars(found))
    with pytest.raises(ConfigError, match="quantization_config must be None, got"):
        decoder_config_from_hf(config | {"quantization_config": {"quant_method": "fp8"}})


def test_float8_weights_are_multiplied_by_the_scales_of_their_blocks(tmp_path):
    """And the layer after the last one, which predicts the token after the next, is not read by default."""
    config = {**read_config(DATA / "deepseek_v3"), "intermediate_size": 136, "dtype": "bfloat16"}
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    settings = DecoderConfig(**decoder_config_from_hf(config))
    model = with_random_parameters(lambda: make_decoder(settings, nnx.Rngs(0)))
    save_safetensors(tmp_path / "plain", nnx.state(model), DECODER_NAMES["deepseek_v3"])
    arrays = {name: np.array(x) for name, x in open_safetensors(tmp_path / "plain").items()}
    name = "model.layers.0.mlp.down_proj.weight"  # (16, 136): two blocks, the second one not complete
    numbers = arrays[name].astype("float8_e4m3fn")
    scales = np.array([[0.5, 3.0]], np.float32)
    arrays |= {
        name: numbers,
        f"{name}_scale_inv": scales,
        "model.layers.2.eh_proj.weight": np.zeros((2, 2), np.float32),
    }
    write_safetensors(tmp_path / "packed", arrays, arrays.items(), json_files={"config.json": config})
    model, _ = load_decoder(tmp_path / "packed", create_mesh(MESH, devices=jax.devices()[:4]))
    want = numbers.astype(np.float32) * np.where(np.arange(136) < 128, 0.5, 3.0)
    found = np.asarray(model.dense_layers[0].mlp.down.kernel[...], np.float32).T
    np.testing.assert_array_equal(found, want.astype(np.float32).astype("bfloat16").astype(np.float32))
    for change in ({"weight_block_size": [64, 64]}, {"quant_method": "gptq"}):
        with pytest.raises(ConfigError, match="quantization_config must be None, got"):
            decoder_config_from_hf(config | {"quantization_config": config["quantization_config"] | change})


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_predictions_have_the_published_names_and_are_read_on_request(name, tmp_path):
    settings: dict[str, Any] = {**decoder_config_from_hf(read_config(DATA / name)), "prediction_layers": 1}
    model = with_random_parameters(lambda: make_decoder(DecoderConfig(**settings), nnx.Rngs(0)))
    config = huggingface_config(settings, model_type=name)
    assert config["num_nextn_predict_layers"] == 1 and decoder_config_from_hf(config)["prediction_layers"] == 0
    save_safetensors(tmp_path / "model", nnx.state(model), DECODER_NAMES[name], config=config)
    arrays, count = dict(open_safetensors(tmp_path / "model")), settings["num_layers"]
    layer, before = (f"model.layers.{i}" for i in (count, count - 1))
    later, last = ({x.removeprefix(f"{at}.") for x in arrays if x.startswith(at)} for at in (layer, before))
    assert later - last == {f"{x}.weight" for x in ("enorm", "hnorm", "eh_proj", "shared_head.norm")} and last <= later
    assert arrays[f"{layer}.eh_proj.weight"].shape == (settings["hidden_size"], 2 * settings["hidden_size"])
    # Published folders have copies of the embedding and the head there.
    copies = {"embed_tokens": "model.embed_tokens.weight", "shared_head.head": "lm_head.weight"}
    arrays |= {f"{layer}.{x}.weight": arrays[of] for x, of in copies.items()}
    write_safetensors(tmp_path / "copies", arrays, arrays.items(), json_files={"config.json": config})
    mesh = create_mesh(ONE, devices=jax.devices()[:1])
    again, _ = load_decoder(tmp_path / "copies", mesh, prediction_layers=1, scan=name == "glm4_moe")
    save_safetensors(tmp_path / "again", nnx.state(again), DECODER_NAMES[name])
    files = [open_safetensors(tmp_path / folder) for folder in ("model", "again")]
    assert files[0].keys() == files[1].keys()
    assert all(files[1][x].tobytes() == value.tobytes() for x, value in files[0].items())
    assert not load_decoder(tmp_path / "copies", mesh)[0].predictions
    with pytest.raises(ConfigError, match="none in transformers:\n  predictions/0/layer/attention/o/kernel"):
        params = map_params(nnx.state(again), DECODER_NAMES[name])
        adapted_arrays(params, ["predictions/0/layer/attention/o/kernel"])
    changes: dict[str, Any] = {"embed_tokens": "differs from model.embed_tokens", "other": "only in the folder"}
    for x, message in changes.items():
        wrong = arrays | {f"{layer}.{x}.weight": arrays["model.embed_tokens.weight"] + 1}
        write_safetensors(tmp_path / x, wrong, wrong.items(), json_files={"config.json": config})
        with pytest.raises(ConfigError, match=f"{layer}.{x}.weight:? {message}"):
            load_decoder(tmp_path / x, mesh, prediction_layers=1)
    with pytest.raises(ConfigError, match=f"{layer}.eh_proj.weight: only in the model"):
        none = {x: value for x, value in arrays.items() if not x.startswith(layer)}
        write_safetensors(tmp_path / "none", none, none.items(), json_files={"config.json": config})
        load_decoder(tmp_path / "none", mesh, prediction_layers=1)
    with pytest.raises(ConfigError, match="prediction_layers=1"):
        huggingface_config({**vars(DecoderConfig()), "prediction_layers": 1})


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_accepted(name):
    """Sizes and keys of hub/published.json were written down from the files of these models, without a download.

    `compared` is whether they were compared with a copy of the file in a public repository: key by key, the part of the
    keys that the copy has, or not at all. The number of parameters is taken from the model's card.
    """
    config, billions = PUBLISHED[name]["config"], PUBLISHED[name]["billions"]
    assert PUBLISHED[name]["compared"] in ("whole", "in part", "no")
    settings = DecoderConfig(**decoder_config_from_hf(config), scan=True)
    assert not settings.problems()
    state = nnx.state(nnx.eval_shape(lambda: make_decoder(settings, nnx.Rngs(0))))
    count = sum(leaf.size for _, leaf in named_leaves(state))
    assert abs(count / 1e9 - billions) < 0.03 * billions
    written = huggingface_config(vars(settings), model_type=config["model_type"])
    assert decoder_config_from_hf(written) == decoder_config_from_hf(config)


def test_every_family_is_in_the_docs_and_has_a_published_configuration():
    text = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text()
    section = text.partition("### Families")[2].partition("A quantized folder")[0]
    documented = re.findall(r"(?m)^\| `(\w+)` \|", section)
    assert sorted(documented) == sorted(FAMILIES)
    assert {text_config(one["config"])["model_type"] for one in PUBLISHED.values()} == {*FAMILIES}
