"""From a TrainConfig to a TrainProgram: mesh, rules, optimizer, layout of the state, step."""

import math
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from flax_mesh.axes import PartitionAxis
from flax_mesh.data.evaluation import run_eval_fns, traced_evaluate
from flax_mesh.data.user_batches import OwnBatches, abstract_batch, batch_shapes, own_batches
from flax_mesh.errors import ConfigError
from flax_mesh.mpmd import MpmdMesh, Pipeline, StagedModel, split_stages
from flax_mesh.mpmd.schedules.schedule import Schedule
from flax_mesh.recipe.checks import check_config, check_on_mesh
from flax_mesh.recipe.compiler_options import check_compiler_options, parse_compiler_options
from flax_mesh.recipe.config import CheckpointConfig, TrainConfig, shard_over
from flax_mesh.recipe.model import make_model, model_notes, run_rules
from flax_mesh.recipe.optimizer import learning_rate_of, make_modules, transformation_of
from flax_mesh.recipe.optimizers.groups import trained_filter
from flax_mesh.recipe.schedule import parse_cut, pipeline_schedule
from flax_mesh.recipe.target import make_mesh
from flax_mesh.sharding.abstract import (
    abstract_split,
    abstract_state,
    init_state,
)
from flax_mesh.sharding.constrain import spec_in_mesh
from flax_mesh.sharding.rules import PartitionRules, group_findings, match_partition_rules
from flax_mesh.step.batch import microbatch_shapes
from flax_mesh.step.loss import RESERVED, Metrics
from flax_mesh.step.state import TrainState, abstract_train_state
from flax_mesh.step.step import Step, make_eval_step, make_train_step
from flax_mesh.text import array_text, at_most, count_text, listed
from flax_mesh.user_code import check_arguments, place_of, user_code

METRICS_OF_STEP = ("loss", "grad_norm", "learning_rate", "weight")  # of every recipe; its loss may add others
METRICS_OF_EVALUATION = ("eval_loss", "bits_per_byte")
RATES = tuple(f"{unit}_per_s{over}" for unit in ("examples", "tokens") for over in ("", "_per_device"))
# The names in rows of metrics.jsonl that no metric of `loss_fn` may have, besides those of the step.
FIELDS_OF_ROW = {"step", "skipped", "resumed_from", "mfu", "device_bytes", "seconds", "data_wait_seconds"}
FIELDS_OF_ROW |= {*RATES, *METRICS_OF_EVALUATION}


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


def batch_sharding(mesh: Mesh, axes: PartitionAxis) -> NamedSharding:
    """Layout of inputs and targets, (batch, sequence)."""
    return NamedSharding(mesh, spec_in_mesh(axes.resolve(("batch", "sequence")), axes, mesh))
