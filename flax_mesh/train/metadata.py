"""What is written beside the state in a checkpoint, and what of it has changed when a run goes on."""

import dataclasses
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from flax_mesh.axes import dims_text
from flax_mesh.checkpoint import arrays_on_disk
from flax_mesh.sharding import PartitionRules
from flax_mesh.text import mesh_text
from flax_mesh.train.config import TrainConfig, to_lines
from flax_mesh.train.data.data import Corpus
from flax_mesh.train.metrics import Row

FORMAT = 1
PACKAGES = ("flax-mesh", "jax", "flax", "optax", "orbax-checkpoint", "numpy")


def record(
    step: int,
    *,
    recipe: str,
    config: TrainConfig,
    mesh: Mesh,
    rules: PartitionRules,
    layout: Mapping[str, str],
    fingerprint: str,
    corpus: Corpus,
    row: Row,
) -> dict[str, Any]:
    """The metadata of a checkpoint, as JSON; a run's data is a function of the step, which is its position."""
    return {
        "format": FORMAT,
        "step": step,
        "recipe": recipe,
        "config": dict(line.split("=", 1) for line in to_lines(config)),
        **layout_record(mesh.shape, rules, layout),
        "sharding": fingerprint,
        "data": {"description": corpus.description, "content_hash": corpus.content_hash, "position": step},
        "metrics": {name: value for name, value in row.items() if isinstance(value, int | float)},
        "versions": versions(),
    }


def layout_record(sizes: Mapping[str, int], rules: PartitionRules, layout: Mapping[str, str]) -> dict[str, Any]:
    """What a checkpoint tells of its layout, as JSON has it."""
    axes = {field.name: getattr(rules.axes, field.name) for field in dataclasses.fields(rules.axes)}
    found = {
        "mesh": {"axis_names": list(sizes), "shape": list(sizes.values())},
        "axes": axes,
        "rules": [[pattern, str(dims)] for pattern, dims in rules.table],
        "layout": dict(layout),
    }
    return json.loads(json.dumps(found, default=dict))


def versions() -> dict[str, str]:
    """Of the packages that write checkpoints and run models."""
    return {name: _version(name) for name in PACKAGES}


def layout_of(state: Any, layers: Sequence[str]) -> dict[str, str]:
    """path on disk -> how the array is split, as "fsdp+dp, -, tp", or "whole"."""
    specs = {path: leaf.sharding.spec for path, leaf in arrays_on_disk(state, layers).items()}
    return {path: dims_text(spec) if any(spec) else "whole" for path, spec in specs.items()}


def layout_changes(saved: Mapping[str, Any], mesh: Mesh, layout: Mapping[str, str]) -> list[str]:
    """One line on the mesh if it is another, and one for every array that is split over other axes than when saved."""
    before = dict(zip(saved["mesh"]["axis_names"], saved["mesh"]["shape"], strict=True))
    lines = [f"mesh {mesh_text(before)} -> {mesh_text(mesh.shape)}"] if before != dict(mesh.shape) else []
    old = saved.get("layout", {})
    return lines + [f"{path}: {old[path]} -> {spec}" for path, spec in layout.items() if old.get(path, spec) != spec]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "not installed"
