"""The run folder: metrics.jsonl, config.txt and checkpoints/. Process 0 chooses, locks and writes it for all."""

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
    """Process 0 writes and prints for all."""
    return jax.process_index() == 0


def next_free(folder: Path) -> Path:
    candidates = (folder, *(folder.with_name(f"{folder.name}-{i}") for i in range(2, 10_000)))
    return next(path for path in candidates if not path.exists())


@contextmanager
def run_folder(folder: Path) -> Iterator[None]:
    """The folder, created if it is missing and locked against a second writer; ConfigError if that fails."""
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


@contextmanager
def folder_of_run(wanted: Path, restart: bool) -> Iterator[Path]:
    """The folder of the run, chosen and locked by process 0, whose ConfigError is raised in all processes."""
    with ExitStack() as stack:

        def choose() -> str:
            folder = next_free(wanted) if restart else wanted
            stack.enter_context(run_folder(folder))
            return str(folder)

        yield Path(broadcast_from_process_0("folder", choose))


def latest_step(checkpointer: Checkpointer) -> int | None:
    """The newest valid step; only process 0 reads the bytes. Leftovers of interrupted saves are removed."""

    def look() -> str:
        checkpointer.clear_leftovers()
        step = checkpointer.latest_step()
        return json.dumps([step, list(checkpointer.damaged.items())])

    step, damaged = json.loads(broadcast_from_process_0("latest step", look))
    checkpointer.damaged = dict(damaged)
    return step


def write_config(folder: Path, config: TrainConfig) -> None:
    """Write config.txt, as `@FILE` reads it, atomically and only in process 0."""
    if not is_first():
        return
    partial = folder / (CONFIG + ".new")
    try:
        partial.write_text("\n".join(to_lines(config)) + "\n", encoding="utf-8")
        os.replace(partial, folder / CONFIG)
    except OSError as error:
        raise ConfigError(f"run.folder={folder} cannot be written ({error.strerror}); use another folder") from error


def check_agreement(record: Mapping[str, Any]) -> None:
    """ConfigError in every process, naming fields and processes, unless all have made the same `record` of the run."""
    facts = {f"config {key}": value for key, value in record["config"].items()}
    facts |= {f"version of {name}": value for name, value in record["versions"].items()}
    facts |= {"mesh": str(record["mesh"]), "rules": str(record["rules"]), "axes": str(record["axes"])}
    facts |= {"sharding of the state": record["sharding"], "content of data.source": record["data"]["content_hash"]}
    assert_equal("start", facts)
