"""The run folder: metrics.jsonl, config.txt and checkpoints/. Process 0 selects, locks and writes it."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax

from flax_mesh.checkpoint import Checkpointer
from flax_mesh.errors import ConfigError
from flax_mesh.processes import assert_equal, broadcast_from_process_0
from flax_mesh.train.config import TrainConfig
from flax_mesh.train.overrides import to_lines

METRICS, CONFIG, LOCK = "metrics.jsonl", "config.txt", ".lock"


def is_first() -> bool:
    """Whether this is process 0, which writes files and prints for all processes."""
    return jax.process_index() == 0


def next_free(folder: Path) -> Path:
    candidates = (folder, *(folder.with_name(f"{folder.name}-{i}") for i in range(2, 10_000)))
    return next(path for path in candidates if not path.exists())


@contextmanager
def run_folder(folder: Path) -> Iterator[None]:
    """Create the folder if it does not exist, and lock it against a second run. Raises ConfigError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("a")
    except OSError as error:
        raise ConfigError(f"run.folder={folder} cannot be written ({error.strerror}); use another folder") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel releases it however this process ends
        except BlockingIOError:
            raise ConfigError(
                f"run.folder={folder} is in use by another run; stop that run, or use another folder"
            ) from None
        yield


@contextmanager
def folder_of_run(wanted: Path, restart: bool) -> Iterator[Path]:
    """Yield the run folder, selected and locked by process 0. A ConfigError of process 0 is raised in all processes."""
    with ExitStack() as stack:

        def choose() -> str:
            folder = next_free(wanted) if restart else wanted
            stack.enter_context(run_folder(folder))
            return str(folder)

        yield Path(broadcast_from_process_0("folder", choose))


def latest_step(checkpointer: Checkpointer) -> int | None:
    """The newest valid step, verified by process 0 only. Removes the leftovers of interrupted saves."""

    def look() -> str:
        checkpointer.clear_leftovers()
        step = checkpointer.latest_step()
        return json.dumps([step, list(checkpointer.damaged.items())])

    step, damaged = json.loads(broadcast_from_process_0("latest step", look))
    checkpointer.damaged = dict(damaged)
    return step


def write_config(folder: Path, config: TrainConfig) -> None:
    """Write config.txt atomically, in process 0 only, in the format that `@FILE` reads."""
    if not is_first():
        return
    partial = folder / (CONFIG + ".new")
    try:
        partial.write_text("\n".join(to_lines(config)) + "\n", encoding="utf-8")
        os.replace(partial, folder / CONFIG)
    except OSError as error:
        raise ConfigError(f"run.folder={folder} cannot be written ({error.strerror}); use another folder") from error


def check_agreement(record: Mapping[str, Any]) -> None:
    """Check that all processes have the same `record`. If not, all raise ConfigError with the differing fields."""
    facts = {f"config {key}": value for key, value in record["config"].items()}
    facts |= {f"version of {name}": value for name, value in record["versions"].items()}
    facts |= {"mesh": str(record["mesh"]), "rules": str(record["rules"]), "axes": str(record["axes"])}
    facts |= {"sharding of the state": record["sharding"], "content of data.source": record["data"]["content_hash"]}
    assert_equal("start", facts)
