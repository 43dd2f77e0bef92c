"""From a Recipe to a TrainProgram: layout of the state, step, evaluation."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

import math
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from flax_mesh.axes import PartitionAxis
from flax_mesh.data.evaluation import TracedEvaluate, run_eval_fns
from flax_mesh.data.user_batches import abstract_batch
from flax_mesh.errors import ConfigError
from flax_mesh.fields import check_types
from flax_mesh.mpmd import MpmdMesh, Pipeline, StagedModel, split_stages
from flax_mesh.recipe.config import CheckpointConfig, TrainConfig
from flax_mesh.recipe.overrides import with_commits
from flax_mesh.recipe.resolve import Recipe, check, resolve_checked
from flax_mesh.recipe.saved import saved_attention
from flax_mesh.recipe.schedule import parse_cut
from flax_mesh.recipe.target import local_target
from flax_mesh.sharding.abstract import abstract_state, init_state
from flax_mesh.sharding.constrain import spec_in_mesh
from flax_mesh.sharding.rules import PartitionRules
from flax_mesh.step.batch import microbatch_shapes
from flax_mesh.step.loss import RESERVED, Metrics
from flax_mesh.step.options import Attention
from flax_mesh.step.state import TrainState, abstract_train_state
from flax_mesh.step.step import Step, check_callbacks, make_eval_step, make_train_step
from flax_mesh.text import array_text, at_most, listed
from flax_mesh.tree import PyTree, Shaped, model_state
from flax_mesh.user_code import place_of, user_code

METRICS_OF_STEP = ("loss", "grad_norm", "learning_rate", "weight")  # of every recipe; its loss may add others
METRICS_OF_EVALUATION = ("eval_loss", "bits_per_byte")
RATES = tuple(f"{unit}_per_s{over}" for unit in ("examples", "tokens") for over in ("", "_per_device"))
# The names in rows of metrics.jsonl that no metric of `loss_fn` may have, besides the metrics of the step.
FIELDS_OF_ROW = {
    *("step", "skipped", "resumed_from", "mfu", "device_bytes", "seconds", "data_wait_seconds"),
    *RATES,
    *METRICS_OF_EVALUATION,
}


@dataclass(frozen=True)
class TrainProgram:
    """Everything that a run of a recipe computes on a mesh. Nothing is compiled before the first call."""

    recipe: Recipe
    layout: TrainState  # leaves are ShapeDtypeStructs with their shardings
    init: Callable[[], TrainState]
    step: Step
    evaluate: Callable[[TrainState, PyTree], Metrics]  # sums over a batch
    check: Callable[[], None]  # raises the exception of a callback in a call of `step` or `evaluate`
    model: Callable[[TrainState], nnx.Module]  # the model on the whole mesh, with its adapters
    pipeline: Pipeline | None = None

    @property
    def mesh(self) -> Mesh:
        return self.recipe.device_mesh

    @property
    def rules(self) -> PartitionRules:
        return self.recipe.rules

    @property
    def parameters(self) -> list[jax.ShapeDtypeStruct]:
        """The trainable variables, abstract: statistics and random keys are not parameters."""
        return jax.tree.leaves(nnx.filter_state(model_state(self.layout.to_nnx()), nnx.Param))

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(x.shape) for x in self.parameters)

    @property
    def attention_forms(self) -> tuple[str, ...]:
        """The form of every attention of a traced step, as `run.attention` chose it."""
        if self.pipeline is None:
            return getattr(self.step, "attention_forms", ())
        staged = self.pipeline.staged
        return staged.cut(staged.example, seed=self.recipe.step_options.seed).forms

    @property
    def num_parts(self) -> int:
        """Number of parts of a batch that is evaluated: the microbatches of a pipeline, 1 without one."""
        return 1 if self.pipeline is None else self.recipe.pipeline.num_microbatches


class _Traceable(Protocol):
    def eval_shape(self, state: TrainState, batch: PyTree) -> PyTree: ...


def eval_shape(function: Callable[..., object], layout: TrainState, batch: PyTree) -> PyTree:
    """The abstract result of a step or an evaluation."""
    return cast(_Traceable, function).eval_shape(layout, batch)


@check_types
def build_program(
    config: TrainConfig, say: Callable[[str], None] = lambda text: None, *, restart: bool = False
) -> TrainProgram:
    """The program of a recipe on the devices that are here. Raises ConfigError with a line for every mistake.

    `say` is called when the mesh was shrunk, and with the notes of the model. The forms that `run.attention=auto` chose
    for a run with checkpoints in `run.folder` are kept, unless it is a `restart` of this run.

    Example:
        >>> from flax_mesh.train import build_program, load_recipe
        >>> program = build_program(load_recipe("recipes/tiny.py"))  # traces the model, and compiles nothing
        >>> program.mesh.size, program.num_parameters > 1e5
        (8, True)
    """
    config = with_commits(config)
    check(config)
    recipe = resolve_checked(config, local_target(config.mesh, config.run.platform))
    if not restart and (began := saved_attention(config.run)):
        recipe = replace(recipe, step_options=replace(recipe.step_options, attention=began))
    for note in recipe.notes:
        say(note)
    program = train_program(recipe)
    _check_functions(program)
    for line in attention_lines(program):
        say(line)
    return program


def attention_lines(program: TrainProgram) -> tuple[str, ...]:
    """The effect of run.attention on a traced step; () for a pipeline, whose stages print it."""
    return () if program.pipeline is not None else getattr(program.step, "attention_lines", ())


def train_program(recipe: Recipe) -> TrainProgram:
    """The program of a recipe: a pipeline if its mesh has groups, else one jitted step."""
    if recipe.schedule is None:
        return _plain(recipe)
    groups = MpmdMesh(recipe.device_mesh, "pp")
    staged = split_model(recipe, groups)
    pipeline = Pipeline(
        staged,
        recipe.optimizer.transformation(staged.split_model[1]),
        layout=recipe.layout,
        options=recipe.step_options,
        remat=recipe.pipeline.remat,  # pyright: ignore[reportArgumentType] (checked with the config)
        transport=recipe.pipeline.transport,  # pyright: ignore[reportArgumentType]
    )
    return TrainProgram(
        recipe,
        pipeline.abstract,
        pipeline.init_state,
        pipeline.step,
        pipeline.evaluate,
        pipeline.errors.check,
        lambda state: cast(nnx.Module, pipeline.model(state)),
        pipeline,
    )


def _plain(recipe: Recipe) -> TrainProgram:
    abstract = abstract_state(recipe.make, recipe.mesh, **vars(recipe.layout))
    layout = abstract_train_state(recipe.make, abstract)
    step = make_train_step(
        recipe.loss_fn,
        layout,
        num_microbatches=recipe.pipeline.num_microbatches,
        layers=recipe.rules.layers or None,
        axes=recipe.rules.axes,
        options=recipe.step_options,
    )

    def init() -> TrainState:
        return layout.with_state(init_state(recipe.make, abstract))

    option = cast(Attention, recipe.run.attention)  # the forms of a resumed run are those of its step
    evaluate = make_eval_step(recipe.loss_fn, layout, axes=recipe.rules.axes, attention=option)
    check = partial(check_callbacks, step, evaluate)
    return TrainProgram(recipe, layout, init, step, evaluate, check, lambda state: state.merge()[0])


def split_model(recipe: Recipe, mesh: MpmdMesh | AbstractMesh) -> StagedModel:
    """The stages of the recipe's model; `mesh` is an MpmdMesh or the mesh of one group."""
    with user_code("loss_fn", place_of(recipe.loss_fn)):
        return split_stages(
            recipe.loss_fn,
            recipe.make_model,
            recipe.batch,
            mesh=mesh,
            schedule=recipe.schedule,
            layers=recipe.rules.layers or None,
            wrt=recipe.optimizer.trained,
            attention=recipe.step_options.attention,
            **parse_cut(recipe.pipeline.cut),
        )


def batch_sharding(mesh: Mesh, axes: PartitionAxis) -> NamedSharding:
    """Layout of inputs and targets, (batch, sequence)."""
    return NamedSharding(mesh, spec_in_mesh(axes.resolve(("batch", "sequence")), axes, mesh))


def _check_functions(program: TrainProgram) -> None:
    """Trace the step and the evaluation, and call `flops_per_token`: their exceptions are raised before the run starts.

    The traces are those that the first call would make; it reuses them.
    """
    recipe, every = program.recipe, program.recipe.run.eval_every
    batch, place = abstract_batch(recipe.batch, program.mesh, program.rules.axes), place_of(recipe.loss_fn)
    of_loss = _metrics_of_loss(program, batch)
    has_held_out = bool(every) and recipe.user_batches is None
    if program.pipeline is None and has_held_out:
        with user_code("loss_fn of a model in eval mode", place):
            _check_real_scalars(eval_shape(program.evaluate, program.layout, batch))
    if recipe.flops_per_token is not None:
        with user_code("flops_per_token", place_of(recipe.flops_per_token)):
            flops = recipe.flops_per_token(program.num_parameters)
            if not isinstance(flops, numbers.Real):
                raise ValueError(f"it must return a number, got {type(flops).__name__}")
    evaluated = [*METRICS_OF_EVALUATION] if has_held_out else []
    if every and recipe.eval_fns:
        evaluated += _metrics_of_eval_fns(program, of_loss)
    _check_best_metric(recipe.checkpoint, every, of_loss, evaluated)


def _metrics_of_loss(program: TrainProgram, batch: PyTree) -> dict[str, Shaped]:
    """Traces the step, and returns the metrics of `loss_fn`, abstract. ConfigError if rows cannot have them."""
    recipe, pipeline, of_step = program.recipe, program.pipeline, {*RESERVED}
    if pipeline is None and recipe.step_options.skip_nonfinite:
        of_step |= {"skipped"}
    with user_code("loss_fn", place_of(recipe.loss_fn)):
        if pipeline is None:
            metrics = eval_shape(program.step, program.layout, batch)[1]
        else:
            part = microbatch_shapes(batch, recipe.pipeline.num_microbatches)
            metrics = pipeline.staged.cut(part, seed=recipe.step_options.seed).sums
        of_loss = {name: value for name, value in metrics.items() if name not in of_step}
        if taken := sorted(FIELDS_OF_ROW.intersection(of_loss)):
            names = f"rows of metrics.jsonl have {listed(map(repr, taken))} already"
            raise ValueError(f"metrics of loss_fn must have names that the rows do not use: {names}. Rename them.")
        _check_real_scalars(of_loss)
    return of_loss


def _check_real_scalars(metrics: Mapping[str, Shaped]) -> None:
    """Raises a ValueError for metrics, abstract, that a row or an `eval_fn` cannot have as numbers."""
    wrong = [
        f"{name!r} is {array_text(x)}"
        for name, x in sorted(metrics.items())
        if x.shape or jnp.issubdtype(x.dtype, jnp.complexfloating)
    ]
    if wrong:
        raise ValueError(
            f"metrics of loss_fn must be real scalars, but {listed(at_most(wrong))}. Return their sums or absolute "
            "values, or one metric for every element."
        )


def _metrics_of_eval_fns(program: TrainProgram, of_loss: Collection[str]) -> list[str]:
    """Calls `eval_fns` with sums that are all 1, and returns the names of their metrics."""
    recipe, pipeline, parts = program.recipe, program.pipeline, program.num_parts

    def trace(batch: PyTree) -> Sequence[str]:
        with user_code("loss_fn of a model in eval mode", place_of(recipe.loss_fn)):
            if pipeline is None:
                sums = eval_shape(program.evaluate, program.layout, batch)
            else:
                sums = pipeline.staged.cut(microbatch_shapes(batch, parts), train=False).sums
            _check_real_scalars(sums)
            return list(sums)

    names = list(run_eval_fns(recipe.eval_fns, TracedEvaluate(trace, program.mesh, program.rules.axes, parts)))
    if twice := [name for name in names if name in of_loss]:
        raise ConfigError([f"eval_fns: {name} is a metric of loss_fn too; use another name" for name in twice])
    return names


def _check_best_metric(
    checkpoint: CheckpointConfig, eval_every: int, of_loss: Collection[str], evaluated: Sequence[str]
) -> None:
    wanted, best = checkpoint.best_metric, checkpoint.keep_best
    known = [*METRICS_OF_STEP, *evaluated, *of_loss]
    if wanted in known or (not best and wanted == CheckpointConfig.best_metric):
        return
    hint = "" if eval_every else "; held-out metrics require run.eval_every above 0"
    raise ConfigError(f"checkpoint.best_metric={wanted} is in no row of metrics, which have {listed(known)}{hint}")
