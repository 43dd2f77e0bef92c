"""The kinds of layers in config.json: windows by layer, and layers without rotary positions.

The setting `layer_pattern` has them as text, `local:5,global`; see `flax_mesh.models.settings.pattern`.
"""

from collections.abc import Sequence
from itertools import groupby

from flax_mesh.checkpoint.hf.family import FIRST_WITH_WINDOW, USE_WINDOW, WINDOW, Family, Json
from flax_mesh.text import shown

_NAMES = {"full_attention": "global", "attention": "global", "sliding_attention": "local", "linear_attention": "delta"}
_ROPE_LAYERS, _ROPE_INTERVAL, _PATTERN, _POSITIONS = (
    *("no_rope_layers", "no_rope_layer_interval", "sliding_window_pattern"),
    "position_embedding_type",
)
_NOPE, _GEMMA, _ALL, DELTA = "global:3,global_nope", "local:5,global", "global", "delta:3,global"
_DELTA_INTERVAL = "full_attention_interval"
# `Family.layers` -> the keys that are read here, the kinds of its layers, and whether they may differ.
_FAMILIES: dict[str, tuple[set[str], set[str], bool]] = {
    "": (set(), {"global"}, False),
    WINDOW: (set(), {"global", "local"}, False),
    USE_WINDOW: ({USE_WINDOW}, {"global", "local"}, True),
    _ALL: ({_POSITIONS}, {"global", "global_nope"}, False),
    _NOPE: ({_ROPE_LAYERS, _ROPE_INTERVAL}, {"global", "global_nope"}, True),
    _GEMMA: ({_PATTERN, f"_{_PATTERN}"}, {"global", "local"}, True),
    DELTA: ({_DELTA_INTERVAL}, {"global", "delta"}, True),
}


def layer_key_names(family: Family) -> set[str]:
    return _of(family)[0] | {"layer_types"}


def _of(family: Family) -> tuple[set[str], set[str], bool]:
    return _FAMILIES.get(family.layers, (set(), {"global", "local"}, True))


def read_layers(config: Json, family: Family, num_layers: object, problems: list[str]) -> dict[str, object]:
    """`sliding_window` and `layer_pattern`; without a pattern all layers have the window, or with the window 0 none."""
    count = num_layers if type(num_layers) is int and 0 < num_layers <= 100_000 else 0
    if not count:  # refused elsewhere
        return {WINDOW: 0, "layer_pattern": ""}
    size = config.get(WINDOW, family.absent.get(WINDOW))
    kinds = _default_kinds(config, family, count, size, problems)
    if layer_types := config.get("layer_types"):
        is_list = isinstance(layer_types, list) and all(str(name) in _NAMES for name in layer_types)
        if not is_list or len(layer_types) != count:
            text = f"must be {count} of {', '.join(_NAMES)}"
            problems.append(f"layer_types {text}, got {shown(layer_types)}")
        elif not _of(family)[2] and [_NAMES[x] for x in layer_types] != [kind.removesuffix("_nope") for kind in kinds]:
            problems.append(f"layer_types must all be {'sliding' if 'local' in kinds else 'full'}_attention")
        else:
            nope = ["_nope" if kind.endswith("_nope") else "" for kind in kinds]
            kinds = [_NAMES[name] + end for name, end in zip(layer_types, nope, strict=True)]
    if wrong := sorted(set(kinds) - _of(family)[1]):
        problems.append(f"layer_types has {', '.join(wrong)} layers, which this family lacks")
    if family.layers == DELTA and len(set(kinds)) == 1:
        problems.append("layer_types must have layers of both kinds, linear_attention and full_attention")
    if "local" in kinds and (type(size) is not int or size < 1):
        problems.append(f"{WINDOW} must be a positive integer or null, got {size!r}")
    if set(kinds) <= {"global"} or set(kinds) == {"local"}:
        return {WINDOW: size if "local" in kinds else 0, "layer_pattern": ""}
    return {WINDOW: size if "local" in kinds else 0, "layer_pattern": pattern_of(kinds)}


def _default_kinds(config: Json, family: Family, count: int, size: object, problems: list[str]) -> list[str]:
    """The kinds where config.json has no `layer_types`."""
    if family.layers in ("", WINDOW):
        return [("local" if family.layers and size is not None else "global")] * count
    if family.layers == USE_WINDOW:
        first = (
            config.get(FIRST_WITH_WINDOW, 28) if config.get(USE_WINDOW, False) is True and size is not None else count
        )
        if type(first) is not int or first < 0:
            problems.append(f"{FIRST_WITH_WINDOW} must be an integer from 0, got {first!r}")
            first = count
        return ["local" if i >= first else "global" for i in range(count)]
    if family.layers == _ALL:
        return ["global" if config.get(_POSITIONS) == "rope" else "global_nope"] * count
    if family.layers == _NOPE:
        return _nope_kinds(config, count, problems)
    if family.layers == DELTA:
        return _with_global("delta", _period(config, 4, problems, _DELTA_INTERVAL), count)
    if family.layers == _GEMMA:
        kinds = _with_global("local", _period(config, 6, problems, _PATTERN, f"_{_PATTERN}"), count)
    else:
        kinds = kinds_of(family.layers, count)
    return kinds if size is not None else ["global"] * count


def _period(config: Json, default: int, problems: list[str], *keys: str) -> int:
    """The value of the first of these keys that config.json has, a positive integer."""
    period = next((config[key] for key in keys if key in config), default)
    if type(period) is int and period > 0:
        return period
    problems.append(f"{keys[0]} must be a positive integer, got {period!r}")
    return default


def _with_global(other: str, period: int, count: int) -> list[str]:
    """The last layer of every period is global."""
    return [other if (i + 1) % period else "global" for i in range(count)]


def _nope_kinds(config: Json, count: int, problems: list[str]) -> list[str]:
    interval = _period(config, 4, problems, _ROPE_INTERVAL)
    rope = config.get(_ROPE_LAYERS)
    rope = [int((i + 1) % interval != 0) for i in range(count)] if rope is None else rope
    if not isinstance(rope, list) or len(rope) != count or not all(x in (0, 1) for x in rope):
        problems.append(f"{_ROPE_LAYERS} must be {count} of 0 and 1, got {shown(rope)}")
        return ["global"] * count
    return ["global" if has else "global_nope" for has in rope]


def layer_keys(family: Family, settings: Json) -> dict[str, object]:
    """The keys of config.json for the layers of these settings."""
    kinds, window = settings_kinds(settings), settings[WINDOW]
    if family.layers == "":
        return {}
    if family.layers == WINDOW:
        return {WINDOW: window or None}
    written = {"local": "sliding_attention", "delta": "linear_attention"}
    names = [written.get(kind.removesuffix("_nope"), "full_attention") for kind in kinds]
    if family.layers == USE_WINDOW:
        first = next((i for i, kind in enumerate(kinds) if kind == "local"), len(kinds))
        is_simple = kinds == ["global"] * first + ["local"] * (len(kinds) - first)
        keys: dict[str, object] = {USE_WINDOW: window > 0}
        keys |= {WINDOW: window, FIRST_WITH_WINDOW: first} if window else {}
        return keys if is_simple else keys | {"layer_types": names}
    if family.layers == _ALL:
        # transformers checks that the heads of Mamba layers divide the hidden size, also where there are none.
        positions = "rope" if kinds[0] == "global" else "nope"
        return {"layer_types": ["attention"] * len(kinds), _POSITIONS: positions, "mamba_n_heads": 1}
    if family.layers == _NOPE:
        return {_ROPE_LAYERS: [int(kind == "global") for kind in kinds], "layer_types": names}
    return {"layer_types": names} if family.layers == DELTA else {WINDOW: window or None, "layer_types": names}


def layer_difference(family: Family, settings: Json) -> str:
    """The part of these settings that models of a family cannot have, "" if they can have all."""
    kinds = set(settings_kinds(settings))
    _, allowed, may_differ = _of(family)
    if kinds <= allowed and (may_differ or len(kinds) == 1) and ("delta" in kinds) == (family.layers == DELTA):
        return ""
    return f"layer_pattern={settings['layer_pattern']!r} sliding_window={settings[WINDOW]}"


def settings_kinds(settings: Json) -> list[str]:
    """The kind of every layer."""
    pattern = settings["layer_pattern"] or ("local" if settings[WINDOW] else "global")
    return kinds_of(pattern, settings["num_layers"])


def kinds_of(pattern: str, count: int) -> list[str]:
    """The kinds of so many layers."""
    parts = [part.strip().partition(":") for part in pattern.split(",")]
    kinds = [kind for kind, _, number in parts for _ in range(int(number or 1))]
    return [kinds[i % len(kinds)] for i in range(count)]


def pattern_of(kinds: Sequence[str]) -> str:
    """The shortest pattern of these layers; with delta layers one whose last repetition is complete."""
    sizes = [size for size in range(1, len(kinds) + 1) if "delta" not in kinds or len(kinds) % size == 0]
    period = next(size for size in sizes if all(kind == kinds[i % size] for i, kind in enumerate(kinds)))
    runs = [(kind, len(list(run))) for kind, run in groupby(kinds[:period])]
    return ",".join(f"{kind}:{count}" if count > 1 else kind for kind, count in runs)
