"""A run: the objects that do not change between its steps, and the description printed at its start."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from flax_mesh.errors import SaveError
from flax_mesh.sharding.memory import is_on_host
from flax_mesh.step.state import TrainState
from flax_mesh.text import bytes_text, mesh_text
from flax_mesh.train.build import TrainProgram
from flax_mesh.train.config import TrainConfig, options_text, parse_compiler_options
from flax_mesh.train.data.batches import BatchFn
from flax_mesh.train.data.data import Corpus
from flax_mesh.train.metrics import Row

Say = Callable[[str], None]


@dataclass(frozen=True)
class Run:
    program: TrainProgram
    corpus: Corpus
    batch: BatchFn
    evaluate: Callable[[TrainState], Row] | None  # None: run.eval_every=0
    record: dict[str, Any]  # metadata saved with every checkpoint
    folder: Path
    say: Say
    hooks: Sequence[Callable[[Row], None]]
    should_stop: Callable[[], bool]
    trace: Path | None

    @property
    def config(self) -> TrainConfig:
        return self.program.config

    def warn_or_raise(self, error: SaveError) -> None:
        if self.config.checkpoint.on_failure == "stop":
            raise error
        self.say(f"warning: {error}; training continues (checkpoint.on_failure)")


def describe(run: Run) -> None:
    program, leaves = run.program, run.program.layout.leaves
    shard = max(_bytes_by_device([x for x in leaves if not is_on_host(x)]).values())
    hosted = max(_bytes_by_device([x for x in leaves if is_on_host(x)]).values(), default=0)
    total = sum(math.prod(x.shape) * _itemsize(x) for x in leaves)
    devices = program.mesh.devices
    run.say(f"mesh: {mesh_text(program.mesh.shape)} on {devices.size} x {devices.flat[0].device_kind}")
    run.say(f"data: {run.corpus.description}")
    run.say(
        f"model: {program.num_parameters / 1e6:.2f}M parameters in {len(program.parameters)} arrays; "
        f"with the optimizer {bytes_text(total)}, {bytes_text(shard)} per device"
        + (f" and {bytes_text(hosted)} per device in the memory of the host" if hosted else "")
    )
    if program.pipeline is not None:
        for line in str(program.pipeline.staged).splitlines():
            run.say(line)
    config = run.config
    if config.run.compiler_options:
        run.say(f"compiler: {options_text(parse_compiler_options(config.run.compiler_options))}")
    if config.run.steps > config.optimizer.decay_steps:
        run.say(
            f"note: the learning rate stays at {config.optimizer.end_learning_rate} from step "
            f"{config.optimizer.decay_steps} on (optimizer.decay_steps); the run has {config.run.steps} steps"
        )


def _bytes_by_device(leaves: Sequence[Any]) -> dict[Any, int]:
    found: Counter[Any] = Counter()
    for leaf in leaves:
        size = math.prod(leaf.sharding.shard_shape(leaf.shape)) * _itemsize(leaf)
        found.update(dict.fromkeys(leaf.sharding.device_set, size))
    return found


def _itemsize(x: Any) -> int:
    return 8 if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x.dtype.itemsize
