"""A run: the objects that do not change between its steps, and the description printed at its start."""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flax_mesh.data.run_data import RunData
from flax_mesh.errors import SaveError
from flax_mesh.recipe.optimizers.config import OptimizerConfig
from flax_mesh.recipe.program import TrainProgram
from flax_mesh.recipe.resolve import Recipe
from flax_mesh.sharding.memory import is_on_host
from flax_mesh.step.state import TrainState
from flax_mesh.store import StorePath
from flax_mesh.text import bytes_text, mesh_text
from flax_mesh.train.hooks.load import Factory
from flax_mesh.train.metrics import Row
from flax_mesh.tree import Shaped, model_state, shard_bytes

Say = Callable[[str], None]


@dataclass(frozen=True)
class Run:
    program: TrainProgram
    data: RunData
    evaluate: Callable[[TrainState], Row] | None  # None: nothing is evaluated
    record: dict[str, Any]  # metadata saved with every checkpoint
    folder: Path
    publish: Callable[[], None]  # the files of a folder in a store
    check: Callable[[], None]  # that this run has the lease of such a folder
    say: Say
    hooks: Sequence[Callable[[Row], None]]
    factories: Sequence[tuple[str, Factory]]  # of the hooks of run.hooks and of the recipe, for process 0
    should_stop: Callable[[], bool]
    trace: Path | None

    @property
    def recipe(self) -> Recipe:
        return self.program.recipe

    def warn_or_raise(self, error: SaveError) -> None:
        choice, in_store = self.recipe.checkpoint.on_failure, isinstance(self.folder, StorePath)
        if choice == "stop" or (choice == "auto" and not in_store):
            raise error
        self.say(f"warning: {error}; training continues (checkpoint.on_failure)")


def describe(run: Run) -> None:
    program, leaves = run.program, run.program.layout.leaves
    shard = max(_bytes_by_device([x for x in leaves if not is_on_host(x)]).values())
    hosted = max(_bytes_by_device([x for x in leaves if is_on_host(x)]).values(), default=0)
    total = sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
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
    recipe, settings = run.recipe, run.recipe.optimizer.settings
    if recipe.run.eval_every and run.evaluate is None:
        run.say(
            f"note: run.eval_every={recipe.run.eval_every} evaluates nothing: make_batches has no held-out part, and "
            "the recipe has no eval_fns"
        )
    run.say(f"optimizer: {_optimizer_text(program)}")
    for line in rounding_notes(_trained(program), None if recipe.optimizer.make else settings):
        run.say(f"note: {line}")
    if recipe.run.compiler_options:
        run.say(f"compiler: {recipe.run.compiler_options}")
    is_named = recipe.optimizer.make is None and recipe.optimizer.make_schedule is None
    if is_named and settings.schedule != "constant" and recipe.run.steps > settings.decay_steps:
        run.say(
            f"note: the learning rate stays at {settings.end_learning_rate} from step {settings.decay_steps} on "
            f"(optimizer.decay_steps); the run has {recipe.run.steps} steps"
        )


def _optimizer_text(program: TrainProgram) -> str:
    """The name and the learning rate schedule, how many arrays are trained, and the moving average."""
    optimizer = program.recipe.optimizer
    settings = optimizer.settings
    parts = [settings.name if optimizer.make is None else "make_optimizer of the recipe"]
    if optimizer.make_schedule is not None:
        parts.append("make_schedule of the recipe")
    elif optimizer.make is None:
        parts.append(f"{settings.schedule} schedule")
    trained = _trained(program)
    if len(trained) != len(program.parameters):
        count = sum(math.prod(x.shape) for x in trained)
        parts.append(f"trains {count / 1e6:.2f}M parameters in {len(trained)} arrays")
    if settings.ema:
        parts.append(f"evaluation uses the moving average of the parameters (ema {settings.ema})")
    return ", ".join(parts)


def _trained(program: TrainProgram) -> list[jax.ShapeDtypeStruct]:
    """The trained arrays, abstract."""
    return jax.tree.leaves(nnx.filter_state(model_state(program.layout.to_nnx()), program.recipe.optimizer.trained))


def rounding_notes(trained: Sequence[Shaped], settings: OptimizerConfig | None) -> list[str]:
    """One line for each half-precision dtype of the trained arrays; `settings` are those of an optimizer by name."""
    notes = []
    half = {x.dtype for x in trained if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4}
    for dtype in sorted(half, key=str):
        count, eps = sum(math.prod(x.shape) for x in trained if x.dtype == dtype), float(jnp.finfo(dtype).eps)
        lost = f"a step that changes one by less than 1/{4 / eps:.0f} of its value is rounded away"
        # (1 - b2) times a squared gradient is then below half of the distance between two numbers.
        if settings and settings.name in ("adamw", "muon") and 1 - settings.b2 < eps / 2:
            lost += f", and so are changes of the second moment (optimizer.b2={settings.b2})"
        notes.append(
            f"{count:,} parameters are stored in {dtype}: {lost}. Store them in float32, and compute in {dtype}: "
            "param_dtype and dtype of the layers"
        )
    return notes


def _bytes_by_device(leaves: Sequence[jax.Array]) -> dict[Hashable, int]:
    sizes: Counter[Hashable] = Counter()
    for leaf in leaves:
        sizes.update(dict.fromkeys(leaf.sharding.device_set, shard_bytes(leaf)))
    return sizes
