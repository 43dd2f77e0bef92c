"""F, B and W of the stages of a pipeline of decoders: estimated, and compiled for the devices of one group."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from flax_mesh.mpmd.runtime.compile import compile_stages
from flax_mesh.mpmd.runtime.placement import MODEL
from flax_mesh.mpmd.schedules.schedule import Schedule
from flax_mesh.mpmd.split.split import StagedModel
from flax_mesh.plan.forecast import Estimate
from flax_mesh.plan.pipeline import estimate_stages
from flax_mesh.sharding.abstract import abstract_state
from flax_mesh.step.batch import microbatch_shapes, microbatch_spec
from flax_mesh.step.state import abstract_train_state
from flax_mesh.train import PipelineConfig, TrainConfig
from flax_mesh.train.build import make_modules, run_rules, split_model
from flax_mesh.tree import named_leaves
from tests.plan.cases import Case, decoder_config


class _Split(NamedTuple):
    staged: StagedModel
    schedule: Schedule
    shardings: list[NamedSharding]  # of the leaves of the staged model
    axes: Any
    batch: dict[str, jax.ShapeDtypeStruct]
    remat: str


def _split(case: Case, mesh: AbstractMesh) -> _Split:
    settings = dict(case.settings)
    pipeline = PipelineConfig(
        num_microbatches=4, schedule=settings.pop("schedule"), remat=settings.pop("stage_remat", "none")
    )
    config: TrainConfig = decoder_config(pipeline=pipeline, **settings)
    rules = run_rules(config, mesh)
    staged, schedule = split_model(config, rules.layers, case.sizes["pp"], mesh)

    def make() -> Any:
        return make_modules(config)

    state = abstract_train_state(make, abstract_state(make, mesh, rules if rules.table else None, axes=rules.axes))
    model = [leaf for path, leaf in named_leaves(state.to_nnx()) if path.startswith(MODEL)]
    shardings = [model[leaf.source].sharding for leaf in staged.leaves]
    staged = staged.with_layout(mesh, [x.sharding.spec for x in model], rules.axes)
    rows = jax.ShapeDtypeStruct((config.data.batch_size, config.data.sequence_length), jnp.int32)
    return _Split(staged, schedule, shardings, rules.axes, {"inputs": rows, "targets": rows}, pipeline.remat)


def estimated_stages(case: Case, mesh: AbstractMesh) -> dict[str, Estimate]:
    split = _split(case, mesh)
    stages = estimate_stages(
        split.staged,
        split.schedule,
        split.batch,
        split.shardings,
        mesh,
        case.sizes,
        split.axes,
        remat=split.remat,
        seed=0,
        platform=case.platform,
    )
    return {f"{kind}{k}": one for k, stage in enumerate(stages) for kind, one in stage.programs.items()}


def compiled_stages(case: Case, mesh: Mesh) -> dict[str, Any]:
    """The stages compiled in order: a program's arguments have the shardings with which XLA returned them before."""
    split = _split(case, mesh.abstract_mesh)
    staged, schedule, count = split.staged, split.schedule, split.schedule.num_microbatches
    forward = staged.cut(microbatch_shapes(split.batch, count), seed=0, train=True)
    stages = compile_stages(
        forward,
        schedule.stage_to_group,
        split.shardings,
        [mesh] * schedule.num_groups,
        train=True,
        remat="full" if staged.needs_full_remat else split.remat,
        split=schedule.splits_backward,
    )
    found: dict[str, Any] = {}
    known: dict[int, tuple[Any, ...]] = {}
    residuals: dict[int, Any] = {}
    sent: dict[Any, Any] = {}
    cotangents: dict[Any, list[Any]] = {}

    def abstract(shape: Sequence[int], dtype: Any, spec: Iterable[Any] = ()) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    def leaf(at: int, wide: bool = False) -> jax.ShapeDtypeStruct:
        shape, dtype = forward.leaves[at].shape, forward.leaves[at].dtype
        return abstract(shape, jnp.promote_types(dtype, jnp.float32) if wide else dtype, split.shardings[at].spec)

    def rows(x: Any) -> jax.ShapeDtypeStruct:
        shape = (count, x.shape[0] // count, *x.shape[1:])
        return abstract(shape, x.dtype, (None, *microbatch_spec(shape[1:], mesh, split.axes)))

    def run(name: str, function: Any, *arguments: Any) -> Any:
        """Compiles, and returns abstract results."""
        lowered = function.lower(*arguments)
        found[name] = program = lowered.compile()
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            lowered.out_info,
            program.output_shardings,
        )

    data = [rows(x) for x in jax.tree.leaves(split.batch)]
    for stage in stages:
        slot = (abstract((), jnp.int32),) * 2
        received = [sent[v] for v in stage.received]
        known[stage.stage] = ([leaf(at) for at in stage.leaves], [data[at] for at in stage.data], slot, received)
        sums = [abstract((), jnp.float32) for _ in stage.sums]
        out, residuals[stage.stage], _, _ = run(f"F{stage.stage}", stage.forward, *known[stage.stage], sums)
        sent |= dict(zip(stage.sent, out, strict=True))
    for stage in reversed(stages):
        k = stage.stage
        summed = [cotangents[stage.sent[i]] for i in stage.floats_out]
        grads = [leaf(at, wide=True) for at in stage.trained]
        back, _, carry = run(f"B{k}", stage.backward, *known[k], residuals[k], summed, grads)
        for i, x in zip(stage.floats_in, back, strict=True):
            cotangents.setdefault(stage.received[i], []).append(x)
        if stage.has_weights:
            run(f"W{k}", stage.weights, *known[k], residuals[k], summed, carry, grads)
    return found
