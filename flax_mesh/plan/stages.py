"""F, B and W of the stages of a pipeline, one after another: the arguments of each follow from results before it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from flax_mesh.axes import PartitionAxis
from flax_mesh.mpmd.runtime.compile import StageFunctions, compile_stages
from flax_mesh.mpmd.schedules.schedule import Schedule
from flax_mesh.mpmd.split.split import StagedModel
from flax_mesh.step.batch import microbatch_shapes, microbatch_spec, microbatched_shape

# (kind, number of the stage, jitted function, abstract arguments) -> (a program, its abstract results with shardings)
MakeProgram = Callable[[str, int, Any, tuple[Any, ...]], tuple[Any, Any]]


class Stages(NamedTuple):
    """The stages, and the programs of their functions by (kind, stage), such as ("F", 0), in order."""

    functions: Sequence[StageFunctions]
    programs: dict[tuple[str, int], Any]
    arguments: dict[tuple[str, int], tuple[Any, ...]]  # abstract, with shardings


def visit_stages(
    staged: StagedModel,
    schedule: Schedule,
    batch: Any,
    shardings: Sequence[NamedSharding],
    mesh: Mesh | AbstractMesh,
    axes: PartitionAxis,
    make: MakeProgram,
    *,
    remat: str,
    seed: int,
) -> Stages:
    """Calls `make` for F of every stage in order, then for B and W from the last stage on; for equal stages once.

    `shardings` has one entry per leaf of the staged model. The arguments of a program have the shardings with which
    `make` returned them before.
    """
    count = schedule.num_microbatches
    forward = staged.cut(microbatch_shapes(batch, count), seed=seed, train=True)
    stages = compile_stages(
        forward,
        schedule.stage_to_group,
        shardings,
        [mesh] * schedule.num_groups,
        train=True,
        remat="full" if staged.needs_full_remat else remat,
        split=schedule.splits_backward,
    )
    result, cache = Stages(stages, {}, {}), {}

    def run(stage: StageFunctions, kind: str, function: Any, *arguments: Any) -> Any:
        shapes = [(x.shape, str(x.dtype), str(x.sharding)) for x in jax.tree.leaves(arguments)]
        key = (kind, len(stage.sums), len(stage.sent), str(shapes))
        if key not in cache:
            cache[key] = make(kind, stage.stage, function, arguments)
        at = kind, stage.stage
        result.arguments[at] = arguments
        result.programs[at], results = cache[key]
        return results

    def abstract(shape: Sequence[int], dtype: Any, spec: Iterable[Any] = ()) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    def rows(x: Any) -> jax.ShapeDtypeStruct:
        shape = microbatched_shape(x.shape, count)
        return abstract(shape, x.dtype, (None, *microbatch_spec(shape[1:], mesh, axes)))

    leaves = [abstract(x.shape, x.dtype, sharding.spec) for x, sharding in zip(forward.leaves, shardings, strict=True)]
    wide = [x.update(dtype=jnp.promote_types(x.dtype, jnp.float32)) for x in leaves]
    data, slot = [rows(x) for x in jax.tree.leaves(batch)], (abstract((), jnp.int32),) * 2
    sent: dict[Any, Any] = {}  # variable -> abstract activation
    given: list[tuple[Any, ...]] = []  # to B and W of every stage: the arguments of F, and its residuals
    for stage in stages:
        received = [sent[v] for v in stage.received]
        known = ([leaves[at] for at in stage.leaves], [data[at] for at in stage.data], slot, received)
        sums = [abstract((), jnp.float32) for _ in stage.sums]
        out, residuals, *_ = run(stage, "F", stage.forward, *known, sums)
        given.append((*known, residuals))
        sent |= dict(zip(stage.sent, out, strict=True))
    cotangents: dict[Any, list[Any]] = {}  # variable -> abstract gradients of its receivers
    for stage, first in zip(reversed(stages), reversed(given), strict=True):
        summed = [cotangents[stage.sent[i]] for i in stage.floats_out]
        grads = [wide[at] for at in stage.trained]
        back, _, carry = run(stage, "B", stage.backward, *first, summed, grads)
        for i, x in zip(stage.floats_in, back, strict=True):
            cotangents.setdefault(stage.received[i], []).append(x)
        if stage.has_weights:
            run(stage, "W", stage.weights, *first, summed, carry, grads)
    return result
