"""The run folder: metrics.jsonl, config.txt and checkpoints/, written by one process at a time."""

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flax_mesh.errors import ConfigError
from flax_mesh.train.config import TrainConfig
from flax_mesh.train.overrides import Change, changes, to_lines

METRICS, CONFIG, LOCK = "metrics.jsonl", "config.txt", ".lock"


def next_free(folder: Path) -> Path:
    """`folder`, or the first of folder-2, folder-3 ... that does not exist yet."""
    candidates = (folder, *(folder.with_name(f"{folder.name}-{i}") for i in range(2, 10_000)))
    return next(path for path in candidates if not path.exists())


@contextmanager
def run_folder(folder: Path) -> Iterator[None]:
    """The folder, made if need be and locked against a second writer. A ConfigError says why it cannot be had."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("a")
    except OSError as error:
        raise ConfigError(f"run.folder={folder} cannot be written ({error.strerror}); use another folder") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released by the kernel, however this process ends
        except BlockingIOError:
            raise ConfigError(f"run.folder={folder} is in use by another run; stop that one, or use another") from None
        yield


def write_config(folder: Path, config: TrainConfig) -> None:
    """config.txt as `@FILE` reads it: whole, or as it was."""
    partial = folder / (CONFIG + ".new")
    try:
        partial.write_text("\n".join(to_lines(config)) + "\n", encoding="utf-8")
        os.replace(partial, folder / CONFIG)
    except OSError as error:
        raise ConfigError(f"run.folder={folder} cannot be written ({error.strerror}); use another folder") from error


def check_resume(
    saved: Mapping[str, Any], config: TrainConfig, content_hash: str, *, allow_changes: bool
) -> list[Change]:
    """What changed since the checkpoint was saved; ConfigError if that changes the result and is not allowed."""
    found = changes(saved["config"], config)
    old_hash = saved["data"]["content_hash"]
    if old_hash != content_hash:
        found.append(Change("content of data.source", old_hash[:12], content_hash[:12], True))
    refused = [change for change in found if change.changes_result]
    if refused and not allow_changes:
        raise ConfigError(
            [
                f"the checkpoint of step {saved['step']} was made with other settings:",
                *(f"  {change}" for change in refused),
                "  Undo them, start another run (--restart, or another run.folder), or go on all the same with "
                "--allow-changes.",
            ]
        )
    return found
