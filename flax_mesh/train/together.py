"""A run of several processes: what must be the same in all, and what process 0 does for all."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax

from flax_mesh.checkpoint import Checkpointer
from flax_mesh.processes import Watch, agree, from_first
from flax_mesh.train.build import TrainProgram
from flax_mesh.train.config import TrainConfig
from flax_mesh.train.run_folder import next_free, run_folder, write_config


def is_first() -> bool:
    """Whether this is process 0, which writes and prints for all."""
    return jax.process_index() == 0


@contextmanager
def folder_of_run(wanted: Path, restart: bool) -> Iterator[Path]:
    """The folder of the run, chosen and locked by process 0. A ConfigError of it is one of all processes."""
    with ExitStack() as stack:

        def choose() -> str:
            folder = next_free(wanted) if restart else wanted
            stack.enter_context(run_folder(folder))
            return str(folder)

        yield Path(from_first("folder", choose))


def latest_step(checkpointer: Checkpointer) -> int | None:
    """The newest whole step; process 0 alone reads all the bytes and tells the others what it has found. What an
    earlier run was cut off in is cleared away."""

    def look() -> str:
        checkpointer.clear_leftovers()
        step = checkpointer.latest_step()
        return json.dumps([step, list(checkpointer.damaged.items())])

    step, damaged = json.loads(from_first("latest step", look))
    checkpointer.damaged = dict(damaged)
    return step


def write_config_once(folder: Path, config: TrainConfig) -> None:
    """config.txt, by process 0."""
    if is_first():
        write_config(folder, config)


def check_agreement(record: Mapping[str, Any]) -> None:
    """ConfigError in every process, naming fields and processes, unless all have made the same `record` of the run."""
    facts = {f"config {key}": value for key, value in record["config"].items()}
    facts |= {f"version of {name}": value for name, value in record["versions"].items()}
    facts |= {"mesh": str(record["mesh"]), "rules": str(record["rules"]), "axes": str(record["axes"])}
    facts |= {"sharding of the state": record["sharding"], "content of data.source": record["data"]["content_hash"]}
    agree("start", facts)


def watch_pipeline(watch: Watch | None, program: TrainProgram) -> None:
    """Let the watch ask what the pipeline is waiting for."""
    channel = program.pipeline and program.pipeline.channel
    if watch is not None and channel:
        channel.watched = True
        watch.waiting = channel.waiting
