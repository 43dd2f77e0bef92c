"""Reads and writes config.json and the arrays of the decoders of `families`.

`settings` are the fields of `flax_mesh.models.DecoderConfig` as a dict. A model of another class only needs a
table of `ParamMapping`.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from flax_mesh.checkpoint.hf.convert import load_safetensors
from flax_mesh.checkpoint.hf.families import FAMILIES
from flax_mesh.checkpoint.hf.family import (
    OF_ALL,
    OF_FAMILY,
    PREDICTION,
    TEXT_NAMES,
    WITH_IMAGES,
    WITHOUT_EFFECT,
    Family,
    Json,
    Key,
)
from flax_mesh.checkpoint.hf.layer_keys import layer_difference, layer_key_names, layer_keys, read_layers
from flax_mesh.checkpoint.hf.mapping import ParamMapping
from flax_mesh.checkpoint.hf.names import DECODER_NAMES, FUSED_NAMES
from flax_mesh.checkpoint.hf.quantized import BLOCK
from flax_mesh.checkpoint.hf.rope_keys import ROPE_KEYS, ROPE_OFF, parsed_factors, read_rope, rope_keys
from flax_mesh.checkpoint.hf.safetensors import open_safetensors, read_json, refusals
from flax_mesh.errors import ConfigError, Problem
from flax_mesh.fields import check_types
from flax_mesh.store import SETTINGS, model_here
from flax_mesh.tree import PyTree, named_leaves

Tree = TypeVar("Tree")
_READ_SEPARATELY = {"model_type", "architectures", "dtype", "torch_dtype", *ROPE_KEYS}
_OFF: dict[str, object] = {"dense_mlp_size": 0, "sliding_window": 0, "layer_pattern": ""}
OTHER_NAME = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}
# The switches of the decoder and their defaults: a family must have them, or set them, to have these models.
SWITCHES: dict[str, object] = {
    **{"num_experts": 0, "qkv_bias": False, "qk_norm": False, "norms": "before", "zero_centered": False},
    **{"qk_norm_all_heads": False, "attention_scale": 0.0, "attention_softcap": 0.0, "logit_softcap": 0.0},
    **{"attention_sinks": False, "embedding_scale": 1.0, "residual_scale": 1.0, "logits_scaling": 1.0},
    **{"output_bias": False, "mlp_bias": False, "activation": "silu", "swiglu_limit": 0.0, "rotary_dims": 0},
    **{"rope_interleaved": False, "local_rope_theta": 0.0, "router_scores": "softmax", "normalize_router": True},
    **{"shared_expert_size": 0, "shared_expert_gate": False, "router_groups": 1, "router_top_groups": 1},
    **{"router_scale": 1.0, "router_balance": False, "dense_layers": 0, "latent_size": 0, "query_latent_size": 0},
    **{"value_head_dim": 0, "rope_mscale": 0.0, "rope_mscale_all_dims": 0.0, "prediction_layers": 0},
    **{"delta_key_heads": 0, "delta_value_heads": 0, "delta_key_dim": 0, "delta_value_dim": 0, "delta_conv": 0},
    "attention_gate": False,
}
QUANTIZATION = "quantization_config"
_NOT_WRITTEN = (QUANTIZATION, "partial_rotary_factor", "normalization_function", "swiglu_alpha")
DTYPES = ("float32", "bfloat16", "float16")
# Recomputed from rope_theta and rope_scaling; layers that predict the token after the next, as in `load`.
_IGNORED_ARRAYS = (r"\.rotary_emb\.inv_freq$", r"^mtp\.")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LATER = r"model\.layers\.\d+\."
_COMPARED_BYTES = 1 << 24  # of two arrays at a time


class DecoderFolder(NamedTuple):
    """A folder with the config.json and the safetensors of a decoder; `open_decoder` makes it."""

    path: Path
    model_type: str
    settings: Json
    ignore: tuple[str, ...]
    has_images: bool = False  # whether the decoder is a part of a model that also reads images

    def problems(self) -> list[str]:
        """Errors in `ignore` and in the sizes of config.json, and a head that is not tied, one line each.

        They are found without building the model.
        """
        stored = open_safetensors(self.path)
        name, table = self._names(stored)
        numbered = any("{e}" in line.name for line in table)  # not one array for all experts
        layers, experts = self.settings["num_layers"], max(1, self.settings["num_experts"] if numbered else 0)
        layers -= self.settings.get("dense_layers", 0)
        problems, head, embedding = [], name(HEAD), name(EMBEDDING)
        # A config.json that asks for a billion layers must fail before a model of that size is traced.
        if layers * experts > len(stored):
            problems.append(
                f"{self.path}: config.json has {layers} layers with {experts} MLPs each, "
                f"but the folder contains only {len(stored)} arrays"
            )
        ignores_head = False
        for pattern in self.ignore:
            try:
                ignores_head |= bool(re.search(pattern, head))
            except re.error as error:
                problems.append(f"ignore={pattern!r} is not a valid regular expression: {error}")
        # Versions of transformers differ in which of the two arrays is the head.
        if self.settings["tied"] and not ignores_head and not _equal(stored.get(head), stored.get(embedding)):
            problems.append(
                Problem(
                    str(self.path),
                    f": tie_word_embeddings is true, but {head} differs from {embedding}",
                    f"set tie_word_embeddings to false in config.json to use {head}, or pass ignore=({head!r},) to use "
                    f"{embedding} as the head",
                    can_ignore=True,
                )
            )
        return problems

    def load(self, abstract: Tree) -> Tree:
        """The parameters of the folder in the layout of `abstract`; see `load_safetensors`."""
        name, table = self._names(open_safetensors(self.path))
        ignore = [*self.ignore, *_IGNORED_ARRAYS, *self._ignored_predictions(abstract)]
        if self.settings["tied"]:  # a head that is tied to the embedding may be stored a second time
            ignore.append(f"^{re.escape(name(HEAD))}$")
        if self.has_images:
            ignore.append(f"^(?!{re.escape(name('model.'))}|{re.escape(name('lm_head.'))})")
        return load_safetensors(self.path, abstract, table, ignore=ignore)

    def _names(self, stored: Iterable[str]) -> tuple[Callable[[str], str], list[ParamMapping]]:
        """How the folder names an array of the decoder, and the table with these names."""
        fused = any(name.endswith(".mlp.experts.gate_up_proj") for name in stored)
        table = (FUSED_NAMES if fused else DECODER_NAMES).get(self.model_type, DECODER_NAMES[self.model_type])
        if not self.has_images:
            return str, list(table)
        inner, head = next((x for x in TEXT_NAMES if any(name.startswith(x[0]) for name in stored)), TEXT_NAMES[0])
        name = lambda name: re.sub(r"^(model|lm_head)\.", lambda part: inner if part[1] == "model" else head, name)  # noqa: E731
        return name, [line._replace(name=name(line.name)) for line in table]

    def _ignored_predictions(self, abstract: PyTree) -> list[str]:
        """Patterns for the arrays of `prediction_layers` that are not read: all, or copies of embedding and head."""
        if not PREDICTION.keys() <= OF_FAMILY.get(self.model_type, {}).keys():
            return []
        if not any(path.startswith("predictions/") for path, _ in named_leaves(abstract)):
            return [rf"^model\.layers\.{self.settings['num_layers']}\."]
        copies = {"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": HEAD}
        copies |= {"shared_head.head.weight": EMBEDDING} if self.settings["tied"] else {}
        stored = open_safetensors(self.path)
        sources = {name: of for name in stored for end, of in copies.items() if re.fullmatch(rf"{_LATER}{end}", name)}
        differ = [(name, of) for name, of in sources.items() if not _equal(stored[name], stored.get(of))]
        if wrong := [f"{name} differs from {of}" for name, of in differ]:
            head = f"{self.path}: predictions share embedding and head with the decoder, but"
            raise ConfigError(wrong, head=head, repair="Set prediction_layers=0 to leave them out.")
        return [f"^{re.escape(name)}$" for name in sources]


def open_decoder(folder: str | Path, *, ignore: Iterable[str] = ()) -> DecoderFolder:
    """Read the config.json of `folder`; ConfigError where this library has no such decoder.

    `ignore` are keys of config.json and regular expressions for names of arrays that have no effect.
    """
    path, ignore = model_here(folder), tuple(ignore)
    config = read_config(path)
    settings = decoder_config_from_hf(config, ignore=ignore)
    return DecoderFolder(path, text_config(config)["model_type"], settings, ignore, has_images(config))


@check_types
def read_config(folder: str | Path) -> dict[str, Any]:
    """Read the config.json of a folder, or of a model of the hub by its id, as a dict.

    Example:
        >>> import json
        >>> from pathlib import Path
        >>> from flax_mesh.checkpoint import read_config
        >>> _ = Path("config.json").write_text(json.dumps({"model_type": "llama"}))
        >>> read_config(".")
        {'model_type': 'llama'}
    """
    path = model_here(folder, SETTINGS)
    with refusals(path):
        is_folder = path.is_dir()
    if not is_folder:
        raise ConfigError(
            f"{folder} is not a local folder. Download the model first, and pass its folder, or pass its id, org/name."
        )
    path = path / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    config = read_json(path)
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must be a JSON object.")
    return config


def has_images(config: Json) -> bool:
    """Whether a config.json is of a model that also reads images, whose text decoder is one of FAMILIES."""
    return str(config.get("model_type")) in WITH_IMAGES and isinstance(config.get("text_config"), dict)


def text_config(config: Json) -> Json:
    """The config.json of the text decoder of a model that also reads images; any other `config` itself."""
    if not has_images(config):
        return config
    outer = {key: value for key, value in config.items() if key in OF_ALL}
    part: dict[str, Any] = {**outer, **WITH_IMAGES[config["model_type"]], **config["text_config"]}
    family = FAMILIES.get(str(part["model_type"]))
    return part | ({"architectures": [family.architecture]} if family else {})


def decoder_config_from_hf(config: Json, *, ignore: Iterable[str] = ()) -> dict[str, Any]:
    """Settings of the decoder in a config.json: `DecoderConfig(**decoder_config_from_hf(config))`.

    `dtype` and `param_dtype` are the dtype of the stored parameters. Raises one ConfigError that lists every key with a
    value that this decoder does not support, and every unknown key; pass keys that have no effect to `ignore`.

    Example:
        >>> from flax_mesh.checkpoint import decoder_config_from_hf, huggingface_config
        >>> from flax_mesh.models import DecoderConfig
        >>> config = huggingface_config(vars(DecoderConfig(num_layers=3)))
        >>> decoder_config_from_hf(config)["num_layers"]
        3
    """
    ignored = set(ignore)
    config = {key: value for key, value in text_config(config).items() if key not in ignored}
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise ConfigError(
            f"model_type must be one of {', '.join(FAMILIES)}, got {config.get('model_type')!r}. A model of another "
            "family can be trained as a module of its own, with a table of its names (docs/checkpoints.md)."
        )
    problems: list[str] = []
    settings = {name: value for name, value in family.settings.items() if not callable(value)}
    settings |= _dtypes(config, problems)
    for key, target in family.keys.items():
        settings |= dict.fromkeys(target.settings, _value(config, key, target, family, problems))
    settings |= read_rope(config, family, settings, problems)
    settings |= read_layers(config, family, settings["num_layers"], problems)
    problems += _unsupported(config, family)
    if problems:
        raise ConfigError(sorted(problems), head=f"The decoder does not support this {config['model_type']}:")
    joined = {target.settings[0]: target.join for target in family.keys.values() if target.join}
    settings |= {name: join(settings[name], settings) for name, join in joined.items()}
    return settings | {name: value(settings) for name, value in family.settings.items() if callable(value)}


def huggingface_config(
    settings: Json, *, model_type: str | None = None, max_position_embeddings: int | None = None, **keys: object
) -> dict[str, Any]:
    """The config.json of a decoder with these settings, `vars` of its DecoderConfig; options that it lacks are off.

    Its "model_type" is the key of the table in DECODER_NAMES: `model_type` if that family has such decoders, otherwise
    the first one that has. `max_position_embeddings` is the longest sequence that other programs should accept; further
    `keys`, such as eos_token_id, are written unchanged. Raises ConfigError if no family has such a decoder. Settings
    that change only how it is computed or trained are not written.

    Example:
        >>> from flax_mesh.checkpoint import huggingface_config
        >>> from flax_mesh.models import DecoderConfig
        >>> config = huggingface_config(vars(DecoderConfig(num_layers=3)), eos_token_id=2)
        >>> config["model_type"], config["num_hidden_layers"], config["eos_token_id"]
        ('llama', 3, 2)
    """
    settings = {**SWITCHES, **ROPE_OFF, **_OFF, **settings}
    settings |= parsed_factors(settings)
    differences = {name: _differences(family, settings) for name, family in FAMILIES.items()}
    fitting = [name for name, lacking in differences.items() if not lacking]
    if not fitting:
        on = {name: settings[name] for name, value in SWITCHES.items() if settings[name] != value}
        on |= {name: settings[name] for name in ("sliding_window", "layer_pattern") if settings[name]}
        lines = [f"{name}: {', '.join(lacking[:2])}" for name, lacking in differences.items()]
        raise ConfigError(lines, head=f"No family has decoders with {on}; the families, and what they lack:")
    model_type = model_type if model_type in fitting else fitting[0]
    family = FAMILIES[model_type]
    config: dict[str, object] = {"architectures": [family.architecture], "model_type": model_type}
    config |= {key: target.value(settings) for key, target in family.keys.items()}
    config |= {key: count for key in PREDICTION if (count := settings["prediction_layers"])}
    config |= {key: value for key, value in family.must_of(config).items() if key not in _NOT_WRITTEN}
    config |= {**layer_keys(family, settings), **rope_keys(family, settings), "torch_dtype": settings["param_dtype"]}
    if max_position_embeddings is not None:
        config["max_position_embeddings"] = max_position_embeddings
    return config | keys


def _differences(family: Family, settings: Json) -> list[str]:
    """The settings that models of a family cannot have, empty if it has such models."""
    free, lacking = family.free(), []
    for name, default in SWITCHES.items():
        wanted = family.settings.get(name, default)
        wanted = wanted(settings) if callable(wanted) else wanted
        if settings[name] != wanted and name not in free:
            lacking.append(f"{name}={settings[name]!r}")
    for name in ("num_experts", "latent_size"):
        if name in free and not settings[name]:
            lacking.append(f"{name}=0")
    for target in family.keys.values():
        if target.part and target.part(settings[target.settings[0]], settings) is None:
            lacking.append(f"{target.settings[0]}={settings[target.settings[0]]!r}")
        several = [settings[name] for name in target.settings if len(target.settings) > 1]
        if len({*several}) > 1:
            lacking.append(" and ".join(f"{name}={settings[name]!r}" for name in target.settings))
    if family.local_rope is not None and not settings["local_rope_theta"] and settings["rope_factor"] != 1:
        lacking.append("local_rope_theta=0 with a rope_factor")
    return lacking + [layer for layer in [layer_difference(family, settings)] if layer]


def _value(config: Json, key: str, target: Key, family: Family, problems: list[str]) -> object:
    value = config.get(key)
    if value is None:
        value = config.get(OTHER_NAME.get(key, ""))
    if value is None and target.null is not None and key in config:
        return target.null
    if value is None and key in family.absent:
        absent = family.absent[key]
        value = absent(config) if callable(absent) else absent
        if value is None and target.null is not None:
            return target.null
    fits = isinstance(value, int | float) if target.kind is float else isinstance(value, target.kind)
    if not fits or isinstance(value, bool) != (target.kind is bool):
        problems.append(f"{key} must be of type {target.kind.__name__}, got {value!r}")
        return value
    try:
        return target.read(value)
    except (ValueError, ZeroDivisionError) as error:
        problems.append(f"{key} {error}")
        return value


def _dtypes(config: Json, problems: list[str]) -> dict[str, str]:
    absent = "bfloat16" if config.get(QUANTIZATION) else "float32"
    dtype = config.get("dtype") or config.get("torch_dtype") or absent  # the name since transformers 5, and before
    if dtype not in DTYPES:
        problems.append(f"torch_dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return {"dtype": dtype, "param_dtype": dtype}


def _equal(array: np.ndarray | None, other: np.ndarray | None) -> bool:
    """Whether two stored arrays have the same bytes, or one is missing. Only a slice of each is in memory at a time."""
    if array is None or other is None:
        return True
    if (array.shape, array.dtype) != (other.shape, other.dtype):
        return False
    first, second = (x.reshape(-1).view(np.uint8) for x in (array, other))  # views of the memory-mapped files
    pieces = (slice(start, start + _COMPARED_BYTES) for start in range(0, len(first), _COMPARED_BYTES))
    return all(np.array_equal(first[piece], second[piece]) for piece in pieces)


def _unsupported(config: Json, family: Family) -> list[str]:
    problems = []
    for key, value in family.must_of(config).items():
        given = config.get(key, family.absent.get(key, value))
        is_read = key == QUANTIZATION and isinstance(given, dict) and given.get("quant_method") == (family.packed or ())
        is_read = is_read and given.get("weight_block_size", [BLOCK, BLOCK]) == [BLOCK, BLOCK]
        if given != value and (given or value) and not is_read and key not in ROPE_KEYS:
            problems.append(f"{key} must be {value!r}, got {given!r}")
    architectures = config.get("architectures")
    if architectures not in (None, [family.architecture]):
        problems.append(f"architectures must be ['{family.architecture}'], got {architectures!r}")
    known = family.keys.keys() | family.must.keys() | WITHOUT_EFFECT.keys() | _READ_SEPARATELY
    known |= layer_key_names(family) | OF_FAMILY.get(str(config["model_type"]), {}).keys() | {family.local_rope}
    known |= {OTHER_NAME[key] for key in family.keys if key in OTHER_NAME}
    unknown = config.keys() - known
    return problems + [
        Problem(k, "is an unknown key", f"if it has no effect: ignore=({k!r},)", value=repr(config[k]), can_ignore=True)
        for k in unknown
    ]
