"""What a run computes: the layout of its state, its initial state, its step and its evaluation, pipelined or not."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh

from flax_mesh.mpmd import MpmdMesh, Pipeline, Schedule
from flax_mesh.sharding import PartitionRules, abstract_state, init_state
from flax_mesh.step.loss import Metrics
from flax_mesh.step.state import TrainState, abstract_train_state
from flax_mesh.step.step import Step, make_eval_step, make_train_step
from flax_mesh.train.checks import make_learning_rate_schedule, make_modules, make_optimizer, shard_over
from flax_mesh.train.compiler import parse_compiler_options
from flax_mesh.train.config import TrainConfig
from flax_mesh.train.cut import cut_model


class TrainProgram(NamedTuple):
    """Nothing is compiled before the first call."""

    layout: TrainState  # leaves are ShapeDtypeStructs with their shardings
    init: Callable[[], TrainState]
    step: Step
    evaluate: Callable[[TrainState, Any], Metrics]  # sums over a batch
    model: Callable[[TrainState], nnx.Module]  # the model on the whole mesh, for sampling
    pipeline: Pipeline | None


def train_program(config: TrainConfig, mesh: Mesh, rules: PartitionRules) -> TrainProgram:
    """The program of the run: a pipeline where the mesh has an axis pp, else one jitted step."""
    build = _pipelined if "pp" in mesh.axis_names else _plain
    return build(config, mesh, rules)


def _plain(config: TrainConfig, mesh: Mesh, rules: PartitionRules) -> TrainProgram:
    make = partial(make_modules, config)
    abstract = abstract_state(make, mesh, rules if rules.table else None, shard_optimizer_over=shard_over(config))
    layout = abstract_train_state(make, abstract)
    step = make_train_step(
        config.loss_fn,
        layout,
        seed=config.run.seed,
        num_microbatches=config.pipeline.num_microbatches,
        layers=rules.layers,
        axes=rules.axes,
        learning_rate=make_learning_rate_schedule(config.optimizer),
        compiler_options=parse_compiler_options(config.run.compiler_options),
    )

    def init() -> TrainState:
        return TrainState(tuple(jax.tree.leaves(init_state(make, abstract))), layout.definition)

    return TrainProgram(
        layout, init, step, make_eval_step(config.loss_fn, layout), lambda state: state.merge()[0], None
    )


def _pipelined(config: TrainConfig, mesh: Mesh, rules: PartitionRules) -> TrainProgram:
    pipeline = recipe_pipeline(config, mesh, rules)
    return TrainProgram(
        pipeline.abstract, pipeline.init_state, pipeline.step, pipeline.evaluate, pipeline.model, pipeline
    )


def recipe_pipeline(
    config: TrainConfig,
    mesh: Mesh,
    rules: PartitionRules,
    change: Callable[[Schedule], Schedule] = lambda schedule: schedule,
) -> Pipeline:
    """The pipeline of a recipe on a mesh with an axis pp; `change` may put another schedule in the place of its own."""
    groups = MpmdMesh(mesh, "pp")
    staged, schedule = cut_model(config, rules.layers, groups.mpmd_dim, groups.unstack[0])
    return Pipeline(
        staged,
        groups,
        change(schedule),
        make_optimizer(config.optimizer),
        rules=rules if rules.table else None,  # None: the model is annotated
        axes=rules.axes,
        seed=config.run.seed,
        learning_rate=make_learning_rate_schedule(config.optimizer),
        shard_optimizer_over=shard_over(config),
        compiler_options=parse_compiler_options(config.run.compiler_options),
        remat=config.pipeline.remat,  # pyright: ignore[reportArgumentType] (checked with the config)
        transport=config.pipeline.transport,  # pyright: ignore[reportArgumentType]
    )
