"""A run: what stays the same from its first step to its last, and what it says of itself."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from flax_mesh.errors import SaveError
from flax_mesh.sharding import PartitionRules, sharding_fingerprint
from flax_mesh.step.state import TrainState
from flax_mesh.step.step import Step
from flax_mesh.text import bytes_text, mesh_text
from flax_mesh.train.build import TrainProgram
from flax_mesh.train.config import TrainConfig, options_text, parse_compiler_options
from flax_mesh.train.data.batches import BatchFn
from flax_mesh.train.data.data import Corpus
from flax_mesh.train.metadata import layout_of, record
from flax_mesh.train.metrics import Row

Say = Callable[[str], None]


class Functions(NamedTuple):
    """Jitted for the mesh of the run; nothing is compiled before the first call."""

    step: Step
    batch: BatchFn
    evaluate: Callable[[TrainState], Row] | None  # None: run.eval_every=0


@dataclass(frozen=True)
class Run:
    """What stays the same from the first step to the last."""

    config: TrainConfig
    recipe: str
    mesh: Mesh
    rules: PartitionRules
    program: TrainProgram
    corpus: Corpus
    functions: Functions
    folder: Path
    say: Say
    hooks: Sequence[Callable[[Row], None]]
    should_stop: Callable[[], bool]
    trace: str | Path | None

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of the layout of the whole state."""
        return sharding_fingerprint(self.program.layout.to_nnx())

    @functools.cached_property
    def layout(self) -> dict[str, str]:
        """path on disk -> how the array is split."""
        return layout_of(self.program.layout.to_nnx(), self.rules.layers)

    def record(self, step: int, row: Row) -> dict[str, Any]:
        """What is written beside the state of a step."""
        return record(
            step,
            recipe=self.recipe,
            config=self.config,
            mesh=self.mesh,
            rules=self.rules,
            layout=self.layout,
            fingerprint=self.fingerprint,
            corpus=self.corpus,
            row=row,
        )

    @property
    def parameters(self) -> list[Any]:
        """What is trained; statistics and random keys are state, but no parameters."""
        return jax.tree.leaves(nnx.filter_state(self.program.layout.to_nnx()["model"], nnx.Param))

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(x.shape) for x in self.parameters)


def describe(run: Run) -> None:
    """Say what the run consists of, before its first step."""
    devices = run.mesh.devices.flat
    leaves = run.program.layout.leaves
    shard = max(_bytes_by_device(leaves).values())
    whole = sum(math.prod(x.shape) * _itemsize(x) for x in leaves)
    run.say(f"mesh: {mesh_text(run.mesh.shape)} on {len(list(devices))} x {run.mesh.devices.flat[0].device_kind}")
    run.say(f"data: {run.corpus.description}")
    run.say(
        f"model: {run.num_parameters / 1e6:.2f}M parameters in {len(run.parameters)} arrays; "
        f"with the optimizer {bytes_text(whole)}, {bytes_text(shard)} a device"
    )
    if run.program.pipeline is not None:
        for line in str(run.program.pipeline.staged).splitlines():
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
    """Device -> bytes of the shards that it will hold."""
    found: dict[Any, int] = {}
    for leaf in leaves:
        size = math.prod(leaf.sharding.shard_shape(leaf.shape)) * _itemsize(leaf)
        for device in leaf.sharding.device_set:
            found[device] = found.get(device, 0) + size
    return found


def _itemsize(x: Any) -> int:
    return 8 if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x.dtype.itemsize


def go_on_or_raise(run: Run, error: SaveError) -> None:
    """What `checkpoint.on_failure` says of something that could not be written."""
    if run.config.checkpoint.on_failure == "stop":
        raise error
    run.say(f"warning: {error}; training goes on (checkpoint.on_failure)")
