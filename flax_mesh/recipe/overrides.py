"""The text form of a config: `section.key=value`, as used on the command line, in files and in checkpoints."""

import dataclasses
import difflib
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from flax_mesh.data.config import ChatConfig
from flax_mesh.errors import ConfigError
from flax_mesh.fields import check_types, field_types, has_text, parse_value, read_file, type_problems, value_to_text
from flax_mesh.recipe.config import SECTIONS, TrainConfig
from flax_mesh.store import DATASET, MODEL, StorePath, stored_path, with_commit
from flax_mesh.text import grouped
from flax_mesh.user_code import check_arguments, place_of, user_code

_ADAPTED = "(attention|delta)/(q|k|v|o|(q|kv)_(down|up))/kernel"
# Names and values of the first version: old name -> (current name, {old value: current value} if values were renamed
# too). They are accepted wherever settings are parsed from text, and never written.
RENAMED: dict[str, tuple[str, dict[str, str]]] = {
    "pipeline.microbatches": ("pipeline.num_microbatches", {}),
    "pipeline.virtual": ("pipeline.num_virtual_stages", {}),
    "pipeline.residuals": ("pipeline.remat", {"store": "none", "lean": "cheap", "recompute": "full"}),
    # The same names; only values changed.
    "pipeline.transport": ("pipeline.transport", {"native": "ordered"}),
    "lora.modules": (
        "lora.modules",
        {f"attention/({x})/kernel": _ADAPTED for x in ("q|k|v|o", "q|k|v|o|(q|kv)_(down|up)")},
    ),
}


OF_HUB = "of_hub"  # metadata of a field that may be an id: "model" or "dataset"
RECORDED = "config.txt"  # in a run folder: the lines of `to_lines`
_Text = typing.TypeVar("_Text", str, object)  # of metadata, whose values may be of any type


class Setting(typing.NamedTuple):
    """The value of a field, its annotation, and whether another value changes the result of the run."""

    value: object
    annotation: object
    changes_result: bool


def flat_fields(config: TrainConfig) -> dict[str, Setting]:
    """ "section.key" -> Setting."""
    sections = {name: getattr(config, name) for name in SECTIONS}
    trees = [_flatten(node, name, True) for name, node in sections.items() if dataclasses.is_dataclass(node)]
    return {key: field for tree in trees for key, field in tree.items()}


def to_lines(config: TrainConfig) -> list[str]:
    """The complete config, one `section.key=value` per line, as `apply_overrides` accepts them."""
    return [f"{key}={text}" for key, text in to_texts(config).items()]


def to_texts(config: TrainConfig) -> dict[str, str]:
    """ "section.key" -> text of the value, as saved in the metadata of a checkpoint."""
    return {key: value_to_text(field.value) for key, field in flat_fields(config).items()}


@check_types
def apply_overrides(config: TrainConfig, overrides: Iterable[str]) -> TrainConfig:
    """Return `config` with `section.key=value` strings applied, and with the model of `model_from`.

    Raises one ConfigError with a line for every unknown or repeated setting and for every value of the wrong type.

    Example:
        >>> from flax_mesh.train import apply_overrides, load_recipe
        >>> apply_overrides(load_recipe("recipes/tiny.py"), ["mesh.shape=fsdp:8"]).mesh.shape
        'fsdp:8'
    """
    changed, problems = read_overrides(config, overrides)
    if problems:
        raise ConfigError(problems)
    return changed


def read_overrides(config: TrainConfig, overrides: Iterable[str]) -> tuple[TrainConfig, list[str]]:
    """`config` with the valid `section.key=value` strings applied, and one line for each invalid one.

    If they set `checkpoint.start_from`, strings for `model` are applied to the model that `model_from` returns.
    """
    given, make = list(overrides), config.model_from
    changed, problems = _apply(config, given)
    changed = with_commits(changed)
    if make is None or "checkpoint.start_from" not in map(setting_of, given):
        return changed, problems
    check_arguments("model_from", make, "model", "folder")
    with user_code("model_from", place_of(make)):
        model = make(config.model, changed.checkpoint.start_from)
    changed, problems = _apply(replace(config, model=model), given)
    return with_commits(changed), problems


def with_commits(config: TrainConfig) -> TrainConfig:
    """`config` with the commits of its ids of the hub: those that its run folder began with, if any.

    They are `checkpoint.start_from`, the `data.source` of chats, and fields of a loss with the metadata `of_hub`.
    """
    names = {
        "checkpoint": {"start_from": MODEL},
        "data": {"source": DATASET} if isinstance(config.data, ChatConfig) else {},
    }
    if dataclasses.is_dataclass(loss := config.loss_fn):
        names["loss_fn"] = {x.name: x.metadata[OF_HUB] for x in dataclasses.fields(loss) if OF_HUB in x.metadata}
    sections = {name: getattr(config, name) for name, fields in names.items() if fields}
    if any(map(type_problems, (*sections.values(), config.run))):
        return config
    given = {(name, field): getattr(sections[name], field) for name in sections for field in names[name]}
    if not any(given.values()):
        return config
    earlier: dict[str, str] = {}
    with suppress(OSError, ConfigError):
        path = stored_path(config.run.folder) / RECORDED
        content = path.read_bytes() if isinstance(path, StorePath) else read_file(path)
        lines = content.decode(errors="replace").splitlines()
        earlier = {name: value for name, _, value in (line.partition("=") for line in lines)}
    for (name, field), value in given.items():
        pinned = with_commit(value, earlier.get(f"{name}.{field}", ""), names[name][field])
        if pinned != value:
            sections[name] = replace(sections[name], **{field: pinned})
    return replace(config, **sections)


def _apply(config: TrainConfig, overrides: Sequence[str]) -> tuple[TrainConfig, list[str]]:
    fields = flat_fields(config)
    sections = [key.partition(".")[0] for key in fields]
    values: dict[str, object] = {}
    problems: list[str] = []
    for text in overrides:
        given, equals, value = text.partition("=")
        key, renamed_values = RENAMED.get(given, (given, {}))
        if re.search("[\ud800-\udfff]", text):  # how Python reads other bytes on the command line
            problems.append(f"{text!r} is not UTF-8, in which settings are saved; use other characters")
        elif not equals:
            problems.append(f"{text!r} is not an override; write section.key=value, such as run.steps=20")
        elif key not in fields:
            near = _nearest(key, fields)
            hint = f"; did you mean {near}?" if near else f"; sections are {', '.join(dict.fromkeys(sections))}"
            problems.append(f"{key} is not a setting{hint}")
        elif key in values:
            problems.append(f"{key} is set twice" + (f", once under its old name {given}" if given != key else ""))
        elif key != given and renamed_values and value not in renamed_values:
            old, current = ", ".join(renamed_values), ", ".join(renamed_values.values())
            problems.append(f"{given} must be one of {old}, got {value!r}; its current name is {key}, one of {current}")
        else:
            try:
                values[key] = parse_value(renamed_values.get(value, value), fields[key].annotation)
            except ValueError as error:
                problems.append(f"{given} must be {error}, got {value!r}")
    for keys in grouped(values, lambda key: key.partition(".")[0]).values():
        try:
            config = _replace(config, {key: values[key] for key in keys})
        except (TypeError, ValueError) as error:  # raised by a __post_init__ of the section
            problems.append(f"{', '.join(keys)}: {error}")
    return config, problems


def _nearest(key: str, fields: Iterable[str]) -> str | None:
    """The setting that an unknown name probably means: by its last part, by its initials (lr), or by its letters."""
    last = key.rpartition(".")[2]
    shorts = {name: name.rpartition(".")[2] for name in fields}
    same = [name for name, short in shorts.items() if last == short]
    initials = [name for name, short in shorts.items() if last == "".join(word[:1] for word in short.split("_"))]
    names = same or initials
    return max(
        names or difflib.get_close_matches(key, shorts, n=1, cutoff=0.5),
        key=lambda name: difflib.SequenceMatcher(None, key, name).ratio(),
        default=None,
    )


def setting_of(text: str) -> str:
    """The current name of the setting in `section.key=value`."""
    key = text.partition("=")[0]
    return RENAMED[key][0] if key in RENAMED else key


def current_settings(saved: Mapping[str, _Text]) -> dict[str, _Text | str]:
    """Settings saved by any version, under their current names. Unknown values are returned unchanged."""
    settings: dict[str, _Text | str] = {}
    for key, value in saved.items():
        name, values = RENAMED.get(key, (key, {}))
        settings[name] = values.get(value, value) if isinstance(value, str) else value
    return settings


def default_settings() -> dict[str, str]:
    """The text of the default value of every setting that has one, except for the settings of the model."""
    sections = [(field.name, field.default) for field in dataclasses.fields(TrainConfig) if field.name in SECTIONS]
    trees = [_flatten(config, name, True) for name, config in sections if dataclasses.is_dataclass(config)]
    return {key: value_to_text(field.value) for tree in trees for key, field in tree.items()}


def default_texts(config: TrainConfig, section: str) -> dict[str, str]:
    """The text of the default value of every field of a section that has one; nested sections are left out."""
    node = getattr(config, section)
    fields = dataclasses.fields(node) if dataclasses.is_dataclass(node) else ()
    known = flat_fields(config)
    return {
        key: value_to_text(item.default)
        for item in fields
        if (key := f"{section}.{item.name}") in known and item.default is not dataclasses.MISSING
    }


def added_settings(config: TrainConfig) -> dict[str, str]:
    """The settings of the model that earlier versions of its config lacked (ADDED): those models had the default."""
    fields = dataclasses.fields(config.model) if dataclasses.is_dataclass(config.model) else ()
    added = {f"model.{item.name}" for item in fields if item.metadata.get("added")}
    return {key: text for key, text in default_texts(config, "model").items() if key in added}


def complete_settings(saved: Mapping[str, _Text]) -> dict[str, _Text | str]:
    """`current_settings`, with defaults for settings that did not exist yet when these were saved.

    The default of a setting that is added must therefore not change the numbers of a run whose numbers are finite, or
    have the value of these runs here, so that a resumed run names the change.
    """
    return {**default_settings(), "run.attention": "as_written", **current_settings(saved)}


class Change(typing.NamedTuple):
    """A setting whose value differs from the saved one."""

    key: str
    saved: str
    now: str
    changes_result: bool
    note: str = ""

    def __str__(self) -> str:
        note = "changes the result" if self.changes_result else self.note
        return f"{self.key}: {self.saved} -> {self.now}" + (f" ({note})" if note else "")


def changes(saved: Mapping[str, str], config: TrainConfig) -> list[Change]:
    """Differences between the settings saved with a checkpoint, by any version, and `config`."""
    if not any(key.startswith("loss_fn.") for key in saved):  # of a version without settings of a loss
        saved = default_texts(config, "loss_fn") | dict(saved)
    fields, now, saved = flat_fields(config), to_texts(config), added_settings(config) | complete_settings(saved)
    keys = [*now, *(key for key in saved if key not in now)]
    return [
        Change(key, saved.get(key, "(absent)"), now.get(key, "(absent)"), matters)
        for key in keys
        for matters in [key not in fields or fields[key].changes_result]
        if saved.get(key) != now.get(key)
    ]


def _flatten(section: Any, prefix: str, changes_result: bool) -> dict[str, Setting]:
    hints = field_types(section)
    fields: dict[str, Setting] = {}
    for item in dataclasses.fields(section):
        key, value = f"{prefix}.{item.name}", getattr(section, item.name)
        matters = changes_result and item.metadata.get("changes_result", True)
        if dataclasses.is_dataclass(value):
            fields |= _flatten(value, key, matters)
        elif has_text(hints[item.name]):  # other fields can be set by the recipe only
            fields[key] = Setting(value, hints[item.name], matters)
    return fields


def _replace(node: Any, values: Mapping[str, object]) -> Any:
    """Replace dotted keys in nested dataclasses.

    All fields of one dataclass are replaced in one call, so that its `__post_init__` checks them together.
    """
    direct: dict[str, object] = {}
    nested: dict[str, dict[str, object]] = {}
    for key, value in values.items():
        head, dot, rest = key.partition(".")
        if dot:
            nested.setdefault(head, {})[rest] = value
        else:
            direct[head] = value
    direct |= {head: _replace(getattr(node, head), inner) for head, inner in nested.items()}
    return dataclasses.replace(node, **direct)
