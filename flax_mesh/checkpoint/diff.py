"""Differences between two checkpoints, or a checkpoint and a recipe: records, trees, values."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flax_mesh.checkpoint.base import read_arrays
from flax_mesh.checkpoint.read import Array, Record, mesh_of
from flax_mesh.text import array_text, mesh_text
from flax_mesh.tree import in_batches

_READ_BYTES = 2**27  # of arrays of each of two checkpoints that are in memory at a time, or the largest array
COMPARED = 2**22  # elements of two arrays that are compared at a time, as float64
SECTIONS = ("settings", "mesh", "axes", "rules", "data", "versions", "tree", "layout")


class Difference(NamedTuple):
    """One entry of a section with its text in both; None where it is absent."""

    section: str
    name: str
    a: str | None
    b: str | None


def differences(a: Record, b: Record, a_tree: Mapping[str, Array], b_tree: Mapping[str, Array]) -> list[Difference]:
    """All differences of two records (`read_record`) and trees (`read_tree`), in the order of SECTIONS.

    A section that is empty in one record is not compared: a recipe has neither data nor versions.
    """
    records = [section for section in SECTIONS[:-2] if in_both(section, a, b)]
    changes = [x for name in records for x in _mapping_differences(name, _section(name, a), _section(name, b))]
    if not any(x.section == "rules" for x in changes) and a["rules"] != b["rules"] and a["rules"] and b["rules"]:
        changes.append(Difference("rules", "order", "as saved", "another; the first matching rule decides"))
    texts = [{path: array_text(array) for path, array in tree.items()} for tree in (a_tree, b_tree)]
    changes += _mapping_differences("tree", *texts)
    split = [{path: array.split for path, array in tree.items()} for tree in (a_tree, b_tree)]
    shared = [path for path in split[0] if split[0][path] and split[1].get(path)]
    return changes + _mapping_differences("layout", *({path: layout[path] for path in shared} for layout in split))


def in_both(section: str, a: Record, b: Record) -> bool:
    """Whether both records have a section; trees always do."""
    return section == "tree" or bool(_section(section, a) and _section(section, b))


def in_one(section: str, a: Record, b: Record) -> bool:
    """Whether exactly one of two records has a section."""
    return section != "tree" and bool(_section(section, a)) != bool(_section(section, b))


def value_differences(a: Path, b: Path, arrays: Sequence[Array]) -> dict[str, float]:
    """Largest absolute difference of each array that differs between two steps, by path; NaN if one is NaN.

    Arrays are compared bitwise, and read a few at a time: at most _READ_BYTES of each step, or one array.
    """
    changed: dict[str, float] = {}
    for batch in batches(arrays):
        old, new = (read_batch(step, batch) for step in (a, b))
        largest = {path: _largest_difference(old[path].reshape(-1), new[path].reshape(-1)) for path in old}
        changed |= {path: value for path, value in largest.items() if value is not None}
        del old, new  # free them before the next are read
    return changed


def read_batch(step: Path, batch: Sequence[Array]) -> dict[str, np.ndarray]:
    """Values of some arrays of a step, by path, cast to the dtypes in `batch`."""
    host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    target = {array.path: jax.ShapeDtypeStruct(array.shape, jnp.dtype(array.dtype), sharding=host) for array in batch}
    return {path: np.asarray(value) for path, value in read_arrays(step, target).items()}


def batches(arrays: Sequence[Array]) -> Iterator[list[Array]]:
    """Arrays in batches of at most _READ_BYTES, or of one array."""
    return in_batches(arrays, lambda array: array.nbytes, _READ_BYTES)


def _section(name: str, record: Record) -> dict[str, str]:
    if name == "mesh":
        return {"mesh": mesh_text(mesh_of(record))} if record["mesh"] else {}
    if name == "rules":
        return {str(pattern): str(dims) for pattern, dims in record["rules"]}
    pairs = record["config" if name == "settings" else name].items()
    # The position in the data and the state of an iterator follow from the number of the step, the hashes of rows are
    # too long to show, and `name` is a constant.
    return {
        str(key): _text(value)
        for key, value in pairs
        if name != "data" or key not in ("name", "position", "state", "rows")
    }


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return "+".join(map(_text, value))
    return "none" if value is None else str(value)


def _mapping_differences(section: str, a: Mapping[str, str], b: Mapping[str, str]) -> list[Difference]:
    names = [*a, *(name for name in b if name not in a)]
    return [Difference(section, name, a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)]


def _largest_difference(a: np.ndarray, b: np.ndarray) -> float | None:
    """None if two flat arrays are bitwise equal."""
    largest = None
    for start in range(0, a.size, COMPARED):
        parts = a[start : start + COMPARED], b[start : start + COMPARED]
        same = np.equal(*(part.view(np.uint8).reshape(len(part), -1) for part in parts)).all(axis=1)
        if same.all():
            continue
        wide = np.complex128 if np.issubdtype(a.dtype, np.complexfloating) else np.float64
        old, new = (part[~same].astype(wide) for part in parts)
        with np.errstate(invalid="ignore"):  # inf - inf
            here = float(np.abs(old - new).max())
        largest = here if largest is None or math.isnan(here) else max(largest, here)
    return largest
