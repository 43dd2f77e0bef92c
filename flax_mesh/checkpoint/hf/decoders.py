"""Hugging Face's names and config.json for decoders of the Llama, Mistral and Qwen families, as data.

`settings` are the fields of `flax_mesh.models.DecoderConfig` as a dict. A model of another class only needs a table of
its own (`ParamMapping`).
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from flax_mesh.checkpoint.hf.convert import ParamMapping, load_safetensors
from flax_mesh.checkpoint.hf.safetensors import open_safetensors, read_json, refusals, user_path
from flax_mesh.errors import ConfigError, Problem
from flax_mesh.fields import check_types

Json = Mapping[str, Any]  # of a config.json, or the settings that follow from one
Tree = TypeVar("Tree")
ATTENTION = (
    ParamMapping("embed/embedding", "model.embed_tokens.weight", "v d -> v d"),
    ParamMapping("layers/{i}/attention_norm/scale", "model.layers.{i}.input_layernorm.weight", "d -> d"),
    ParamMapping("layers/{i}/attention/q/kernel", "model.layers.{i}.self_attn.q_proj.weight", "(h c) d -> d h c"),
    ParamMapping("layers/{i}/attention/k/kernel", "model.layers.{i}.self_attn.k_proj.weight", "(k c) d -> d k c"),
    ParamMapping("layers/{i}/attention/v/kernel", "model.layers.{i}.self_attn.v_proj.weight", "(k c) d -> d k c"),
    ParamMapping("layers/{i}/attention/q/bias", "model.layers.{i}.self_attn.q_proj.bias", "(h c) -> h c"),
    ParamMapping("layers/{i}/attention/k/bias", "model.layers.{i}.self_attn.k_proj.bias", "(k c) -> k c"),
    ParamMapping("layers/{i}/attention/v/bias", "model.layers.{i}.self_attn.v_proj.bias", "(k c) -> k c"),
    ParamMapping("layers/{i}/attention/q_norm/scale", "model.layers.{i}.self_attn.q_norm.weight", "c -> c"),
    ParamMapping("layers/{i}/attention/k_norm/scale", "model.layers.{i}.self_attn.k_norm.weight", "c -> c"),
    ParamMapping("layers/{i}/attention/o/kernel", "model.layers.{i}.self_attn.o_proj.weight", "d (h c) -> h c d"),
    ParamMapping("layers/{i}/mlp_norm/scale", "model.layers.{i}.post_attention_layernorm.weight", "d -> d"),
    ParamMapping("norm/scale", "model.norm.weight", "d -> d"),
    ParamMapping("head/kernel", "lm_head.weight", "v d -> d v"),
)
_DENSE = (
    ParamMapping("layers/{i}/mlp/gate/kernel", "model.layers.{i}.mlp.gate_proj.weight", "f d -> d f"),
    ParamMapping("layers/{i}/mlp/up/kernel", "model.layers.{i}.mlp.up_proj.weight", "f d -> d f"),
    ParamMapping("layers/{i}/mlp/down/kernel", "model.layers.{i}.mlp.down_proj.weight", "d f -> f d"),
)
_QWEN_EXPERTS = (
    ParamMapping("layers/{i}/moe/router/kernel", "model.layers.{i}.mlp.gate.weight", "e d -> d e"),
    ParamMapping("layers/{i}/moe/gate/kernel", "model.layers.{i}.mlp.experts.{e}.gate_proj.weight", "f d -> e d f"),
    ParamMapping("layers/{i}/moe/up/kernel", "model.layers.{i}.mlp.experts.{e}.up_proj.weight", "f d -> e d f"),
    ParamMapping("layers/{i}/moe/down/kernel", "model.layers.{i}.mlp.experts.{e}.down_proj.weight", "d f -> e f d"),
)
_MIXTRAL_BLOCK = "model.layers.{i}.block_sparse_moe"
_MIXTRAL_EXPERTS = (
    ParamMapping("layers/{i}/moe/router/kernel", f"{_MIXTRAL_BLOCK}.gate.weight", "e d -> d e"),
    ParamMapping("layers/{i}/moe/gate/kernel", f"{_MIXTRAL_BLOCK}.experts.{{e}}.w1.weight", "f d -> e d f"),
    ParamMapping("layers/{i}/moe/up/kernel", f"{_MIXTRAL_BLOCK}.experts.{{e}}.w3.weight", "f d -> e d f"),
    ParamMapping("layers/{i}/moe/down/kernel", f"{_MIXTRAL_BLOCK}.experts.{{e}}.w2.weight", "d f -> e f d"),
)
# model_type -> its table. A table may have lines for parameters that a model lacks.
DECODER_NAMES: dict[str, tuple[ParamMapping, ...]] = {
    "llama": ATTENTION + _DENSE,
    "mistral": ATTENTION + _DENSE,
    "qwen2": ATTENTION + _DENSE,
    "qwen3": ATTENTION + _DENSE,
    "qwen3_moe": ATTENTION + _QWEN_EXPERTS,
    "mixtral": ATTENTION + _MIXTRAL_EXPERTS,
}


class _Family(NamedTuple):
    """How the config.json of a `model_type` is read.

    keys: key of config.json -> setting
    absent: default of a key that config.json lacks: a value, or a function of the config; other keys are required
    must: key -> the only value that this decoder computes, also the default of the key where `absent` has none
    settings: settings that all models of the family share
    window: the key that decides whether tokens attend to the last `sliding_window` only, "" if they never do
    """

    architecture: str
    keys: Mapping[str, str]
    absent: Json
    must: Json
    settings: Json
    window: str = ""


KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "mlp_size",
    "rms_norm_eps": "norm_epsilon",
    "tie_word_embeddings": "tied",
}
_EXPERT_KEYS = {"num_experts_per_tok": "experts_per_token"}
_QWEN_MOE_KEYS = {**KEYS, **_EXPERT_KEYS, "num_experts": "num_experts", "moe_intermediate_size": "mlp_size"}
del _QWEN_MOE_KEYS["intermediate_size"]
ABSENT = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "head_dim": lambda config: _divide(config.get("hidden_size"), config.get("num_attention_heads")),
}
_MUST = {"hidden_act": "silu", "attention_dropout": 0.0, "quantization_config": None, "partial_rotary_factor": 1.0}
_BIASES = {"attention_bias": False}
WINDOW, USE_WINDOW, FIRST_WITH_WINDOW = "sliding_window", "use_sliding_window", "max_window_layers"
_NO_EXPERTS = {"num_experts": 0}

FAMILIES = {
    "llama": _Family(
        "LlamaForCausalLM",
        KEYS,
        {**ABSENT, "num_key_value_heads": lambda config: config.get("num_attention_heads")},
        {**_MUST, **_BIASES, "mlp_bias": False},
        {**_NO_EXPERTS, "qkv_bias": False, "qk_norm": False},
    ),
    "mistral": _Family(
        "MistralForCausalLM",
        KEYS,
        {**ABSENT, "num_key_value_heads": 8, WINDOW: 4096},
        _MUST,
        {**_NO_EXPERTS, "qkv_bias": False, "qk_norm": False},
        WINDOW,
    ),
    "qwen2": _Family(
        "Qwen2ForCausalLM",
        KEYS,
        {**ABSENT, WINDOW: 4096},
        _MUST,
        {**_NO_EXPERTS, "qkv_bias": True, "qk_norm": False},
        USE_WINDOW,
    ),
    "qwen3": _Family(
        "Qwen3ForCausalLM",
        KEYS,
        {**ABSENT, "head_dim": 128, WINDOW: 4096},
        _MUST | _BIASES,
        {**_NO_EXPERTS, "qkv_bias": False, "qk_norm": True},
        USE_WINDOW,
    ),
    "qwen3_moe": _Family(
        "Qwen3MoeForCausalLM",
        _QWEN_MOE_KEYS,
        {**ABSENT, "norm_topk_prob": False},
        {
            **_MUST,
            **_BIASES,
            USE_WINDOW: False,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        {"qkv_bias": False, "qk_norm": True},
    ),
    "mixtral": _Family(
        "MixtralForCausalLM",
        {**KEYS, **_EXPERT_KEYS, "num_local_experts": "num_experts"},
        {**ABSENT, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        {**_MUST, "router_jitter_noise": 0.0},
        {"qkv_bias": False, "qk_norm": False},
        WINDOW,
    ),
}
# Keys that do not change the logits of a full sequence in any of these families.
_WITHOUT_EFFECT = {
    *("_name_or_path", "transformers_version", "use_cache", "initializer_range", "max_position_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "pretraining_tp", FIRST_WITH_WINDOW, WINDOW),  # see `_window`
    *("output_router_logits", "router_aux_loss_coef", "output_attentions", "output_hidden_states", "return_dict"),
    *("chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id", "problem_type", "intermediate_size"),
}
_READ_SEPARATELY = {"model_type", "architectures", "dtype", "torch_dtype", "layer_types"}
_READ_SEPARATELY |= {"rope_theta", "rope_scaling", "rope_parameters"}
OTHER_NAME = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}
_SCALING = {  # key of rope_scaling -> setting
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_frequency_factor",
    "high_freq_factor": "rope_high_frequency_factor",
    "original_max_position_embeddings": "rope_original_length",
}
_NOT_WRITTEN = ("quantization_config", "partial_rotary_factor")
DTYPES = ("float32", "bfloat16", "float16")
_IGNORED_ARRAYS = (r"\.rotary_emb\.inv_freq$",)  # recomputed from rope_theta and rope_scaling
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_TIED_HEAD = r"^lm_head\.weight$"  # a head that is tied to the embedding may be stored a second time
_COMPARED_BYTES = 1 << 24  # of two arrays at a time


class DecoderFolder(NamedTuple):
    """A folder with the config.json and the safetensors of a decoder; `open_decoder` makes it."""

    path: Path
    model_type: str
    settings: Json
    ignore: tuple[str, ...]

    def problems(self) -> list[str]:
        """Errors in `ignore` and in the sizes of config.json, and a head that is not tied, one line each.

        They are found without building the model.
        """
        layers, experts = self.settings["num_layers"], max(1, self.settings["num_experts"])
        found, stored = [], open_safetensors(self.path)
        # A config.json that asks for a billion layers must fail before a model of that size is traced.
        if layers * experts > len(stored):
            found.append(
                f"{self.path}: config.json has {layers} layers with {experts} MLPs each, "
                f"but the folder contains only {len(stored)} arrays"
            )
        ignores_head = False
        for pattern in self.ignore:
            try:
                ignores_head |= bool(re.search(pattern, HEAD))
            except re.error as error:
                found.append(f"ignore={pattern!r} is not a valid regular expression: {error}")
        # Versions of transformers differ in which of the two arrays is the head.
        if self.settings["tied"] and not ignores_head and not _equal(stored.get(HEAD), stored.get(EMBEDDING)):
            found.append(
                Problem(
                    str(self.path),
                    f": tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}",
                    f"set tie_word_embeddings to false in config.json to use {HEAD}, or pass ignore=({HEAD!r},) to use "
                    f"{EMBEDDING} as the head",
                    can_ignore=True,
                )
            )
        return found

    def load(self, abstract: Tree) -> Tree:
        """The parameters of the folder in the layout of `abstract`; see `load_safetensors`."""
        tied = (_TIED_HEAD,) if self.settings["tied"] else ()
        ignore = (*self.ignore, *_IGNORED_ARRAYS, *tied)
        return load_safetensors(self.path, abstract, DECODER_NAMES[self.model_type], ignore=ignore)


def open_decoder(folder: str | Path, *, ignore: Iterable[str] = ()) -> DecoderFolder:
    """Read the config.json of `folder`; ConfigError where this library has no such decoder.

    `ignore` are keys of config.json and regular expressions for names of arrays that have no effect.
    """
    path, ignore = user_path(folder), tuple(ignore)
    config = read_config(path)
    settings = decoder_config_from_hf(config, ignore=ignore)
    return DecoderFolder(path, config["model_type"], settings, ignore)


@check_types
def read_config(folder: str | Path) -> dict[str, Any]:
    """Read the config.json of a local folder, as a dict."""
    with refusals(folder):
        is_folder = Path(folder).is_dir()
    if not is_folder:
        raise ConfigError(
            f"{folder} is not a local folder. Download the model first, and pass the folder with its config.json."
        )
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    config = read_json(path)
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must be a JSON object.")
    return config


def decoder_config_from_hf(config: Json, *, ignore: Iterable[str] = ()) -> dict[str, Any]:
    """Settings of the decoder in a config.json: `DecoderConfig(**decoder_config_from_hf(config))`.

    `dtype` and `param_dtype` are the dtype of the stored parameters. Raises one ConfigError that lists every key with a
    value that this decoder does not support, and every unknown key; pass keys that have no effect to `ignore`.
    """
    ignored = set(ignore)
    config = {key: value for key, value in config.items() if key not in ignored}
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise ConfigError(f"model_type must be one of {', '.join(FAMILIES)}, got {config.get('model_type')!r}.")
    problems: list[str] = []
    settings = {**family.settings, **_dtypes(config, problems)}
    settings |= {setting: _value(config, key, family, problems) for key, setting in family.keys.items()}
    settings |= _rope(config, family, problems)
    settings["sliding_window"] = _window(config, family, settings["num_layers"], problems)
    problems += _unsupported(config, family)
    if problems:
        raise ConfigError(sorted(problems), head=f"The decoder does not support this {config['model_type']}:")
    return settings


def huggingface_config(settings: Json, *, max_position_embeddings: int | None = None, **more: object) -> dict[str, Any]:
    """The config.json of a decoder with these settings, `vars` of its DecoderConfig; options that it lacks are off.

    Its "model_type" is the key of the table in DECODER_NAMES. `max_position_embeddings` is the longest sequence that
    other programs should accept; `more` keys, such as eos_token_id, are written unchanged. Raises ConfigError if no
    family has such a decoder. Settings that change only how it is computed or trained are not written.
    """
    settings = {
        **{"qkv_bias": False, "qk_norm": False, "num_experts": 0, "rope_factor": 1.0, "sliding_window": 0},
        **settings,
    }
    window = settings["sliding_window"]
    kind = {key: settings[key] for key in ("qkv_bias", "qk_norm")} | {"experts": settings["num_experts"] > 0}
    kind["sliding_window"] = window > 0
    kinds = {name: _kind(family) for name, family in FAMILIES.items()}
    model_type = next(
        (name for name, other in kinds.items() if kind in (other, other | {"sliding_window": False})), None
    )
    if model_type is None:
        lines = [f"{name}: {other}" for name, other in kinds.items()]
        raise ConfigError(lines, head=f"No family has decoders with {kind}; the families are:")
    family = FAMILIES[model_type]
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": model_type}
    config |= {key: settings[setting] for key, setting in family.keys.items()}
    config |= {key: value for key, value in family.must.items() if key not in _NOT_WRITTEN}
    if family.window == USE_WINDOW:
        config |= {USE_WINDOW: window > 0} | ({WINDOW: window, FIRST_WITH_WINDOW: 0} if window else {})
    elif family.window:
        config[WINDOW] = window or None
    config |= {"rope_theta": settings["rope_theta"], "torch_dtype": settings["param_dtype"]}
    if settings["rope_factor"] != 1:
        config["rope_scaling"] = {"rope_type": "llama3"} | {key: settings[name] for key, name in _SCALING.items()}
        longest = int(settings["rope_factor"] * settings["rope_original_length"])
        max_position_embeddings = max_position_embeddings or longest
    if max_position_embeddings is not None:
        config["max_position_embeddings"] = max_position_embeddings
    return config | more


def _kind(family: _Family) -> dict[str, Any]:
    settings = {key: family.settings[key] for key in ("qkv_bias", "qk_norm")}
    return settings | {"experts": "num_experts" in family.keys.values(), "sliding_window": bool(family.window)}


def _value(config: Json, key: str, family: _Family, problems: list[str]) -> Any:
    value = config.get(key)
    if value is None:
        value = config.get(OTHER_NAME.get(key, ""))
    if value is None and key in family.absent:
        absent = family.absent[key]
        value = absent(config) if callable(absent) else absent
    kind = {"tie_word_embeddings": bool, "rms_norm_eps": float}.get(key, int)
    if type(value) is not kind:
        problems.append(f"{key} must be of type {kind.__name__}, got {value!r}")
    return value


def _dtypes(config: Json, problems: list[str]) -> dict[str, Any]:
    dtype = (
        config.get("dtype") or config.get("torch_dtype") or "float32"
    )  # the name since transformers 5, and the one before
    if dtype not in DTYPES:
        problems.append(f"torch_dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return {"dtype": dtype, "param_dtype": dtype}


def _rope(config: Json, family: _Family, problems: list[str]) -> dict[str, Any]:
    """Rotary positions: `rope_theta` and `rope_scaling`, or both as `rope_parameters` (transformers 5)."""
    given = {key: config.get(key) or {} for key in ("rope_scaling", "rope_parameters")}
    if wrong := [key for key, value in given.items() if not isinstance(value, dict)]:
        problems += [f"{key} must be an object, got {config[key]!r}" for key in wrong]
        return {}
    old, new = map(dict, given.values())
    if config.get("rope_theta") is not None:
        old["rope_theta"] = config["rope_theta"]
    if conflicts := sorted(key for key in old.keys() & new.keys() if old[key] != new[key]):
        problems.append(f"rope_parameters contradicts rope_theta or rope_scaling in {', '.join(conflicts)}")
    given = old | new
    kind = given.pop("rope_type", given.pop("type", "default"))  # the current name and the oldest one
    settings = {"rope_theta": given.pop("rope_theta", family.absent["rope_theta"]), "rope_factor": 1.0}
    if given.pop("partial_rotary_factor", 1.0) != 1.0:
        problems.append("partial_rotary_factor must be 1.0")
    expected = {"default": set(), "llama3": set(_SCALING)}.get(str(kind))
    if expected is None:
        problems.append(f"rope_scaling must be of type default or llama3, got {kind!r}")
    elif given.keys() != expected:
        problems.append(f"rope_scaling of type {kind} must have the keys {sorted(expected)}, got {sorted(given)}")
    settings |= {_SCALING[key]: value for key, value in given.items() if key in _SCALING}
    problems += [f"{name} must be a number, got {x!r}" for name, x in settings.items() if not _is_number(x)]
    return settings


def _window(config: Json, family: _Family, num_layers: object, problems: list[str]) -> int:
    """`sliding_window`, which all layers have or none: 0."""
    layer_types = config.get("layer_types") or []
    is_on = bool(family.window) and (family.window == WINDOW or config.get(USE_WINDOW, False) is True)
    size = config.get(WINDOW, family.absent.get(WINDOW)) if is_on else None
    if size is not None and family.window == USE_WINDOW and not layer_types:
        first = config.get(FIRST_WITH_WINDOW, 28)
        if type(first) is int and type(num_layers) is int and first >= num_layers:
            size = None
        elif first != 0:
            problems.append(f"{FIRST_WITH_WINDOW} must be 0, so that all layers have the window, got {first!r}")
    if size is not None and (type(size) is not int or size < 1):
        problems.append(f"{WINDOW} must be a positive integer or null, got {size!r}")
    wanted = "full_attention" if size is None else "sliding_attention"
    if not isinstance(layer_types, list) or any(kind != wanted for kind in layer_types):
        problems.append(f"layer_types must all be {wanted}, got {layer_types!r}")
    return size or 0


def _equal(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    """Whether two stored arrays have the same bytes, or one is missing. Only a slice of each is in memory at a time."""
    if one is None or other is None:
        return True
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    first, second = (x.reshape(-1).view(np.uint8) for x in (one, other))  # views of the memory-mapped files
    pieces = (slice(start, start + _COMPARED_BYTES) for start in range(0, len(first), _COMPARED_BYTES))
    return all(np.array_equal(first[piece], second[piece]) for piece in pieces)


def _divide(size: object, parts: object) -> int | None:
    return size // parts if type(size) is int and type(parts) is int and parts else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _unsupported(config: Json, family: _Family) -> list[str]:
    found = []
    for key, value in family.must.items():
        given = config.get(key, family.absent.get(key, value))
        if given != value and (key, given) != ("hidden_act", "swish"):  # another name for silu
            found.append(f"{key} must be {value!r}, got {given!r}")
    architectures = config.get("architectures")
    if architectures not in (None, [family.architecture]):
        found.append(f"architectures must be ['{family.architecture}'], got {architectures!r}")
    known = family.keys.keys() | family.must.keys() | _WITHOUT_EFFECT | _READ_SEPARATELY
    known |= {USE_WINDOW} if family.window == USE_WINDOW else set()
    known |= {OTHER_NAME[key] for key in family.keys if key in OTHER_NAME}
    unknown = config.keys() - known
    return found + [
        Problem(k, "is an unknown key", f"if it has no effect: ignore=({k!r},)", value=repr(config[k]), can_ignore=True)
        for k in unknown
    ]
