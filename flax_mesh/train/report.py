"""A run: the objects that do not change between its steps, and the description printed at its start."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flax_mesh.data.run_data import RunData
from flax_mesh.errors import SaveError
from flax_mesh.recipe.compiler_options import options_text, parse_compiler_options
from flax_mesh.recipe.config import TrainConfig
from flax_mesh.recipe.optimizers.groups import trained_filter
from flax_mesh.recipe.program import TrainProgram
from flax_mesh.sharding.memory import is_on_host
from flax_mesh.step.state import TrainState
from flax_mesh.text import bytes_text, mesh_text
from flax_mesh.train.hooks.load import Factory
from flax_mesh.train.metrics import Row

Say = Callable[[str], None]


@dataclass(frozen=True)
class Run:
    program: TrainProgram
    data: RunData
    evaluate: Callable[[TrainState], Row] | None  # None: nothing is evaluated
    record: dict[str, Any]  # metadata saved with every checkpoint
    folder: Path
    say: Say
    hooks: Sequence[Callable[[Row], None]]
    factories: Sequence[tuple[str, Factory]]  # of the hooks of run.hooks and of the recipe, for process 0
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
    run.say(f"data: {run.data.description}")
    run.say(
        f"model: {program.num_parameters / 1e6:.2f}M parameters in {len(program.parameters)} arrays; "
        f"with the optimizer {bytes_text(total)}, {bytes_text(shard)} per device"
        + (f" and {bytes_text(hosted)} per device in the memory of the host" if hosted else "")
    )
    if program.pipeline is not None:
        for line in str(program.pipeline.staged).splitlines():
            run.say(line)
    config = run.config
    if config.run.eval_every and run.evaluate is None:
        run.say(
            f"note: run.eval_every={config.run.eval_every} evaluates nothing: make_batches has no held-out part, and "
            "the recipe has no eval_fns"
        )
    run.say(f"optimizer: {_optimizer_text(program)}")
    if config.run.compiler_options:
        run.say(f"compiler: {options_text(parse_compiler_options(config.run.compiler_options))}")
    settings = config.optimizer
    is_named = config.make_optimizer is None and config.make_schedule is None and settings.schedule != "constant"
    if is_named and config.run.steps > settings.decay_steps:
        run.say(
            f"note: the learning rate stays at {settings.end_learning_rate} from step {settings.decay_steps} on "
            f"(optimizer.decay_steps); the run has {config.run.steps} steps"
        )


def _optimizer_text(program: TrainProgram) -> str:
    """The name and the learning rate schedule, how many arrays are trained, and the moving average."""
    config = program.config
    own, own_schedule = (f"{name} of the recipe" for name in ("make_optimizer", "make_schedule"))
    parts = [config.optimizer.name if config.make_optimizer is None else own]
    if config.make_schedule is not None:
        parts.append(own_schedule)
    elif config.make_optimizer is None:
        parts.append(f"{config.optimizer.schedule} schedule")
    model = program.layout.to_nnx()["model"]
    trained = jax.tree.leaves(nnx.filter_state(model, trained_filter(config.wrt, config.optimizer.groups)))
    if len(trained) != len(program.parameters):
        count = sum(math.prod(x.shape) for x in trained)
        parts.append(f"trains {count / 1e6:.2f}M parameters in {len(trained)} arrays")
    if config.optimizer.ema:
        parts.append(f"evaluation uses the moving average of the parameters (ema {config.optimizer.ema})")
    return ", ".join(parts)


def _bytes_by_device(leaves: Sequence[Any]) -> dict[Any, int]:
    found: Counter[Any] = Counter()
    for leaf in leaves:
        size = math.prod(leaf.sharding.shard_shape(leaf.shape)) * _itemsize(leaf)
        found.update(dict.fromkeys(leaf.sharding.device_set, size))
    return found


def _itemsize(x: Any) -> int:
    return 8 if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x.dtype.itemsize
