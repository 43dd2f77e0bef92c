"""The metadata saved with every checkpoint, and its comparison with the settings of a run that resumes."""

import dataclasses
import importlib.metadata
import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flax_mesh.axes import dims_text
from flax_mesh.checkpoint.checkpointer import arrays_on_disk
from flax_mesh.checkpoint.read import is_number, mesh_of, read_metadata, read_record
from flax_mesh.errors import CheckpointCorruptedError, ConfigError
from flax_mesh.sharding import sharding_fingerprint
from flax_mesh.sharding.rules import PartitionRules
from flax_mesh.text import mesh_text
from flax_mesh.train.build import TrainProgram
from flax_mesh.train.config import TrainConfig
from flax_mesh.train.data.iterators import is_state
from flax_mesh.train.data.run_data import RunData
from flax_mesh.train.metrics import Row
from flax_mesh.train.overrides import Change, changes, complete_settings, to_texts

FORMAT = 1
PACKAGES = ("flax-mesh", "jax", "flax", "optax", "orbax-checkpoint", "numpy")
AVERAGE_DECAY = "optimizer.ema"  # the average is divided by 1 - decay^updates, so one decay must be that of all updates


def run_record(recipe: str, program: TrainProgram, data: RunData) -> dict[str, Any]:
    """The metadata of a run's checkpoints as JSON, with the fields that depend on the step filled in for step 0."""
    state = program.layout.to_nnx()
    return {
        "format": FORMAT,
        "step": 0,
        "recipe": recipe,
        "config": to_texts(program.config),
        **layout_record(program.mesh.shape, program.rules, layout_of(state, program.rules.layers)),
        "sharding": sharding_fingerprint(state),
        "data": data.record(0),
        "metrics": {},
        "versions": versions(),
    }


def step_record(run: Mapping[str, Any], step: int, row: Row, check: Mapping[str, Any], data: RunData) -> dict[str, Any]:
    """The metadata of one checkpoint, with the fields `check` of a StepCheck."""
    metrics = {name: value for name, value in row.items() if isinstance(value, int | float)}
    return {**run, "step": step, "data": data.record(step), "metrics": metrics, **check}


def saved_record(step: Path) -> dict[str, Any]:
    """The metadata of a checkpoint saved by any version, with all settings under their current names.

    A checkpoint that no run has saved has no settings.
    """
    record = read_record(step)
    return record | {"config": complete_settings(record["config"]) if record["config"] else {}}


def run_metadata(step: Path) -> dict[str, Any]:
    """The metadata of a checkpoint that a run resumes from.

    Raises ConfigError if no run has saved it, and CheckpointCorruptedError if a field is not what runs write.
    """
    record = read_metadata(step)
    if "config" not in record:
        raise ConfigError(
            f"{step} was not saved by a run (its metadata has no settings), so that no run can resume from it. Use "
            f"another run.folder, and checkpoint.start_from={step} to start from its parameters."
        )
    problems = [
        f"  {name} must be {what}, got {reprlib.repr(record.get(name))}"
        for name, (what, is_valid) in RUN_FIELDS.items()
        if not is_valid(record.get(name))
    ]
    if problems:
        raise CheckpointCorruptedError([f"{step}: its metadata is not that of a run:", *problems])
    return record


def _is_table(value: Any, kind: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, kind) for item in value.values())


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_rows(value: Any) -> bool:
    rows = value if isinstance(value, list) else [None]
    return all(isinstance(row, list) and len(row) == 3 and all(map(is_number, row)) for row in rows)


# Fields of the metadata that a resumed run uses -> what they must be, and whether a value is.
RUN_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "step": ("the number of the step", _is_count),
    "config": ("settings as text", lambda value: _is_table(value, str)),
    "data": (
        "an object with content_hash and, of an iterator, its state",
        lambda value: (
            _is_table(value, object) and _is_text(value, "content_hash") and is_state(value.get("state", {"json": 0}))
        ),
    ),
    "mesh": ("an object", lambda value: _is_table(value, list)),
    "layout": ("an object of text", lambda value: value is None or _is_table(value, str)),
    "metrics": (
        "an object of numbers",
        lambda value: _is_table(value, int | float | None) and _is_count(value.get("skipped", 0)),
    ),
    "recent": ("a list of (step, loss, gradient norm)", lambda value: value is None or _is_rows(value)),
}


def _is_text(value: dict[str, Any], name: str) -> bool:
    return isinstance(value.get(name), str)


def layout_record(sizes: Mapping[str, int], rules: PartitionRules, layout: Mapping[str, str]) -> dict[str, Any]:
    """The layout of a checkpoint as JSON. Tuples are converted to lists, so that it equals what is read back."""
    found = {
        "mesh": {"axis_names": list(sizes), "shape": list(sizes.values())},
        "axes": {field.name: getattr(rules.axes, field.name) for field in dataclasses.fields(rules.axes)},
        "rules": [[pattern, str(dims)] for pattern, dims in rules.table],
        "layout": dict(layout),
    }
    return json.loads(json.dumps(found, default=dict))


def versions() -> dict[str, str]:
    return {name: _version(name) for name in PACKAGES}


STORED_REPLICATED = "whole"  # since the first version: records of different versions are compared as text


def layout_of(state: Any, layers: Sequence[str]) -> dict[str, str]:
    """Path on disk -> the mesh axes of every dim, as "fsdp+dp, -, tp", or STORED_REPLICATED."""
    specs = {path: leaf.sharding.spec for path, leaf in arrays_on_disk(state, layers).items()}
    return {path: dims_text(spec) if any(spec) else STORED_REPLICATED for path, spec in specs.items()}


def check_resume(
    saved: Mapping[str, Any], now: Mapping[str, Any], config: TrainConfig, *, allow_changes: bool
) -> list[Change]:
    """List the settings that changed since the checkpoint was saved.

    Raises ConfigError if one of them changes the result, unless `allow_changes`, and always if AVERAGE_DECAY changed.
    """
    found = changes(saved["config"], config)
    before, after = saved["data"]["content_hash"], now["data"]["content_hash"]
    if before != after:
        found.append(Change(now["data"]["name"], before[:12], after[:12], True))
    if ("state" in saved["data"]) != ("state" in now["data"]):
        before, after = ("present" if "state" in record["data"] else "(absent)" for record in (saved, now))
        found.append(Change("state of the iterator of make_batches", before, after, True))
    refused = [one for one in found if one.changes_result and (not allow_changes or one.key == AVERAGE_DECAY)]
    if refused:
        if any(one.key == AVERAGE_DECAY for one in refused):
            repair = (
                "Restore these settings, or start a new run (--restart, or another run.folder); --allow-changes does "
                f"not accept another {AVERAGE_DECAY}, because the stored average needs one decay for all updates."
            )
        else:
            repair = (
                "Restore these settings, start a new run (--restart, or another run.folder), or resume with them by "
                "--allow-changes."
            )
        raise ConfigError(
            [
                f"the checkpoint of step {saved['step']} was saved with different settings:",
                *(f"  {change}" for change in refused),
                f"  {repair}",
            ]
        )
    return found


def layout_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line if the mesh changed, and one for every array that is split over other axes than in the checkpoint."""
    before, after = mesh_of(saved), mesh_of(now)
    lines = [f"mesh {mesh_text(before)} -> {mesh_text(after)}"] if before != after else []
    old = saved.get("layout", {})
    return lines + [
        f"{path}: {old[path]} -> {spec}" for path, spec in now["layout"].items() if old.get(path, spec) != spec
    ]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "not installed"
