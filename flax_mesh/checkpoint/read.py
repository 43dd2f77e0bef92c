"""Reads the contents of a checkpoint as plain data: size, date, damage, metrics, tree. Changes no files.

A checkpoint is untrusted input: metadata of another form than the written one is read as empty, and no name in it is
used as a path, but the folder of its base. `plain` makes text safe to print.
"""

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flax_mesh.checkpoint.base import stored_arrays
from flax_mesh.checkpoint.checksums import (
    MARKERS,
    RECORD,
    find_damage,
    find_other_step,
    read_metadata,
    saved_size,
)
from flax_mesh.checkpoint.find import STEP, step_number
from flax_mesh.checkpoint.retention import MOST, has_finite_numbers
from flax_mesh.errors import CheckpointCorruptedError, ConfigError, UnreadableError
from flax_mesh.store import StorePath
from flax_mesh.text import one_line

Record = Mapping[str, Any]  # the metadata of a step, all sections included
INVALID = (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError)  # raised for invalid metadata


class Array(NamedTuple):
    """One array of a checkpoint; `split` is its sharding according to the metadata, "" if unknown."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    split: str = ""

    @property
    def nbytes(self) -> int:
        return self.size * np.dtype(self.dtype).itemsize

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def step_data(step: Path, *, verify: bool) -> dict[str, Any]:
    """Name, size, date, metrics and mesh of a step (None: unknown), and the problems of its files (None: not read).

    Without `verify` the only problems that are found are another number in a step than in its name, and metadata that
    cannot be read. "finite" is taken from the metadata: no array is read. "unreadable" are lines on the files that
    the system refused to read.
    """
    set_aside, unreadable = not STEP.fullmatch(step.name), []
    record, problems = _sections_of({}), None
    count, size = folder_size(step)
    try:
        problems = find_damage(step) if verify else None if set_aside else find_other_step(step) or None
        record = read_record(step)
    except UnreadableError as error:
        unreadable = error.lines
    except CheckpointCorruptedError as error:
        problems = problems or error.lines
    return {
        "name": step.name,
        "step": step_number(step),
        "set_aside": set_aside,
        "bytes": size,
        "files": count,
        "saved": _saved_at(step),
        "problems": problems,
        "unreadable": unreadable,
        "metrics": record["metrics"],
        "finite": has_finite_numbers(record),
        "mesh": mesh_of(record) if record["mesh"] else None,
    }


def read_record(step: Path) -> dict[str, Any]:
    """The metadata of a step by section; a section that is missing or invalid is empty, all if the metadata is missing.

    Raises CheckpointCorruptedError if the metadata is not a JSON object, StepDeletedError and UnreadableError.
    """
    try:
        metadata = finite(read_metadata(step))
    except RecursionError as error:
        raise CheckpointCorruptedError(f"{step}: its metadata is nested too deeply") from error
    except CheckpointCorruptedError:
        if (step / RECORD).exists():
            raise
        metadata = {}
    return _sections_of(metadata)


def _sections_of(saved: Record) -> dict[str, Any]:
    """`saved` with all sections, empty where they are missing or invalid."""
    sections = {name: saved.get(name) for name in ("config", "mesh", "axes", "layout", "data", "metrics", "versions")}
    rules = saved.get("rules")
    record = {**saved} | {name: value if isinstance(value, dict) else {} for name, value in sections.items()}
    pairs = [rule for rule in rules if isinstance(rule, list) and len(rule) == 2] if isinstance(rules, list) else []
    return record | {"rules": pairs}


def read_tree(step: Path, record: Record) -> dict[str, Array]:
    """Shapes and dtypes of a step by path; reads no array. CheckpointCorruptedError if the tree is unreadable."""
    try:
        return {
            path: Array(path, tuple(leaf.shape), str(np.dtype(leaf.dtype)), str(record["layout"].get(path, "")))
            for path, leaf in stored_arrays(step).items()
        }
    except ConfigError:
        raise
    except INVALID as error:
        reason = one_line(error, 200)
        raise CheckpointCorruptedError(
            f"{step}: its tree cannot be read ({type(error).__name__}: {reason}); "
            "flax-mesh checkpoint verify reports all damage"
        ) from error


def mesh_of(record: Record) -> dict[str, int]:
    """Axes of the mesh that are larger than 1."""
    mesh = record["mesh"]
    names, sizes = mesh.get("axis_names"), mesh.get("shape")
    if not isinstance(names, list) or not isinstance(sizes, list):
        return {}
    return {str(name): size for name, size in zip(names, sizes, strict=False) if isinstance(size, int) and size > 1}


def _saved_at(step: Path) -> str | None:
    """Time of the commit as ISO 8601 in UTC, None if unknown."""
    try:
        nanoseconds = json.loads((step / MARKERS[0]).read_bytes())["commit_timestamp_nsecs"]
        return datetime.fromtimestamp(nanoseconds / 1e9, UTC).isoformat(timespec="seconds")
    except (*INVALID, OverflowError):
        return None


def folder_size(folder: Path) -> tuple[int, int]:
    """(number of files, bytes) below a folder; links are not followed. In a store: the bytes when it was saved."""
    if isinstance(folder, StorePath):
        return len(folder.names()), saved_size(folder)
    sizes = []
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # a run may be deleting files
                sizes.append((Path(parent) / name).lstat().st_size)
    return len(sizes), sum(sizes)


def plain(text: str) -> str:
    """`text` on one line, with control characters escaped as in Python source."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def is_number(value: object) -> bool:
    """Whether a value of JSON is a number that a float can represent."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not abs(value) > MOST


def finite(value: object) -> Any:
    """`value` as portable JSON: numbers that no float can represent become null."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, int | float) and not abs(value) <= MOST else value
