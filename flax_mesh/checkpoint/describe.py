"""What lies in a folder of checkpoints, as plain data: steps, sizes, dates, damage, trees. Nothing is changed there.

Nothing read from a checkpoint is trusted: what has not the form that is written becomes empty, and no name from it is
used as a path. `plain` makes it fit to be shown.
"""

import json
import math
import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flax_mesh.checkpoint.integrity import CHECKSUMS, MARKERS, find_damage
from flax_mesh.checkpoint.manager import LEFTOVER
from flax_mesh.errors import ConfigError, DamageError

CHECKPOINTS = "checkpoints"  # below a run folder
STEP, SET_ASIDE = re.compile(r"0|[1-9][0-9]*"), re.compile(r"([0-9]+)\.damaged(-[0-9]+)?")
PARTS = (CHECKSUMS, MARKERS[0], "state", "metadata")  # one of them is there, however damaged the step is
UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError)  # what bad JSON leads to


class Array(NamedTuple):
    """One array of a checkpoint; `split` as the metadata tells it, "" where it does not."""

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


def find_steps(path: str | Path) -> list[Path]:
    """Folders of the steps at `path`, oldest first; those that were set aside as damaged stand after them.

    `path` is a run folder, a folder of checkpoints, or the folder of one step. ConfigError where it is none of these.
    """
    path = Path(path).expanduser().absolute()
    if _is_step(path):
        return [path]
    for folder in (path / CHECKPOINTS, path):
        found = [entry for entry in folder.iterdir() if _is_step(entry)] if folder.is_dir() else []
        if found:
            return sorted(found, key=lambda step: (not STEP.fullmatch(step.name), step_number(step), step.name))
    what = "holds no checkpoint" if path.is_dir() else "is no folder"
    unfinished = [one.name for folder in (path / CHECKPOINTS, path) for one in find_leftovers(folder)]
    what += f" (but {', '.join(unfinished)}, of a save under way or cut off)" if unfinished else ""
    raise ConfigError(f"{path} {what}; name a run folder, its {CHECKPOINTS}/, or one step in there")


def find_step(path: str | Path, step: int | None = None) -> Path:
    """The folder of `step` at `path`, or of the newest committed one."""
    steps = find_steps(path)
    if len(steps) == 1 and steps[0] == Path(path).expanduser().absolute() and step in (None, step_number(steps[0])):
        return steps[0]
    committed = {step_number(one): one for one in steps if STEP.fullmatch(one.name)}
    if not committed:
        raise ConfigError(f"{path} holds none but damaged checkpoints: {', '.join(one.name for one in steps)}")
    if step is None:
        return committed[max(committed)]
    if step not in committed:
        raise ConfigError(f"{path} has no step {step}; it has {', '.join(map(str, committed))}")
    return committed[step]


def find_whole(path: str | Path, step: int | None = None) -> tuple[Path, dict[Path, list[str]]]:
    """As `find_step`, of those whose every byte is as it was saved; and the newer ones that were passed over for it.

    A DamageError where the one that is asked for is damaged, or all are.
    """
    chosen = find_step(path, step)
    older = [one for one in find_steps(path) if STEP.fullmatch(one.name) and step_number(one) < step_number(chosen)]
    damaged: dict[Path, list[str]] = {}
    for one in [chosen, *reversed(older if step is None else [])]:
        if problems := find_damage(one):
            damaged[one] = problems
        else:
            return one, damaged
    raise DamageError(_damage_lines(damaged))


def find_leftovers(folder: Path) -> list[Path]:
    """What saves and deletions that are under way, or were cut off, have left there."""
    return sorted(entry for entry in folder.iterdir() if LEFTOVER.fullmatch(entry.name)) if folder.is_dir() else []


def check_whole(step: Path) -> None:
    """DamageError if any byte of a step is not as it was saved."""
    if problems := find_damage(step):
        raise DamageError(_damage_lines({step: problems}))


def step_number(step: Path) -> int:
    """Of a step's folder: 20 of "20" and of "20.damaged"."""
    return int(step.name.partition(".")[0])


def step_data(step: Path, *, verify: bool) -> dict[str, Any]:
    """Name, size, date, metrics and mesh of a step; `problems` is what is wrong with its files, None if unread."""
    record = read_record(step)
    count, size = folder_size(step)
    return {
        "name": step.name,
        "step": step_number(step),
        "set_aside": not STEP.fullmatch(step.name),
        "bytes": size,
        "files": count,
        "saved": saved_at(step),
        "problems": find_damage(step) if verify else None,
        "metrics": record["metrics"],
        "mesh": mesh_of(record),
    }


def read_record(step: Path) -> dict[str, Any]:
    """What was saved beside the state, by section; a section that is not there, or is no section, is empty."""
    from flax_mesh.checkpoint.handler import read_metadata

    try:
        found = finite(read_metadata(step))
    except UNREADABLE:
        found = {}
    found = found if isinstance(found, dict) else {}
    sections = {name: found.get(name) for name in ("config", "mesh", "axes", "layout", "data", "metrics", "versions")}
    rules = found.get("rules")
    record = found | {name: value if isinstance(value, dict) else {} for name, value in sections.items()}
    return record | {"rules": rules if isinstance(rules, list) else []}


def read_tree(step: Path, record: Mapping[str, Any]) -> dict[str, Array]:
    """path -> array of a step, none of which is read. DamageError where the tree cannot be read."""
    from flax_mesh.checkpoint.handler import stored_arrays

    try:
        stored = stored_arrays(step)
        return {
            path: Array(path, tuple(leaf.shape), str(np.dtype(leaf.dtype)), str(record["layout"].get(path, "")))
            for path, leaf in stored.items()
        }
    except UNREADABLE as error:
        reason = " ".join(str(error).split())[:200]
        raise DamageError(
            f"{step}: its tree cannot be read ({type(error).__name__}: {reason}); "
            f"flax-mesh checkpoint verify tells what is damaged"
        ) from error


def mesh_of(record: Mapping[str, Any]) -> dict[str, int]:
    """Axes of the mesh that are larger than 1."""
    mesh = record["mesh"]
    names, sizes = mesh.get("axis_names"), mesh.get("shape")
    if not isinstance(names, list) or not isinstance(sizes, list):
        return {}
    return {str(name): size for name, size in zip(names, sizes, strict=False) if isinstance(size, int) and size > 1}


def saved_at(step: Path) -> str | None:
    """When a step was committed, as ISO 8601 in UTC."""
    try:
        nanoseconds = json.loads((step / MARKERS[0]).read_bytes())["commit_timestamp_nsecs"]
        return datetime.fromtimestamp(nanoseconds / 1e9, UTC).isoformat(timespec="seconds")
    except (*UNREADABLE, OverflowError):
        return None


def folder_size(folder: Path) -> tuple[int, int]:
    """(number of files, bytes) below a folder; links count for themselves."""
    files = [Path(parent) / name for parent, _, names in os.walk(folder) for name in names]
    sizes = [path.lstat().st_size for path in files if os.path.lexists(path)]  # a save under way moves its own
    return len(sizes), sum(sizes)


def plain(text: str) -> str:
    """`text` on one line and without what a terminal would obey: such characters as they are written in Python."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def finite(value: Any) -> Any:
    """`value` as JSON has it: numbers that are not finite are null."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_step(path: Path) -> bool:
    named = STEP.fullmatch(path.name) or SET_ASIDE.fullmatch(path.name)
    return bool(named) and any((path / part).exists() for part in PARTS)


def _damage_lines(damaged: Mapping[Path, list[str]]) -> list[str]:
    return [line for one, found in damaged.items() for line in (f"{one} is damaged:", *(f"  {x}" for x in found))]
