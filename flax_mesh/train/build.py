"""From a TrainConfig to a TrainProgram: mesh, rules, optimizer, layout of the state, step."""

import math
import numbers
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from flax_mesh.axes import DEFAULT_AXES, PartitionAxis
from flax_mesh.errors import ConfigError
from flax_mesh.mesh.create import create_mesh
from flax_mesh.modes import optimizer_of
from flax_mesh.mpmd import MpmdMesh, Pipeline, StagedModel, split_stages
from flax_mesh.mpmd.schedules.schedule import Schedule
from flax_mesh.sharding.abstract import (
    ATTRIBUTE,
    abstract_split,
    abstract_state,
    init_state,
    model_layers,
    partition_rules,
)
from flax_mesh.sharding.annotations import annotations_of
from flax_mesh.sharding.constrain import spec_in_mesh
from flax_mesh.sharding.rules import PartitionRules, as_rules, group_findings, match_partition_rules
from flax_mesh.step.batch import microbatch_shapes
from flax_mesh.step.loss import RESERVED, Metrics
from flax_mesh.step.state import TrainState, abstract_train_state
from flax_mesh.step.step import Step, make_eval_step, make_train_step
from flax_mesh.text import array_text, at_most, count_text, listed, mesh_text
from flax_mesh.train.checks import check_compiler_options, check_config, check_on_mesh, method_of, model_notes
from flax_mesh.train.config import (
    CheckpointConfig,
    TrainConfig,
    mesh_shape,
    parse_compiler_options,
    parse_cut,
    pipeline_schedule,
    shard_over,
)
from flax_mesh.train.data.evaluation import run_eval_fns, traced_evaluate
from flax_mesh.train.data.own import OwnBatches, abstract_batch, batch_shapes, own_batches
from flax_mesh.train.optimizers.average import average_parameters
from flax_mesh.train.optimizers.groups import parse_groups, trained_filter
from flax_mesh.train.optimizers.make import make_optimizer, parameter_problems
from flax_mesh.train.optimizers.schedules import make_learning_rate_schedule
from flax_mesh.tree import named_leaves
from flax_mesh.user_code import check_arguments, joined, place_of, user_code

METRICS_OF_STEP = ("loss", "grad_norm", "learning_rate", "weight")  # of every recipe; its loss may add others
METRICS_OF_EVALUATION = ("eval_loss", "bits_per_byte")
RATES = tuple(f"{unit}_per_s{over}" for unit in ("examples", "tokens") for over in ("", "_per_device"))
# The names in rows of metrics.jsonl that no metric of `loss_fn` may have, besides those of the step.
FIELDS_OF_ROW = {"step", "skipped", "resumed_from", "mfu", "device_bytes", "seconds", "data_wait_seconds"}
FIELDS_OF_ROW |= {*RATES, *METRICS_OF_EVALUATION}
SHRINK_ORDER = ("pp", "dp", "fsdp", "sp", "ep", "tp")  # stages, copies, shards of the batch ...


@dataclass(frozen=True)
class TrainProgram:
    """Everything that a run of a recipe computes on a mesh. Nothing is compiled before the first call."""

    config: TrainConfig
    mesh: Mesh
    rules: PartitionRules
    layout: TrainState  # leaves are ShapeDtypeStructs with their shardings
    init: Callable[[], TrainState]
    step: Step
    evaluate: Callable[[TrainState, Any], Metrics]  # sums over a batch
    model: Callable[[TrainState], nnx.Module]  # the model on the whole mesh, for sampling
    pipeline: Pipeline | None = None
    batches: OwnBatches | None = None  # of a recipe with make_batches

    @property
    def parameters(self) -> list[Any]:
        """The trainable variables, abstract: statistics and random keys are not parameters."""
        return jax.tree.leaves(nnx.filter_state(self.layout.to_nnx()["model"], nnx.Param))

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(x.shape) for x in self.parameters)


def build_program(
    config: TrainConfig,
    say: Callable[[str], None] = lambda text: None,
    change: Callable[[Schedule], Schedule] = lambda schedule: schedule,
) -> TrainProgram:
    """The program of a recipe on the devices that are here. Raises ConfigError with a line for every mistake.

    `say` is called when the mesh was shrunk, and with the notes of the model; `change` may replace a pipeline's
    schedule.
    """
    if problems := check_config(config):
        raise ConfigError(problems)
    mesh = make_mesh(config, say)
    rules = run_rules(config, mesh)
    options, device = parse_compiler_options(config.run.compiler_options), mesh.local_devices[0]
    if problems := [*check_on_mesh(config, mesh, rules.axes), *check_compiler_options(options, device)]:
        raise ConfigError(problems)
    if config.mesh.rules:
        say(_report_rules(config, mesh, rules))
    for note in model_notes(config, mesh):
        say(note)
    own = own_batches(config)
    shapes = batch_shapes(config, own)
    program = replace(train_program(config, mesh, rules, shapes, change), batches=own)
    _check_functions(program, shapes)
    return program


def _check_functions(program: TrainProgram, shapes: Any) -> None:
    """Trace the step and the evaluation, and call `flops_per_token`: their exceptions are raised before the run starts.

    The traces are those that the first call would make; it reuses them.
    """
    config, run = program.config, program.config.run
    batch, place = abstract_batch(shapes, program.mesh, program.rules.axes), place_of(config.loss_fn)
    of_loss = _metrics_of_loss(program, batch)
    if program.pipeline is None and run.eval_every and config.make_batches is None:
        with user_code("loss_fn of a model in eval mode", place):
            _check_real_scalars(jax.eval_shape(program.evaluate, program.layout, batch))
    if (count := config.flops_per_token) is not None:
        check_arguments("flops_per_token", count, "config", "num_parameters", "sequence_length")
        with user_code("flops_per_token", place_of(count)):
            flops = count(config.model, program.num_parameters, config.data.sequence_length)
            if not isinstance(flops, numbers.Real):
                raise ValueError(f"it must return a number, got {type(flops).__name__}")
    evaluated = [*METRICS_OF_EVALUATION] if run.eval_every and config.make_batches is None else []
    if run.eval_every and config.eval_fns:
        evaluated += _metrics_of_eval_fns(program, of_loss)
    _check_best_metric(config, of_loss, evaluated)


def _metrics_of_loss(program: TrainProgram, batch: Any) -> dict[str, Any]:
    """Traces the step, and returns the metrics of `loss_fn`, abstract. ConfigError if rows cannot have them."""
    config, pipeline, of_step = program.config, program.pipeline, {*RESERVED}
    if pipeline is None:  # split_model has checked the arguments of a pipeline
        check_arguments("loss_fn", config.loss_fn, "model", "batch")
        of_step |= {"skipped"} if config.run.on_nonfinite == "skip" else set()
    with user_code("loss_fn", place_of(config.loss_fn)):
        if pipeline is None:
            found = jax.eval_shape(program.step, program.layout, batch)[1]
        else:
            part = microbatch_shapes(batch, config.pipeline.num_microbatches)
            found = pipeline.staged.cut(part, seed=config.run.seed).sums
        of_loss = {name: value for name, value in found.items() if name not in of_step}
        if taken := sorted(FIELDS_OF_ROW.intersection(of_loss)):
            names = f"rows of metrics.jsonl have {listed(map(repr, taken))} already"
            raise ValueError(f"metrics of loss_fn must have names of their own: {names}. Rename them.")
        _check_real_scalars(of_loss)
    return of_loss


def _check_real_scalars(metrics: Mapping[str, Any]) -> None:
    """Raises a ValueError for metrics, abstract, that a row or an `eval_fn` cannot have as numbers."""
    wrong = [
        f"{name!r} is {array_text(x)}"
        for name, x in sorted(metrics.items())
        if x.shape or jnp.issubdtype(x.dtype, jnp.complexfloating)
    ]
    if wrong:
        raise ValueError(
            f"metrics of loss_fn must be real scalars, but {listed(at_most(wrong))}. Return their sums or absolute "
            "values, or a metric of its own for every element."
        )


def _metrics_of_eval_fns(program: TrainProgram, of_loss: Collection[str]) -> list[str]:
    """Calls `eval_fns` with sums that are all 1, and returns the names of their metrics."""
    config, pipeline, place = program.config, program.pipeline, place_of(program.config.loss_fn)
    parts = 1 if pipeline is None else config.pipeline.num_microbatches

    def trace(batch: Any) -> Sequence[str]:
        with user_code("loss_fn of a model in eval mode", place):
            if pipeline is None:
                sums = jax.eval_shape(program.evaluate, program.layout, batch)
            else:
                sums = pipeline.staged.cut(microbatch_shapes(batch, parts), train=False).sums
            _check_real_scalars(sums)
            return list(sums)

    names = list(run_eval_fns(config.eval_fns, config, traced_evaluate(trace, program.mesh, program.rules.axes, parts)))
    if twice := [name for name in names if name in of_loss]:
        raise ConfigError([f"eval_fns: {name} is a metric of loss_fn too; use another name" for name in twice])
    return names


def _check_best_metric(config: TrainConfig, of_loss: Collection[str], evaluated: Sequence[str]) -> None:
    wanted, best = config.checkpoint.best_metric, config.checkpoint.keep_best
    known = [*METRICS_OF_STEP, *evaluated, *of_loss]
    if wanted in known or (not best and wanted == CheckpointConfig.best_metric):
        return
    more = "" if config.run.eval_every else "; held-out metrics require run.eval_every above 0"
    raise ConfigError(f"checkpoint.best_metric={wanted} is in no row of metrics, which have {listed(known)}{more}")


def _report_rules(config: TrainConfig, mesh: Mesh, rules: PartitionRules) -> str:
    """One line: how many arrays of the model `mesh.rules` splits, and which stay replicated."""
    (_, state), replicated = abstract_split(partial(make_model, config), mesh), []
    specs = match_partition_rules(rules, state, mesh=mesh, dropped=replicated)
    count = sum(any(spec) for spec in jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec)))
    total = count_text(len(jax.tree.leaves(state)), "array")
    text = f"rules: {config.mesh.rules} splits {count} of {total} on their largest dim"
    return "\n".join([text, *at_most([f"  {finding}" for finding in group_findings(replicated)])])


def train_program(
    config: TrainConfig,
    mesh: Mesh,
    rules: PartitionRules,
    batch: Any = None,
    change: Callable[[Schedule], Schedule] = lambda schedule: schedule,
) -> TrainProgram:
    """The program of a recipe on a mesh: a pipeline where the mesh has an axis pp, else one jitted step.

    `batch` has the shapes of a batch, which a pipeline needs; by default `batch_shapes(config)`.
    """
    if "pp" not in mesh.axis_names:
        return _plain(config, mesh, rules)
    pipeline = _pipeline(config, mesh, rules, batch_shapes(config) if batch is None else batch, change)
    return TrainProgram(
        config,
        mesh,
        rules,
        pipeline.abstract,
        pipeline.init_state,
        pipeline.step,
        pipeline.evaluate,
        pipeline.model,
        pipeline,
    )


def _plain(config: TrainConfig, mesh: Mesh, rules: PartitionRules) -> TrainProgram:
    make = partial(make_modules, config)
    table, over = rules if rules.table else None, shard_over(config)
    abstract = abstract_state(make, mesh, table, shard_optimizer_over=over, optimizer_memory=config.optimizer.memory)
    layout = abstract_train_state(make, abstract)
    step = make_train_step(
        config.loss_fn,
        layout,
        seed=config.run.seed,
        num_microbatches=config.pipeline.num_microbatches,
        layers=rules.layers or None,
        axes=rules.axes,
        learning_rate=learning_rate_of(config),
        compiler_options=parse_compiler_options(config.run.compiler_options),
        skip_nonfinite=config.run.on_nonfinite == "skip",
    )

    def init() -> TrainState:
        return layout.with_state(init_state(make, abstract))

    evaluate = make_eval_step(config.loss_fn, layout)
    return TrainProgram(config, mesh, rules, layout, init, step, evaluate, lambda state: state.merge()[0])


def _pipeline(
    config: TrainConfig, mesh: Mesh, rules: PartitionRules, batch: Any, change: Callable[[Schedule], Schedule]
) -> Pipeline:
    groups = MpmdMesh(mesh, "pp")
    staged, schedule = split_model(config, batch, rules.layers, groups.mpmd_dim, groups)
    return Pipeline(
        staged,
        transformation_of(config, staged.split_model[1], rules.layers),
        schedule=change(schedule),
        rules=rules if rules.table else None,  # None: the model is annotated
        axes=rules.axes,
        seed=config.run.seed,
        learning_rate=learning_rate_of(config),
        shard_optimizer_over=shard_over(config),
        optimizer_memory=config.optimizer.memory,
        compiler_options=parse_compiler_options(config.run.compiler_options),
        remat=config.pipeline.remat,  # pyright: ignore[reportArgumentType] (checked with the config)
        transport=config.pipeline.transport,  # pyright: ignore[reportArgumentType]
        skip_nonfinite=config.run.on_nonfinite == "skip",
    )


def split_model(
    config: TrainConfig, batch: Any, layers: Sequence[str], num_groups: int, mesh: MpmdMesh | AbstractMesh
) -> tuple[StagedModel, Schedule]:
    """The stages of the recipe's model and their schedule; `mesh` is an MpmdMesh or the mesh of one group."""
    schedule = pipeline_schedule(config.pipeline, num_groups)
    check_arguments("loss_fn", config.loss_fn, "model", "batch")
    with user_code("loss_fn", place_of(config.loss_fn)):
        staged = split_stages(
            config.loss_fn,
            partial(make_model, config),
            batch,
            mesh=mesh,
            schedule=schedule,
            layers=layers or None,
            wrt=trained_filter(config.wrt, config.optimizer.groups),
            **parse_cut(config.pipeline.cut),
        )
    return staged, schedule


def make_mesh(config: TrainConfig, say: Callable[[str], None]) -> Mesh:
    """The mesh of the run. `run.platform=auto` shrinks it to the available devices and reports that."""
    shape = mesh_shape(config)
    if shape["pp"] == 1:
        del shape["pp"]
    devices = jax.devices()
    if config.run.platform == "auto":
        fitted = fit_mesh(shape, len(devices))
        if any(size not in (-1, fitted[name]) for name, size in shape.items()):
            wanted, found = mesh_text(shape), mesh_text(fitted)
            say(f"mesh: {wanted} needs more than the {len(devices)} devices here; shrunk to {found}")
        shape = {name: size for name, size in fitted.items() if (name, size) != ("pp", 1)}
        used = math.prod(shape.values())
        if used < len(devices):
            say(f"mesh: uses {used} of the {len(devices)} devices here")
            devices = devices[:used]
    names = sorted(shape, key=lambda name: name != "pp")  # outermost: groups communicate over the slowest network
    try:
        dims = tuple(shape[name] for name in names)
        return create_mesh(dims, tuple(names), devices=devices, axis_types=config.mesh.axis_types)
    except ValueError as error:
        raise ConfigError(f"mesh.shape={config.mesh.shape}: {error}") from error


def fit_mesh(shape: Mapping[str, int], num_devices: int) -> dict[str, int]:
    """`shape` with axes divided by their smallest factors until it fits `num_devices`; -1 takes what is left."""
    free = [name for name, size in shape.items() if size == -1]
    fitted = dict(shape) | dict.fromkeys(free, 1)
    while math.prod(fitted.values()) > num_devices:
        name = next(axis for axis in SHRINK_ORDER if fitted.get(axis, 1) > 1)
        size = fitted[name]
        fitted[name] = size // next(factor for factor in range(2, size + 1) if size % factor == 0)
    for name in free:
        fitted[name] = num_devices // math.prod(fitted.values())
    return fitted


def run_rules(config: TrainConfig, mesh: Mesh | AbstractMesh | None = None) -> PartitionRules:
    """The rules of `mesh.rules`, of the recipe or of the model, in this order; empty if the model is annotated.

    Layers are those of the model's own table where the rules name none. `mesh` is in context while the model is made.
    """
    graphdef, state = abstract_split(partial(make_model, config), mesh)
    _call_filter(config.wrt, state)
    model = nnx.merge(graphdef, state)
    if config.mesh.rules:
        model_axes = getattr(model, "axes", None)
        axes = model_axes if isinstance(model_axes, PartitionAxis) else DEFAULT_AXES
        return PartitionRules(config.mesh.rules, axes, model_layers(model))
    if config.rules is not None:
        return as_rules(config.rules, layers=model_layers(model))
    if not hasattr(model, ATTRIBUTE) and annotations_of(state):
        return PartitionRules([], getattr(model, "axes", DEFAULT_AXES))
    return partition_rules(model)


def _call_filter(wrt: Any, model: nnx.State) -> None:
    """Calls the functions of `wrt`: their exceptions would be those of the loss or of the optimizer later."""
    for one in wrt if isinstance(wrt, list | tuple) else [wrt]:
        if callable(one) and not isinstance(one, type):
            check_arguments("wrt", one, "path", "variable")
    with user_code("wrt"):
        nnx.filter_state(model, wrt)


def batch_sharding(mesh: Mesh, axes: PartitionAxis) -> NamedSharding:
    """Layout of inputs and targets, (batch, sequence)."""
    return NamedSharding(mesh, spec_in_mesh(axes.resolve(("batch", "sequence")), axes, mesh))


def make_model(config: TrainConfig) -> nnx.Module:
    """The model of a run; only ever traced. An exception of its code is raised as a ConfigError with its line."""
    check_arguments("make_model", config.make_model, "config", "rngs")
    with user_code("make_model", place := place_of(config.make_model)):
        model = config.make_model(config.model, nnx.Rngs(config.run.seed))
    if not isinstance(model, nnx.Pytree):
        raise ConfigError(joined("make_model", place, f"it must return an nnx.Module, got {type(model).__name__}"))
    return model


def make_modules(config: TrainConfig) -> tuple[nnx.Module, nnx.Optimizer]:
    """Model and optimizer of a run; only ever traced."""
    model = make_model(config)
    state = nnx.state(model, graph=True)
    wrt = trained_filter(config.wrt, config.optimizer.groups)
    return model, optimizer_of(model, transformation_of(config, state, recipe_layers(config, model)), wrt)


def recipe_layers(config: TrainConfig, model: nnx.Module) -> Sequence[str]:
    """The layer lists or stacks that the rules of the recipe or of the model name."""
    return model_layers(model) if config.rules is None else as_rules(config.rules, layers=model_layers(model)).layers


def transformation_of(config: TrainConfig, model: nnx.State, layers: Sequence[str]) -> optax.GradientTransformation:
    """The optimizer of a recipe for a model with this state, of which only shapes and dtypes are used.

    Raises a ConfigError with one line for every pattern of a setting that selects no parameter.
    """
    wrt = trained_filter(config.wrt, config.optimizer.groups)
    trained = nnx.filter_state(model, wrt)
    parameters = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), trained)
    settings = config.optimizer
    if settings.name == "muon" and not settings.matrices:
        settings = replace(settings, matrices=method_of(config.model, "matrices", lambda: "")())
    frozen = [one for one in parse_groups(settings.groups)[0] if one.is_frozen]
    every = [path for path, _ in named_leaves(model)]
    problems = [
        f"optimizer.groups: no variable of the model has {one.pattern!r} in its path"
        for one in frozen
        if not any(re.search(one.pattern, path) for path in every)
    ]
    if not jax.tree.leaves(parameters):
        problems.append(
            f"wrt={getattr(wrt, '__name__', wrt)} must match a variable of the model; it matches none, and nothing "
            "would be trained."
        )
    elif config.make_optimizer is None:
        problems += parameter_problems(settings, parameters, layers)
    if problems:
        raise ConfigError(problems)
    chosen = _own_optimizer(config, parameters) or make_optimizer(settings, _own_schedule(config), layers)
    return optax.chain(chosen, average_parameters(settings.ema)) if settings.ema else chosen


def _own_optimizer(config: TrainConfig, parameters: nnx.State) -> optax.GradientTransformation | None:
    if config.make_optimizer is None:
        return None
    check_arguments("make_optimizer", config.make_optimizer, "config", "parameters")
    with user_code("make_optimizer", place := place_of(config.make_optimizer)):
        made = config.make_optimizer(config, parameters)
    if not isinstance(made, optax.GradientTransformation):
        problem = f"it must return an optax transformation, got {type(made).__name__}"
        raise ConfigError(joined("make_optimizer", place, problem))
    return made


def _own_schedule(config: TrainConfig) -> optax.Schedule | None:
    if config.make_schedule is None:
        return None
    check_arguments("make_schedule", config.make_schedule, "config")
    with user_code("make_schedule", place := place_of(config.make_schedule)):
        made = config.make_schedule(config)
        value = made(jnp.zeros([], jnp.int32)) if callable(made) else None
    if value is None or jnp.shape(value) != ():
        found = type(made).__name__ if value is None else f"a function that returns the shape {jnp.shape(value)}"
        problem = f"it must return a function of the step to a number, got {found}"
        raise ConfigError(joined("make_schedule", place, problem))
    return made


def learning_rate_of(config: TrainConfig) -> optax.Schedule | None:
    """The schedule whose value is reported; None if it is not known, with an optimizer of the recipe."""
    if config.make_schedule is None and config.make_optimizer is not None:
        return None
    return _own_schedule(config) or make_learning_rate_schedule(config.optimizer)
