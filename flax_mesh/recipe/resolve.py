"""`resolve`: from the settings of a recipe and a target to the parts that a run, a plan or a report needs."""

# pyright: reportMissingTypeArgument=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false, reportUnknownVariableType=false

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from flax_mesh.data.config import DataConfig
from flax_mesh.data.evaluation import EvalFns
from flax_mesh.data.streams.process_rows import process_rows
from flax_mesh.data.user_batches import UserBatches
from flax_mesh.errors import ConfigError, labelled
from flax_mesh.fields import check_types
from flax_mesh.hardware import Chip, load_chip
from flax_mesh.lora import with_lora
from flax_mesh.modes import optimizer_of
from flax_mesh.mpmd.schedules.schedule import Schedule
from flax_mesh.recipe.checks import check_config, check_functions, check_on_mesh, sequence_length_of
from flax_mesh.recipe.compiler_options import check_compiler_options, parse_compiler_options
from flax_mesh.recipe.config import (
    CheckpointConfig,
    PipelineConfig,
    RunConfig,
    TrainConfig,
    shard_over,
    tokens_per_step,
    trained_variables,
)
from flax_mesh.recipe.model import (
    MakeModel,
    TracedOnce,
    make_model,
    method_of,
    model_notes,
    model_rules,
    with_constants,
)
from flax_mesh.recipe.optimizers.optimizer import RecipeOptimizer
from flax_mesh.recipe.schedule import pipeline_schedule, schedule_memory
from flax_mesh.recipe.target import Target
from flax_mesh.sharding.abstract import abstract_split
from flax_mesh.sharding.rules import PartitionRules, group_findings, idle_axes, match_partition_rules
from flax_mesh.step.loss import LossFn
from flax_mesh.step.options import Attention, StateLayout, StepOptions
from flax_mesh.text import at_most, count_text
from flax_mesh.tree import PyTree
from flax_mesh.user_code import place_of, user_code

ModelConfig = Any  # a dataclass of the user


@dataclass(frozen=True)
class Recipe:
    """A recipe on a target: its parts, checked. Everything is traced or computed from settings; nothing is allocated.

    Attributes:
        config: The settings as the user wrote them, which a run folder and checkpoints record.
        target: The devices, or the sizes of a mesh without them.
        mesh: The mesh of the step; without devices, and with groups, the abstract mesh of one group.
        model: The config of the model, a dataclass of the user.
        make_model: () -> the model, with its adapters.
        make: () -> (model, nnx.Optimizer).
        loss_fn: The loss function; with adapters, it is the loss of the adapted model.
        rules: The rule table, with the layers of the model; empty for a model with annotations.
        layout: How the state is sharded.
        optimizer: The optimizer, which `optimizer.transformation(state of the model)` returns.
        step_options: Seed, learning rate, XLA options, and whether steps that are not finite are skipped.
        schedule: The schedule of a pipeline; None without groups.
        user_batches: The batches of `make_batches`; None if the tokens of `data.source` are trained on.
        batch: The shapes of a batch, a pytree of ShapeDtypeStructs.
        tokens_per_step: Tokens of a batch; None for batches of `make_batches` without a known number.
        flops_per_token: num_parameters -> FLOPs per token as the recipe states them; None if it does not.
        constants: Name -> folder of the parameters of a constant.
        eval_fns: Name -> function of `evaluate`.
        sample: `sample` of the recipe.
        chip: The chip of `run.hardware`; None: the table of known chips.
        data, pipeline, checkpoint, run: These sections of the settings.
        notes: Lines to print: how the mesh differs from `mesh.shape`, and the notes of the model.
    """

    config: TrainConfig
    target: Target
    mesh: Mesh | AbstractMesh
    model: ModelConfig
    make_model: MakeModel
    make: Callable[[], tuple[nnx.Module, nnx.Optimizer]]
    loss_fn: LossFn
    rules: PartitionRules
    layout: StateLayout
    optimizer: RecipeOptimizer
    step_options: StepOptions
    schedule: Schedule | None
    user_batches: UserBatches | None
    batch: PyTree
    tokens_per_step: int | None
    flops_per_token: Callable[[int], float] | None
    constants: Mapping[str, str]
    eval_fns: EvalFns
    sample: Callable[..., jax.Array] | None
    chip: Chip | None
    data: DataConfig
    pipeline: PipelineConfig
    checkpoint: CheckpointConfig
    run: RunConfig
    notes: tuple[str, ...]

    @property
    def num_groups(self) -> int:
        return self.target.num_groups

    def dims(self) -> list[tuple[str, str, int]]:
        """(setting, logical axis, size) of the dims that the config of the model names with `dims()`."""
        return method_of(self.model, "dims", list)()

    @property
    def schedule_memory(self) -> int:
        """The most activations that a group may store in a searched schedule."""
        return schedule_memory(self.pipeline, self.num_groups)

    @property
    def has_adapters(self) -> bool:
        return self.config.lora.rank > 0

    @property
    def device_mesh(self) -> Mesh:
        """The mesh, of a target with devices."""
        assert isinstance(self.mesh, Mesh)
        return self.mesh


@check_types
def resolve(config: TrainConfig, target: Target, batch: PyTree = None) -> Recipe:
    """Check a recipe and derive its parts: the mesh, the rules, the optimizer, the schedule, the shapes of a batch.

    The model is traced to find its rules, and `make_batches` is called for its first batch. Nothing is compiled but
    `x + 1` with every XLA option of the recipe.

    Args:
        config: The settings.
        target: The devices, from `local_target`, or a mesh without them, from `abstract_target`.
        batch: The shapes of a batch, a pytree of ShapeDtypeStructs, if they are known: `make_batches` is not called.

    Returns:
        A `Recipe`.

    Raises:
        ConfigError: A setting is invalid, a function of the recipe has other arguments, the mesh does not divide a dim
            of the batch or of the model, or the devices refuse an XLA option. Lists all of them.

    Example:
        >>> from flax_mesh.recipe import abstract_target, resolve
        >>> from flax_mesh.train import load_recipe
        >>> config = load_recipe("recipes/tiny.py")
        >>> recipe = resolve(config, abstract_target(config.mesh, "tpu"))
        >>> recipe.mesh.shape["tp"], recipe.batch["inputs"].shape
        (2, (16, 128))
    """
    check(config)
    return resolve_checked(config, target, batch)


def resolve_checked(config: TrainConfig, target: Target, batch: PyTree = None, *, tries_options: bool = True) -> Recipe:
    """`resolve` after `check`, which must precede whatever reads a setting, such as the mesh of a target.

    `tries_options`: whether XLA options are tried on the devices. Layouts do not depend on them.
    """
    mesh = mesh_of(config, target)
    make = maker(config, mesh)
    rules = rules_of(config, mesh, make)
    problems: list[str] = list(check_on_mesh(config, mesh, rules.axes))
    if tries_options and isinstance(mesh, Mesh):
        problems += check_compiler_options(parse_compiler_options(config.run.compiler_options), mesh.local_devices[0])
    if problems:
        raise ConfigError(problems)
    return _recipe(config, target, mesh, make, rules, batch)


def check(config: TrainConfig) -> None:
    """Raise one ConfigError with a line for every mistake that needs neither devices nor a trace."""
    if problems := [*check_config(config), *check_functions(config)]:
        raise ConfigError(problems)


def derive(config: TrainConfig, target: Target, batch: PyTree = None) -> Recipe:
    """`resolve`, for reports that list the dims which the mesh does not divide.

    `batch` are the shapes of a batch if they are known, or {} if nothing needs them: `make_batches` is not called then.
    """
    mesh = mesh_of(config, target)
    make = maker(config, mesh)
    return _recipe(config, target, mesh, make, rules_of(config, mesh, make), batch)


def mesh_of(config: TrainConfig, target: Target) -> Mesh | AbstractMesh:
    """The mesh of a recipe on a target; a ConfigError names `mesh.shape` if it does not fit the devices."""
    try:
        return target.mesh(config.mesh.axis_types)
    except ValueError as error:
        raise ConfigError(f"mesh.shape={config.mesh.shape}: {error}") from error


def _recipe(
    config: TrainConfig,
    target: Target,
    mesh: Mesh | AbstractMesh,
    make: MakeModel,
    rules: PartitionRules,
    batch: PyTree,
) -> Recipe:
    optimizer = optimizer_of_recipe(config, rules)
    user_batches = None
    if config.make_batches is not None and batch is None:
        data, own_rows = config.data, None
        if data.rows == "process":
            own_rows = process_rows(data.batch_size, mesh, rules.axes)
        make_batches = partial(config.make_batches, config, *filter(None, [own_rows]))
        user_batches = UserBatches(make_batches, data.batch_size, resumable=data.resumable, own_rows=own_rows)
    shapes = user_batches.shapes if user_batches else token_shapes(config.data) if batch is None else batch
    flops, run = config.flops_per_token, config.run
    loss_fn = config.loss_fn
    if config.lora.rank:
        with user_code("loss_fn", place_of(loss_fn)):
            make = config.lora.adapted(make, loss_fn, shapes or token_shapes(config.data), run.seed)
        loss_fn = with_lora(loss_fn)
    xla = parse_compiler_options(run.compiler_options)
    skips, attention = run.on_nonfinite == "skip", cast(Attention, run.attention)  # checked with the config
    options = StepOptions(run.seed, optimizer.learning_rate(), xla, skips, attention)
    notes = model_notes(config.model, mesh, sequence_length_of(config))
    table = rules if rules.table else None  # None: the model is annotated
    return Recipe(
        config=config,
        target=target,
        mesh=mesh,
        model=config.model,
        make_model=make,
        make=TracedOnce(partial(_make_modules, make, optimizer)),
        loss_fn=loss_fn,
        rules=rules,
        layout=StateLayout(table, rules.axes, shard_over(config.optimizer), config.optimizer.memory),
        optimizer=optimizer,
        step_options=options,
        schedule=pipeline_schedule(config.pipeline, target.num_groups) if target.num_groups > 1 else None,
        user_batches=user_batches,
        batch=shapes,
        tokens_per_step=tokens_per_step(config),
        flops_per_token=flops and _flops_of(flops, config.model, config.data.sequence_length),
        constants={name: folder for name, (_, folder) in constants_of(config).items()},
        eval_fns={name: partial(function, config) for name, function in config.eval_fns.items()},
        sample=config.sample,
        chip=load_chip(run.hardware) if run.hardware else None,
        data=config.data,
        pipeline=config.pipeline,
        checkpoint=config.checkpoint,
        run=run,
        notes=(*target.notes, *_rules_note(make, mesh, rules, config.mesh.rules or config.rules), *notes),
    )


def retarget(recipe: Recipe, target: Target) -> Recipe:
    """The recipe on another target, for batches of the same shapes: `make_batches` is not called again."""
    return derive(recipe.config, target, recipe.batch)


def maker(config: TrainConfig, mesh: Mesh | AbstractMesh | None = None) -> MakeModel:
    """() -> the model of a recipe, with the config that `on_mesh(mesh)` of the model config returns, if it has this."""
    model = config.model
    if mesh is not None:
        model = method_of(model, "on_mesh", lambda _: model)(mesh)
    make = partial(make_model, config.make_model, model, config.run.seed)
    constants = {name: make_constant for name, (make_constant, _) in constants_of(config).items()}
    return TracedOnce(partial(with_constants, make, constants) if constants else make)


def constants_of(config: TrainConfig) -> dict[str, tuple[MakeModel, str]]:
    """Name -> (make, folder) of the constants of a recipe."""
    constants: dict[str, tuple[MakeModel, str]] = {}
    for name, function in config.constants.items():
        with labelled(f"constants[{name!r}]"), user_code("its function", place_of(function)):
            make, folder = function(config)
            constants[name] = make, str(folder)
    return constants


def rules_of(
    config: TrainConfig, mesh: Mesh | AbstractMesh | None = None, make: MakeModel | None = None
) -> PartitionRules:
    """The rules of a recipe on a mesh, with the layers of its model; `make` is its `maker`."""
    return model_rules(make or maker(config, mesh), config.mesh.rules, config.rules, config.wrt, mesh)


def optimizer_of_recipe(config: TrainConfig, rules: PartitionRules) -> RecipeOptimizer:
    make, schedule = config.make_optimizer, config.make_schedule
    return RecipeOptimizer(
        config.optimizer,
        trained_variables(config),
        rules.layers,
        method_of(config.model, "matrices", lambda: "")(),
        make and partial(make, config),
        schedule and partial(schedule, config),
    )


def _make_modules(make: MakeModel, optimizer: RecipeOptimizer) -> tuple[nnx.Module, nnx.Optimizer]:
    model = make()
    transformation = optimizer.transformation(nnx.state(model, graph=True))
    return model, optimizer_of(model, transformation, optimizer.trained)


def _flops_of(flops: Callable[..., float], model: object, sequence_length: int) -> Callable[[int], float]:
    @wraps(flops)  # so that errors name the line of the user's function
    def flops_per_token(num_parameters: int) -> float:
        return flops(model, num_parameters, sequence_length)

    return flops_per_token


def token_shapes(data: DataConfig) -> dict[str, jax.ShapeDtypeStruct]:
    rows = jax.ShapeDtypeStruct((data.batch_size, data.sequence_length), jnp.int32)
    return {"inputs": rows, "targets": rows}


def _rules_note(make: MakeModel, mesh: Mesh | AbstractMesh, rules: PartitionRules, text: object) -> list[str]:
    """For mesh axes as rules, the `text`: how many arrays are split, which stay replicated, and axes without work."""
    if not text or not isinstance(text, str):
        return []
    (_, state), replicated = abstract_split(make, mesh), []
    specs = match_partition_rules(rules, state, mesh=mesh, dropped=replicated)
    count = sum(any(spec) for spec in jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec)))
    total = count_text(len(jax.tree.leaves(state)), "array")
    head = f"rules: {text} splits {count} of {total} on their largest dim"
    idle = [f"  {problem}" for problem in [idle_axes(rules, mesh, "pp")] if problem]
    return ["\n".join([head, *idle, *at_most([f"  {finding}" for finding in group_findings(replicated)])])]
