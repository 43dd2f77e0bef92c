"""Rotary positions in config.json: `rope_theta` and `rope_scaling`, or both as `rope_parameters` (transformers 5).

Every kind of scaling has its required keys and optional ones, with the settings of the decoder that they determine.
"""

from typing import Any

from flax_mesh.checkpoint.hf.family import Family, Json

ROPE_KEYS = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"}
ROPE_OFF: dict[str, object] = {
    **{"rope_kind": "llama3", "rope_factor": 1.0, "rope_attention_factor": 0.0, "rope_truncate": True},
    **{"rope_short_factors": (), "rope_long_factors": (), "rotary_dims": 0, "local_rope_theta": 0.0},
    **{"rope_mscale": 0.0, "rope_mscale_all_dims": 0.0},
}
_FACTOR, _LENGTH = {"factor": "rope_factor"}, {"original_max_position_embeddings": "rope_original_length"}
_MSCALES = {"mscale": "rope_mscale", "mscale_all_dim": "rope_mscale_all_dims"}  # in latent attention
_ATTENTION_FACTOR = {"attention_factor": "rope_attention_factor"}
_LLAMA3 = {"low_freq_factor": "rope_low_frequency_factor", "high_freq_factor": "rope_high_frequency_factor"}
_YARN = {"beta_slow": "rope_low_frequency_factor", "beta_fast": "rope_high_frequency_factor"}
_OF_PAPER = {"rope_low_frequency_factor": 1.0, "rope_high_frequency_factor": 32.0}  # yarn
_LONGROPE = {"short_factor": "rope_short_factors", "long_factor": "rope_long_factors"}
_KINDS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "default": ({}, {}),
    "linear": (_FACTOR, {}),
    "llama3": (_FACTOR | _LLAMA3 | _LENGTH, {}),
    "yarn": (_FACTOR | _LENGTH, _YARN | _ATTENTION_FACTOR | {"truncate": "rope_truncate"} | _MSCALES),
    "longrope": (_LONGROPE | _LENGTH, _FACTOR | _ATTENTION_FACTOR),
}
_OLD_KINDS = {"su": "longrope"}
_OF_IMAGES = ("mrope_section", "mrope_interleaved")  # the positions of a text are equal in all sections
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_LOCAL_THETA = 10_000.0  # of Gemma 3, where config.json has none


def read_rope(config: Json, family: Family, settings: Json, problems: list[str]) -> dict[str, object]:
    """The settings of rotary positions."""
    given = {key: config.get(key) or {} for key in ("rope_scaling", "rope_parameters")}
    if wrong := [key for key, value in given.items() if not isinstance(value, dict)]:
        problems += [f"{key} must be an object, got {config[key]!r}" for key in wrong]
        return {}
    old, new = map(dict, given.values())
    if not old and not new:
        old = dict(family.absent.get("rope_scaling", {}))
    of_local = None
    if family.local_rope is not None and {_LOCAL, _GLOBAL} & new.keys():
        of_local, new = new.get(_LOCAL) or {}, dict(new.get(_GLOBAL) or {})
    if config.get("rope_theta") is not None:
        old["rope_theta"] = config["rope_theta"]
    if conflicts := sorted(key for key in old.keys() & new.keys() if old[key] != new[key]):
        problems.append(f"rope_parameters contradicts rope_theta or rope_scaling in {', '.join(conflicts)}")
    given = {key: value for key, value in (old | new).items() if key not in _OF_IMAGES}
    theta = given.pop("rope_theta", family.absent["rope_theta"])
    rope = ROPE_OFF | {"rope_theta": theta}
    rope["rotary_dims"] = _rotary_dims(config, given, family, settings, problems)
    rope |= _read_scaling(config, family, given, problems)
    if family.local_rope is not None:
        rope["local_rope_theta"] = _read_local(config, of_local, family, theta, problems)
    for name, value in rope.items():
        if name.endswith(("theta", "factor", "length")) and not _is_number(value):
            problems.append(f"{name} must be a number, got {value!r}")
    return rope


def _read_scaling(config: Json, family: Family, given: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """The settings of the scaling with the keys `given`."""
    kind = given.pop("rope_type", given.pop("type", "default"))  # the current name and the oldest one
    kind = _OLD_KINDS.get(str(kind), str(kind))
    if kind not in _KINDS:
        problems.append(f"rope_scaling must be of type {', '.join(_KINDS)}, got {kind!r}")
        return {}
    if kind in ("yarn", "longrope"):
        given = {key: value for key, value in given.items() if value is not None}
    if kind == "longrope" and config.get("original_max_position_embeddings") is not None:
        given["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    required, optional = _keys_of(kind, family)
    if not required.keys() <= given.keys() <= (required | optional).keys():
        rest = f" and may have {sorted(optional)}" if optional else ""
        problems.append(f"rope_scaling of type {kind} must have the keys {sorted(required)}{rest}, got {sorted(given)}")
        return {}
    if kind == "default":
        return {}
    scaling: dict[str, Any] = {"rope_kind": kind} | (_OF_PAPER if kind == "yarn" else {})
    scaling |= {name: given[key] for key, name in (required | optional).items() if key in given}
    if not isinstance(scaling.get("rope_truncate", True), bool):
        problems.append(f"truncate must be of type bool, got {scaling['rope_truncate']!r}")
    if kind == "longrope":
        for key, name in _LONGROPE.items():
            if not isinstance(given[key], list) or not all(map(_is_number, given[key])):
                problems.append(f"{key} must be a list of numbers, got {given[key]!r}")
            else:
                scaling[name] = tuple(map(float, given[key]))
        longest, original = config.get("max_position_embeddings"), scaling["rope_original_length"]
        if "rope_factor" not in scaling and _is_number(longest) and _is_number(original) and original > 0:
            scaling["rope_factor"] = max(1.0, longest / original)
    return scaling


def _read_local(config: Json, given: Json | None, family: Family, theta: object, problems: list[str]) -> object:
    """The rotary base of local layers, which have no scaling."""
    given = dict(given or {})
    if (kind := given.pop("rope_type", "default")) != "default":
        problems.append(f"rope_parameters of {_LOCAL} must be of type default, got {kind!r}")
    default = _LOCAL_THETA if family.local_rope else theta
    return given.pop("rope_theta", None) or config.get(family.local_rope or "", default)


def _rotary_dims(config: Json, given: dict[str, Any], family: Family, settings: Json, problems: list[str]) -> int:
    factors = [given.pop("partial_rotary_factor", None), config.get("partial_rotary_factor")]
    factor = next((factor for factor in factors if factor is not None), family.rotary or 1.0)
    head_dim = settings["head_dim"]
    if family.is_latent and factor == 1:
        return settings["rotary_dims"]
    if not family.rotary and factor != 1.0:
        problems.append(f"partial_rotary_factor must be 1.0, got {factor!r}")
    if not _is_number(factor) or not 0 < factor <= 1 or type(head_dim) is not int:
        problems.append(f"partial_rotary_factor must be a number from 0 to 1, got {factor!r}")
        return 0
    dims = int(head_dim * factor)
    return 0 if dims == head_dim else dims


def rope_keys(family: Family, settings: Json) -> dict[str, Any]:
    """The keys of config.json for these settings; also the longest sequence, if there is a scaling."""
    keys = _shared_keys(family, settings)
    local = settings["local_rope_theta"]
    if family.local_rope != "" or local in (0, settings["rope_theta"]):
        return keys
    # The base of local layers has no separate key in this family.
    of_global = {"rope_type": "default", "rope_theta": keys.pop("rope_theta"), **keys.pop("rope_scaling", {})}
    of_local = {"rope_type": "default", "rope_theta": local}
    return keys | {"rope_parameters": {_GLOBAL: of_global, _LOCAL: of_local}}


def _shared_keys(family: Family, settings: Json) -> dict[str, Any]:
    keys: dict[str, object] = {"rope_theta": settings["rope_theta"]}
    if family.local_rope:
        keys[family.local_rope] = settings["local_rope_theta"] or settings["rope_theta"]
    if family.rotary:
        keys["partial_rotary_factor"] = (settings["rotary_dims"] or settings["head_dim"]) / settings["head_dim"]
    kind = settings["rope_kind"]
    if settings["rope_factor"] == 1 and kind != "longrope":
        return keys | ({"rope_scaling": {"rope_type": "default"}} if "rope_scaling" in family.absent else {})
    required, optional = _keys_of(kind, family)
    values = {key: settings[name] for key, name in (required | optional).items()}
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    values = {key: value for key, value in values.items() if value or key not in {*_ATTENTION_FACTOR, *_MSCALES}}
    keys["rope_scaling"] = {"rope_type": kind} | values
    if kind == "longrope":
        keys |= {key: values[key] for key in _LENGTH}
    if kind != "linear":
        keys["max_position_embeddings"] = int(settings["rope_factor"] * settings["rope_original_length"])
    return keys


def _keys_of(kind: str, family: Family) -> tuple[dict[str, str], dict[str, str]]:
    """The required and the optional keys of a kind of scaling."""
    required, optional = _KINDS[kind]
    return required, {key: name for key, name in optional.items() if family.is_latent or key not in _MSCALES}


def parsed_factors(settings: Json) -> dict[str, tuple[float, ...]]:
    """The factors of longrope in settings that may be text: 1.0,1.5."""
    factors = {name: settings[name] for name in _LONGROPE.values()}
    return {
        name: tuple(map(float, filter(None, str(value).split(",")))) if isinstance(value, str | float) else tuple(value)
        for name, value in factors.items()
    }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
