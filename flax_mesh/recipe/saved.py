"""The records of runs in the metadata of their checkpoints, as they are read back."""

import dataclasses
import json
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import Any, cast

from flax_mesh.axes import dims_text
from flax_mesh.blockwise.transform import FORMS
from flax_mesh.checkpoint.checksums import read_metadata
from flax_mesh.checkpoint.diff import read_batch
from flax_mesh.checkpoint.find import CHECKPOINTS, committed_steps
from flax_mesh.checkpoint.layout import arrays_on_disk
from flax_mesh.checkpoint.read import Array, is_number, read_record
from flax_mesh.data.run_data import TEXT
from flax_mesh.data.user_batches import is_hashes, is_state
from flax_mesh.errors import CheckpointCorruptedError, ConfigError
from flax_mesh.fields import field_types, parse_value
from flax_mesh.lora.config import LoraConfig
from flax_mesh.recipe.config import RunConfig
from flax_mesh.recipe.optimizers.average import AVERAGE, COUNT, average_factor
from flax_mesh.recipe.overrides import complete_settings
from flax_mesh.sharding.rules import PartitionRules
from flax_mesh.store import stored_path
from flax_mesh.text import version_of
from flax_mesh.tree import PyTree

FORMAT = 1
PACKAGES = ("flax-mesh", "jax", "flax", "optax", "orbax-checkpoint", "numpy")


def saved_record(step: Path) -> dict[str, Any]:
    """The metadata of a checkpoint saved by any version, with all settings under their current names.

    A checkpoint that no run has saved has no settings.
    """
    record = read_record(step)
    return record | {"config": complete_settings(record["config"]) if record["config"] else {}}


def run_metadata(step: Path) -> dict[str, Any]:
    """The metadata of a checkpoint that a run resumes from.

    Raises ConfigError if no run has saved it, and CheckpointCorruptedError if a field differs from the fields that runs
    write.
    """
    record = read_metadata(step)
    if "config" not in record:
        raise ConfigError(
            f"{step} was not saved by a run (its metadata has no settings), so that no run can resume from it. Use "
            f"another run.folder, and checkpoint.start_from={step} to start from its parameters."
        )
    problems = [
        f"{name} must be {what}, got {reprlib.repr(record.get(name))}"
        for name, (what, is_valid) in RUN_FIELDS.items()
        if not is_valid(record.get(name))
    ]
    if problems:
        raise CheckpointCorruptedError(problems, head=f"{step}: its metadata was not written by a run:")
    return record


def saved_attention(run: RunConfig) -> tuple[str, ...]:
    """The forms of the attentions of the run in `run.folder`; () for a new run, and unless `run.attention` is auto."""
    folder, steps = stored_path(run.folder) / CHECKPOINTS, list[int]()
    with suppress(ConfigError):  # here and below: a run that resumes reports it, and reads an earlier step
        steps = committed_steps(folder)
    for step in reversed(steps):
        with suppress(ConfigError):
            record = read_record(folder / str(step))
            forms, before = record.get("attention"), complete_settings(record["config"])["run.attention"]
            is_valid = isinstance(forms, list) and all(x in [*FORMS] for x in cast(list[object], forms))
            return tuple(cast(list[str], forms)) if is_valid and before == run.attention == "auto" else ()
    return ()


def saved_lora(record: Mapping[str, Any]) -> LoraConfig:
    """The settings lora.* in the metadata of a checkpoint. CheckpointCorruptedError if a value is none."""
    texts = {name: record["config"].get(f"lora.{name}") for name in vars(LoraConfig())}
    kinds = field_types(LoraConfig())
    try:
        return LoraConfig(**{name: parse_value(str(x), kinds[name]) for name, x in texts.items() if x is not None})
    except ValueError as error:
        raise CheckpointCorruptedError(f"settings lora.* in the metadata of the checkpoint: {error}") from error


def sequence_length(record: Mapping[str, Any]) -> int | None:
    """The setting data.sequence_length in the metadata of a checkpoint, None if it is not such a number."""
    text = str(record["config"].get("data.sequence_length"))
    return int(text) if re.fullmatch(r"[0-9]{1,10}", text) and 0 < int(text) < 2**31 else None


def is_trained_on_text(record: Mapping[str, Any]) -> bool:
    """Whether the data of a run were text, one token per byte.

    Runs of version 0.1.0 recorded only a description for people, whose units distinguish text from files of tokens.
    """
    data = record.get("data", {})
    if "kind" in data:
        return data["kind"] == TEXT
    return re.search(r": [0-9,]+ files?, [0-9,]+ bytes; ", str(data.get("description", ""))) is not None


def _is_table(value: object, kind: type | UnionType) -> bool:
    return isinstance(value, dict) and all(isinstance(item, kind) for item in cast(dict[str, object], value).values())


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_rows(value: object) -> bool:
    rows = cast(list[object], value) if isinstance(value, list) else [None]
    return all(isinstance(row, list) and len(cast(list[object], row)) == 3 for row in rows) and all(
        is_number(x) for row in cast(list[list[object]], rows) for x in row
    )


def _is_data(value: object) -> bool:
    data = cast(dict[str, object], value) if isinstance(value, dict) else {}
    is_last_batch = _has_state(data.get("last_batch", {"checksum": ""}), "checksum")
    return _has_state(data, "content_hash") and is_last_batch and is_hashes(data.get("rows", ""))


def _has_state(value: object, checksum: str) -> bool:
    """Whether a record has a checksum and, of an iterator, its state."""
    record = cast(dict[str, object], value) if isinstance(value, dict) else {}
    return isinstance(record.get(checksum), str) and is_state(record.get("state", {"json": 0}))


# Fields of the metadata that a resumed run uses -> the requirement as text, and as a function of the value.
RUN_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "step": ("the number of the step", _is_count),
    "config": ("settings as text", lambda value: _is_table(value, str)),
    "data": (
        "an object with content_hash, the checksum of the last batch and, of an iterator, its states",
        _is_data,
    ),
    "mesh": ("an object", lambda value: _is_table(value, list)),
    "layout": ("an object of text", lambda value: value is None or _is_table(value, str)),
    "metrics": (
        "an object of numbers",
        lambda value: _is_table(value, int | float | None) and _is_count(value.get("skipped", 0)),
    ),
    "recent": ("a list of (step, loss, gradient norm)", lambda value: value is None or _is_rows(value)),
}


def versions() -> dict[str, str]:
    return {name: version_of(name) for name in PACKAGES}


def averages(step: Path, arrays: Mapping[str, Array], record: Mapping[str, Any]) -> dict[str, tuple[Array, float]]:
    """Path of a parameter -> its moving average and the factor of the average; {} before the first update."""
    stored = {match[1]: array for path, array in arrays.items() if (match := AVERAGE.fullmatch(path))}
    counts = [array for path, array in arrays.items() if COUNT.fullmatch(path)]
    if not stored or len(counts) != 1:
        return {}
    (steps,) = read_batch(step, counts).values()
    decay = parse_value(str(record["config"].get("optimizer.ema")), float | str)
    if not isinstance(decay, float) or not 0 < decay < 1:
        raise CheckpointCorruptedError(
            f"{step}: optimizer.ema in its metadata must be above 0 and below 1, got {decay}"
        )
    return {path: (array, average_factor(decay, int(steps))) for path, array in stored.items()} if steps > 0 else {}


def layout_record(sizes: Mapping[str, int], rules: PartitionRules, layout: Mapping[str, str]) -> dict[str, Any]:
    """The layout of a checkpoint as JSON. Tuples become lists, so that it equals the JSON that is read back."""
    record = {
        "mesh": {"axis_names": list(sizes), "shape": list(sizes.values())},
        "axes": {field.name: getattr(rules.axes, field.name) for field in dataclasses.fields(rules.axes)},
        "rules": [[pattern, str(dims)] for pattern, dims in rules.table],
        "layout": dict(layout),
    }
    return json.loads(json.dumps(record, default=dict))


STORED_REPLICATED = "whole"  # since the first version: records of different versions are compared as text


def layout_of(state: PyTree, layers: Sequence[str]) -> dict[str, str]:
    """Path on disk -> the mesh axes of every dim, as "fsdp+dp, -, tp", or STORED_REPLICATED."""
    specs = {path: leaf.sharding.spec for path, leaf in arrays_on_disk(state, layers).items()}
    return {path: dims_text(spec) if any(spec) else STORED_REPLICATED for path, spec in specs.items()}
