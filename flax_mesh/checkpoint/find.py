"""Finds the checkpoints at a path that a user passes, and the newest valid one. Changes no files."""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from flax_mesh.checkpoint.base import check_base
from flax_mesh.checkpoint.checksums import ABSENT, CHECKSUMS, MARKERS, find_damage
from flax_mesh.checkpoint.hf.kept import CONFIG, KEPT
from flax_mesh.errors import CheckpointCorruptedError, ConfigError, StepDeletedError, UnreadableError
from flax_mesh.store import StorePath, is_present, on_this_machine, stored_path
from flax_mesh.text import at_most

Result = TypeVar("Result")

CHECKPOINTS = "checkpoints"  # below a run folder
LAST_STEP = 10**18 - 1  # of at most 18 digits
STEP, QUARANTINED = re.compile(r"0|[1-9][0-9]{0,17}"), re.compile(r"([0-9]{1,18})\.damaged(-[0-9]+)?")
_LEFTOVER = re.compile(r"\d+\.(orbax-checkpoint-tmp.*|deleted)")  # of an interrupted save or deletion
_ATTEMPTS = 5  # to read a step before a run deletes it
UPLOAD = "flax_mesh.upload"  # the first object of a step in a store, which names the save that made it
PARTS = (CHECKSUMS, MARKERS[0], "state", "metadata")  # a step contains at least one of them, however damaged it is


def check_path(folder: Path) -> None:
    """Raise ConfigError for a path that Orbax takes for a pattern: it would save there, but not find it again."""
    if set("*?[") & set(str(folder)):
        raise ConfigError(f"{folder}: Orbax takes a path with *, ? or [ for a pattern; use a folder without them.")


def find_steps(path: str | Path) -> list[Path]:
    """Folders of the steps at `path`, oldest first, followed by quarantined ones.

    `path` is a run folder, a folder of checkpoints, or the folder of one step. Raises ConfigError for anything else.
    """
    path = stored_path(path).absolute()
    if is_step(path):
        return [path]
    for folder in (path / CHECKPOINTS, path):
        if steps := [entry for entry in entries(folder) if is_step(entry)]:
            return sorted(steps, key=lambda step: (not STEP.fullmatch(step.name), step_number(step), step.name))
    if (path / CONFIG).is_file():
        raise ConfigError(
            f"{path} contains {CONFIG}, but neither safetensors nor a checkpoint; add the parameters of the model. "
            f"{CONFIG} alone is enough for flax-mesh plan and explain"
        )
    what = "contains no checkpoint" if path.is_dir() else "is not a folder"
    unfinished = [path.name] if _is_uncommitted(path) else []
    unfinished += [leftover.name for folder in (path / CHECKPOINTS, path) for leftover in find_unfinished(folder)]
    what += f" (only {', '.join(unfinished)}, of a save in progress or interrupted)" if unfinished else ""
    raise ConfigError(f"{path} {what}; pass a run folder, its {CHECKPOINTS}/, or the folder of one step")


def find_step(path: str | Path, step: int | None = None) -> Path:
    """The folder of `step` at `path`, or of the newest committed one."""
    steps = find_steps(path)
    if len(steps) == 1 and steps[0] == stored_path(path).absolute() and step in (None, step_number(steps[0])):
        return steps[0]
    committed = {step_number(folder): folder for folder in steps if STEP.fullmatch(folder.name)}
    if not committed:
        raise ConfigError(f"{path} contains only damaged checkpoints: {', '.join(folder.name for folder in steps)}")
    if step is None:
        return committed[max(committed)]
    if step not in committed:
        raise ConfigError(f"{path} has no step {step}; it has {', '.join(map(str, committed))}")
    return committed[step]


def folders_of_files(path: Path) -> list[Path]:
    """Where a tokenizer may be: in a Hugging Face folder, below a run or its checkpoints, or beside a step."""
    checkpoints = path.parent if STEP.fullmatch(path.name) else path
    folders = [path, *(on_this_machine(x / KEPT) for x in (path / CHECKPOINTS, checkpoints))]
    return [x for x in folders if not isinstance(x, StorePath)]


def find_valid(path: str | Path, step: int | None = None) -> tuple[Path, dict[Path, list[str]]]:
    """The folder of `step`, or of the newest valid step, and the problems of newer damaged ones that were skipped.

    Compares every byte with its checksum. Raises CheckpointCorruptedError if `step`, or every step, is damaged, and
    UnreadableError if the system refuses to read one: it may be the newest valid one.
    """
    chosen = find_step(path, step)
    if step is not None or chosen == stored_path(path).absolute():
        check_whole(chosen)
        return chosen, {}
    valid, damaged = newest_valid(lambda: [folder for folder in find_steps(path) if STEP.fullmatch(folder.name)])
    if valid is None:
        raise CheckpointCorruptedError(damage_lines(damaged))
    return valid, damaged


def newest_valid(steps: Callable[[], Sequence[Path]]) -> tuple[Path | None, dict[Path, list[str]]]:
    """The newest valid one of `steps()`, oldest first, or None, and the problems of newer damaged ones.

    Calls `steps` again if a run deletes a step while it is read, since the run has then saved a newer one.
    """

    def look() -> tuple[Path | None, dict[Path, list[str]]]:
        damaged: dict[Path, list[str]] = {}
        for step in reversed(steps()):
            if not (problems := find_damage(step)):
                check_base(step)
                return step, damaged
            damaged[step] = problems
        return None, damaged

    return of_newest(look)


def of_newest(read: Callable[[], Result], *paths: str | Path, step: int | None = None) -> Result:
    """Call `read`, which finds the newest step and reads it, again if a run deletes that step meanwhile.

    Not if the user has named the step that is gone, by its number `step` or by one of the `paths`.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return read()
        except StepDeletedError:
            if step is not None or not all(is_present(stored_path(path)) for path in paths):
                raise
    return read()


def committed_steps(folder: Path) -> list[int]:
    """The committed steps of a folder of checkpoints, oldest first, damaged ones included."""
    return sorted(int(entry.name) for entry in entries(folder) if STEP.fullmatch(entry.name) and is_step(entry))


def find_leftovers(folder: Path) -> list[Path]:
    """Files of saves and deletions in progress or interrupted, which the next save to the folder removes."""
    if isinstance(folder, StorePath):
        paths = [entry for entry in entries(folder) if isinstance(entry, StorePath)]
        return [path for path in paths if _is_uncommitted(path) and UPLOAD in path.names()]
    return [entry for entry in entries(folder) if _LEFTOVER.fullmatch(entry.name)]


def find_unfinished(folder: Path) -> list[Path]:
    """Leftovers, and uncommitted steps of Orbax. These steps are not removed: another program may be writing them."""
    return sorted({*find_leftovers(folder), *filter(_is_uncommitted, entries(folder))})


def entries(folder: Path) -> list[Path]:
    """The entries of `folder` by name; none if it is missing or a file. UnreadableError if it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except ABSENT:
        return []
    except ValueError as error:  # a null character
        raise ConfigError(f"{folder} is not a folder: {error}") from error
    except OSError as error:
        raise UnreadableError(
            f"{folder} cannot be read: {error.strerror}; repair that, or use another folder"
        ) from error


def check_whole(step: Path) -> None:
    """Raise CheckpointCorruptedError if a byte of a step is not as it was saved; then `check_base`."""
    if problems := find_damage(step):
        raise CheckpointCorruptedError(damage_lines({step: problems}))
    check_base(step)


def check_committed(step: Path) -> None:
    """Raise ConfigError for a quarantined step, which a Checkpointer does not see."""
    if not STEP.fullmatch(step.name):
        raise ConfigError(f"{step} is quarantined; rename it to {step_number(step)} first")


def step_number(step: Path) -> int:
    """The number in the name of a step's folder: 20 for "20" and for "20.damaged"."""
    return int(step.name.partition(".")[0])


def is_step(path: Path) -> bool:
    """Whether `path` is a step, committed or quarantined, also if it is damaged or cannot be read."""
    return _has_parts(path) and not _is_uncommitted(path)


def _has_parts(path: Path) -> bool:
    """Whether `path` has the name and a part of a step, or cannot be read."""
    if not (STEP.fullmatch(path.name) or QUARANTINED.fullmatch(path.name)):
        return False
    try:
        return bool({*PARTS} & {entry.name for entry in entries(path)})
    except UnreadableError:
        return True


def _is_uncommitted(path: Path) -> bool:
    """Whether `path` is a step that Orbax saves in place, as on object stores, and has not committed.

    Such a save has the final name from its start. It ends with the time of the commit in its record, and then with the
    file commit_success.txt (AtomicityMode.COMMIT_FILE). The steps of flax_mesh are committed by their rename: they
    always have checksums, and need no such file. Before 0.12.3, steps that Orbax renamed had none either, but a time;
    therefore the file is required only where an older step has it.
    """
    record, done = MARKERS
    if isinstance(path, StorePath):
        return bool(STEP.fullmatch(path.name)) and done not in path.names()
    if not STEP.fullmatch(path.name) or os.path.exists(path / done) or os.path.exists(path / CHECKSUMS):
        return False
    try:
        time = json.loads((path / record).read_bytes())["commit_timestamp_nsecs"]
    except (OSError, RecursionError, TypeError, ValueError, KeyError):
        return False
    older = (p for p in entries(path.parent) if STEP.fullmatch(p.name) and step_number(p) < step_number(path))
    return time is None or any(os.path.exists(p / done) for p in older)


def damage_lines(damaged: Mapping[Path, list[str]]) -> list[str]:
    """Lines of an error on damaged steps and the problems of each."""
    each = [
        [f"checkpoint {step} is damaged:", *at_most([f"  {x}" for x in problems])] for step, problems in damaged.items()
    ]
    return [line for lines in each for line in lines]
