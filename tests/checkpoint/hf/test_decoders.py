"""Decoders and transformers compute equal logits from each other's checkpoints; config.json is read strictly."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from flax_mesh import ConfigError, abstract_state, create_mesh
from flax_mesh.checkpoint.hf.convert import load_safetensors, save_safetensors
from flax_mesh.checkpoint.hf.decoders import (
    DECODER_NAMES,
    FAMILIES,
    DecoderFolder,
    decoder_config_from_hf,
    huggingface_config,
    read_config,
)
from flax_mesh.checkpoint.hf.safetensors import INDEX, open_safetensors, read_json
from flax_mesh.models import DecoderConfig, generate, load_decoder, make_decoder
from tests.checkpoint.hf.make_reference import CASES, DATA, GENERATED, PROMPT

TOLERANCE = 1e-5  # of the largest logit, in float32


def decoder_of(folder, names=None, **change):
    """Load the decoder in a folder, with changed names or settings."""
    config = read_config(folder)
    settings = DecoderConfig(**decoder_config_from_hf(config) | change)
    make = lambda: make_decoder(settings, nnx.Rngs(0))  # noqa: E731
    abstract = abstract_state(make, create_mesh((1, 1, 1, 1, 1), devices=jax.devices()[:1]))
    state = load_safetensors(folder, abstract, names or DECODER_NAMES[config["model_type"]])
    return nnx.merge(nnx.graphdef(nnx.eval_shape(make)), state)


logits_of = jax.jit(lambda model, tokens: model(tokens))


def difference(model, folder):
    """Largest difference from the logits of transformers, as a share of the largest logit."""
    reference = np.load(folder / "reference.npz")
    want = reference["logits"]
    assert want.shape == (1, 24, 48) and np.std(want) > 0.5
    return np.abs(np.asarray(logits_of(model, reference["tokens"])) - want).max() / np.abs(want).max()


def with_dims(case, path, dims):
    """The table of a case with other dims in one line."""
    table = DECODER_NAMES[read_config(DATA / case)["model_type"]]
    changed = tuple(line._replace(dims=dims) if line.path.endswith(path) else line for line in table)
    assert changed != table
    return changed


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case):
    assert difference(decoder_of(DATA / case), DATA / case) < TOLERANCE


MISTAKES = {  # mistake -> case and changed settings, or the dims of one line of its table
    "q transposed": ("llama", {"names": ("attention/q/kernel", "(c h) d -> d h c")}),
    "heads and dims of k swapped": ("llama", {"names": ("attention/k/kernel", "(c k) d -> d k c")}),
    "o transposed": ("qwen3", {"names": ("attention/o/kernel", "d (c h) -> h c d")}),
    "heads and dims of the bias of v swapped": ("qwen2", {"names": ("attention/v/bias", "(c k) -> k c")}),
    "no scaling of the rope": ("llama3", {"rope_factor": 1.0}),
    "another original length": ("llama3", {"rope_original_length": 128}),
    "another theta": ("qwen3", {"rope_theta": 10_000.0}),
    "another epsilon": ("qwen3", {"norm_epsilon": 1e-3}),
    "a window of one token more": ("mistral", {"sliding_window": 8}),
    "no window": ("qwen2_window", {"sliding_window": 0}),
    "another number of experts a token": ("qwen3_moe", {"experts_per_token": 1}),
}


@pytest.mark.sampled
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_changes_the_logits(mistake):
    case, change = MISTAKES[mistake]
    change = dict(change)
    names = with_dims(case, *change.pop("names")) if "names" in change else None
    assert difference(decoder_of(DATA / case, names, **change), DATA / case) > 100 * TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_loading_and_saving_a_folder_of_transformers_is_bitwise(case, tmp_path):
    model, read = decoder_of(DATA / case, scan=True), read_config(DATA / case)
    config = huggingface_config(vars(model.config), model_type=read["model_type"])
    save_safetensors(tmp_path / "out", nnx.state(model), DECODER_NAMES[read["model_type"]], config=config)
    ours, theirs = open_safetensors(tmp_path / "out"), open_safetensors(DATA / case)
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert ours[name].dtype == array.dtype and np.array_equal(ours[name], array), name
    assert decoder_config_from_hf(read_config(tmp_path / "out")) == decoder_config_from_hf(read)
    assert config["model_type"] == read["model_type"] and config["architectures"] == read["architectures"]
    assert (INDEX in {file.name for file in (DATA / case).iterdir()}) == (case == "llama")


@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_equal_logits_from_saved_folders(case, tmp_path):
    torch = pytest.importorskip("torch", reason="comes with the extra hf")
    transformers = pytest.importorskip("transformers", reason="comes with the extra hf")
    model = decoder_of(DATA / case)
    model_type = read_config(DATA / case)["model_type"]
    more = {"max_position_embeddings": 1024, "eos_token_id": 3, "pad_token_id": 0, "bos_token_id": 1}
    config = huggingface_config(vars(model.config), model_type=model_type, **more)
    names = DECODER_NAMES[config["model_type"]]
    save_safetensors(tmp_path / "out", nnx.state(model), names, config=config, max_file_bytes=10_000)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert theirs.config.eos_token_id == 3 and theirs.config.max_position_embeddings == 1024
    tokens = np.load(DATA / case / "reference.npz")["tokens"]
    with torch.no_grad():
        want = theirs.float()(torch.from_numpy(tokens).long()).logits.numpy()
    assert np.abs(np.asarray(logits_of(model, tokens)) - want).max() < TOLERANCE * np.abs(want).max()


# As on the hub, written by transformers 4.
LLAMA_3_2, QWEN_2 = (read_json(Path(__file__).parent / "hub" / name) for name in ("llama_3_2.json", "qwen_2.json"))


def test_configs_of_the_hub_become_settings():
    llama = DecoderConfig(**decoder_config_from_hf(LLAMA_3_2))
    sizes: Any = {"vocab_size": 128256, "hidden_size": 2048, "num_layers": 16, "num_heads": 32, "num_kv_heads": 8}
    sizes |= {"head_dim": 64, "mlp_size": 8192, "rope_theta": 500000.0, "rope_factor": 32.0, "norm_epsilon": 1e-5}
    assert llama == DecoderConfig(**sizes, tied=True, dtype="bfloat16", param_dtype="bfloat16") and not llama.problems()
    qwen = DecoderConfig(**decoder_config_from_hf(QWEN_2))
    assert (qwen.head_dim, qwen.qkv_bias, qwen.qk_norm, qwen.rope_factor) == (64, True, False, 1.0)


def test_a_config_with_more_layers_than_the_folder_has_arrays_is_refused_before_a_model_is_built():
    folder = DecoderFolder(DATA / "llama3", "llama", {"num_layers": 10**9, "num_experts": 0, "tied": False}, ())
    assert "has 1000000000 layers with 1 MLPs each" in folder.problems()[0]
    one_array_for_all_experts = {"num_layers": 3, "num_experts": 128, "tied": False}
    assert not DecoderFolder(DATA / "gpt_oss", "gpt_oss", one_array_for_all_experts, ()).problems()


def test_absent_keys_have_the_defaults_of_their_family():
    def without(config, *keys):
        return decoder_config_from_hf({key: value for key, value in config.items() if key not in keys})

    rope = ("rope_scaling", "rope_theta")
    old = without(LLAMA_3_2, *rope, "num_key_value_heads", "head_dim", "rms_norm_eps", "torch_dtype")
    assert (old["num_kv_heads"], old["head_dim"], old["rope_theta"]) == (32, 64, 10_000.0)
    assert (old["norm_epsilon"], old["dtype"], old["rope_factor"]) == (1e-6, "float32", 1.0)
    assert without(LLAMA_3_2, "tie_word_embeddings")["tied"] is False
    qwen3 = QWEN_2 | {"model_type": "qwen3", "architectures": None}
    assert decoder_config_from_hf(qwen3)["head_dim"] == 128 and decoder_config_from_hf(qwen3)["qk_norm"]
    assert decoder_config_from_hf(qwen3 | {"head_dim": 96})["head_dim"] == 96


def test_all_layers_have_a_sliding_window_or_none():
    llama_only = ("architectures", "mlp_bias", "attention_bias", "rope_scaling")
    llama = {key: value for key, value in LLAMA_3_2.items() if key not in llama_only}

    def window(**change):
        return decoder_config_from_hf(llama | change)["sliding_window"]

    assert window() == window(sliding_window=9) == window(model_type="mistral", sliding_window=None) == 0
    assert window(model_type="mistral") == 4096  # the default of transformers
    assert window(model_type="mistral", sliding_window=9) == 9
    qwen = {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 9}
    assert window(**qwen, max_window_layers=0) == window(**qwen, layer_types=["sliding_attention"] * 16) == 9
    assert window(**qwen, max_window_layers=16) == window(**qwen | {"use_sliding_window": False}) == 0  # of 16 layers


@pytest.mark.parametrize("config", [LLAMA_3_2, QWEN_2], ids=["llama", "qwen2"])
def test_old_and_new_spellings_of_keys_are_equivalent(config):
    new = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_theta", "torch_dtype")}
    rope = {"rope_type": "default"} | config.get("rope_scaling", {}) | {"rope_theta": config["rope_theta"]}
    new |= {"dtype": config["torch_dtype"], "rope_parameters": rope}
    assert decoder_config_from_hf(new) == decoder_config_from_hf(config)
    oldest = config | {"rope_scaling": {"type": "default"}}
    assert decoder_config_from_hf(oldest)["rope_theta"] == config["rope_theta"]


QWEN_2_WINDOW = {"model_type": "qwen2", "use_sliding_window": True}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "quick_gelu"}, "hidden_act must be one of swish, .*, got 'quick_gelu'"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias must be False, got True"),
        ({"mlp_bias": "yes"}, "mlp_bias must be of type bool, got 'yes'"),
        ({"attention_dropout": 0.1}, "attention_dropout must be 0.0, got 0.1"),
        ({"quantization_config": {"bits": 4}}, "quantization_config must be None, got {'bits': 4}"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0, got 0.5"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 8}, "layer_types must all be full_attention"),
        ({"layer_types": 3}, "layer_types must be 16 of full_attention, .*, got 3"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "must be of type default, .*longrope, got 'dynamic'"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            r"type yarn must have the keys .* and may have .*factor",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, r"type linear must have the keys \['factor'\], got \[\]"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, r"type llama3 must have the keys .*\['factor'\]"),
        ({"rope_scaling": {"rope_type": "default", "mscale": 2.0}}, r"of type default must have the keys \[\], got"),
        ({"rope_scaling": {**LLAMA_3_2["rope_scaling"], "factor": "8"}}, "rope_factor must be a number, got '8'"),
        ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor must be 1.0"),
        ({"rope_scaling": "llama3"}, "rope_scaling must be an object, got 'llama3'"),
        ({"rope_parameters": {"rope_theta": 1.0}}, "contradicts rope_theta or rope_scaling in rope_theta"),
        ({"torch_dtype": "float64"}, "torch_dtype must be one of float32, bfloat16, float16, got 'float64'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, r"architectures must be \['LlamaForCausalLM'\]"),
        ({"hidden_size": None}, "hidden_size must be of type int, got None"),
        ({"hidden_size": "2048"}, "hidden_size must be of type int, got '2048'"),
        ({"hidden_size": None, "head_dim": None}, "head_dim must be of type int, got None"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be of type bool, got 1"),
        ({"logit_scale": 0.5}, r"logit_scale=0.5 is an unknown key; if it has no effect: ignore=\('logit_scale',\)"),
        ({"model_type": "gpt2"}, "model_type must be one of llama, mistral, .*, got 'gpt2'"),
        ({"model_type": None}, "model_type must be one of .*, got None"),
        ({**QWEN_2_WINDOW, "max_window_layers": -4}, "max_window_layers must be an integer from 0, got -4"),
        ({**QWEN_2_WINDOW, "layer_types": ["full_attention"]}, "layer_types must be 16 of"),
        ({"use_sliding_window": True}, "use_sliding_window=True is an unknown key"),
        ({"model_type": "qwen3_moe", "use_sliding_window": True}, "use_sliding_window must be False, got True"),
        ({"model_type": "qwen3_moe", "norm_topk_prob": 1}, "norm_topk_prob must be of type bool, got 1"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, r"mlp_only_layers must be \[\], got \[0\]"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step must be 1, got 2"),
        ({"model_type": "mixtral", "sliding_window": 0}, "sliding_window must be a positive integer or null, got 0"),
        ({"model_type": "mistral", "sliding_window": "4"}, "sliding_window must be a positive .*, got '4'"),
    ],
    ids=lambda value: "" if isinstance(value, str) else ",".join(value),
)
def test_unsupported_values_are_refused_by_name(change, message):
    assert decoder_config_from_hf(LLAMA_3_2)
    with pytest.raises(ConfigError, match=message):
        decoder_config_from_hf(LLAMA_3_2 | change)


def test_one_error_lists_every_unsupported_key():
    config = LLAMA_3_2 | {"hidden_act": "swiglu", "logit_scale": 2.0, "rope_scaling": {"type": "yarn"}}
    with pytest.raises(ConfigError, match=r"(?s)does not support this llama:.*hidden_act.*logit_scale.*rope_scaling"):
        decoder_config_from_hf(config)
    ignored = decoder_config_from_hf(LLAMA_3_2 | {"unsloth_fixed": True}, ignore=["unsloth_fixed"])
    assert ignored == decoder_config_from_hf(LLAMA_3_2)


def test_config_json_must_exist_and_be_an_object(tmp_path):
    with pytest.raises(ConfigError, match=r"config.json: no such file"):
        read_config(tmp_path)
    for text, message in (("[]", "must be a JSON object"), ("{", "not valid JSON")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_config(tmp_path)


def test_a_decoder_of_no_family_is_refused():
    config = DecoderConfig(qkv_bias=True, qk_norm=True)
    with pytest.raises(ConfigError, match=r"No family has decoders with .*'qk_norm': True.*\n  llama: "):
        huggingface_config(vars(config))
    scaled = huggingface_config(vars(dataclasses.replace(DecoderConfig(), rope_factor=8.0)))
    assert scaled["max_position_embeddings"] == 65536 and scaled["rope_scaling"]["rope_type"] == "llama3"


def test_options_that_older_settings_lack_are_off():
    settings = vars(DecoderConfig())
    older = settings.keys() - {"qkv_bias", "qk_norm", "rope_factor", "num_experts", "sliding_window"}
    assert huggingface_config({key: settings[key] for key in older}) == huggingface_config(settings)


def test_every_family_has_a_table_and_a_case():
    assert FAMILIES.keys() == DECODER_NAMES.keys() == {read_config(DATA / case)["model_type"] for case in CASES}
    assert {folder.name for folder in DATA.iterdir()} == CASES.keys()
    assert sum(file.stat().st_size for file in Path(DATA).rglob("*")) < 1_550_000


REPEATING = ("gemma2", "granite")  # texts of few tokens, whatever the weights


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (1, 2, 1, 2, 1)])
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_that_transformers_generated(case, shape):
    with np.load(DATA / case / "generated.npz") as stored:
        prompt, expected, margin = stored["prompt"].tolist(), stored["tokens"].tolist(), stored["margin"]
    assert len(prompt) == PROMPT and len(expected) == GENERATED
    assert case in REPEATING or len(set(expected)) > 4
    assert margin > 5e-4  # rounding does not change a token
    mesh = create_mesh(shape, devices=jax.devices()[: math.prod(shape)])
    model, _ = load_decoder(DATA / case, mesh, dtype="float32")
    (found,) = generate(model, [prompt], max_tokens=len(expected))
    assert found.tokens.tolist() == expected
