"""F, B and W of the stages of a pipeline, one after another: the arguments of each follow from results before it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from flax_mesh.axes import PartitionAxis
from flax_mesh.mpmd.runtime.compile import Jitted, StageFunctions, compile_stages
from flax_mesh.mpmd.schedules.schedule import Schedule
from flax_mesh.mpmd.split.split import StagedModel
from flax_mesh.step.batch import microbatch_shapes, microbatch_spec, microbatched_shape
from flax_mesh.tree import PyTree

Abstract = jax.ShapeDtypeStruct
Program = TypeVar("Program")
# (kind, number of the stage, jitted function, abstract arguments) -> (a program, its abstract results with shardings)
MakeProgram = Callable[[str, int, Jitted, tuple[PyTree, ...]], tuple[Program, PyTree]]


@dataclass
class Stages(Generic[Program]):
    """The stages, and the programs of their functions by (kind, stage), such as ("F", 0), in order."""

    functions: Sequence[StageFunctions]
    make: MakeProgram[Program]
    programs: dict[tuple[str, int], Program] = field(default_factory=dict)
    arguments: dict[tuple[str, int], tuple[PyTree, ...]] = field(default_factory=dict)  # abstract, with shardings
    by_shapes: dict[tuple[object, ...], tuple[Program, PyTree]] = field(default_factory=dict)  # once for equal stages

    def run(self, stage: StageFunctions, kind: str, function: Jitted, *arguments: PyTree) -> PyTree:
        """The abstract results of a function of a stage."""
        shapes = [(x.shape, str(x.dtype), str(x.sharding)) for x in jax.tree.leaves(arguments)]
        key = (kind, len(stage.sums), len(stage.sent), str(shapes))
        if key not in self.by_shapes:
            self.by_shapes[key] = self.make(kind, stage.stage, function, arguments)
        at = kind, stage.stage
        self.arguments[at] = arguments
        self.programs[at], results = self.by_shapes[key]
        return results


class _Values(NamedTuple):
    """The abstract values of a pass that do not depend on the stage."""

    leaves: list[Abstract]
    data: list[Abstract]
    slot: tuple[Abstract, Abstract]  # step, microbatch
    number: Abstract  # a sum over microbatches


def visit_stages(
    staged: StagedModel,
    schedule: Schedule,
    batch: PyTree,
    shardings: Sequence[NamedSharding],
    mesh: Mesh | AbstractMesh,
    axes: PartitionAxis,
    make: MakeProgram[Program],
    *,
    remat: str,
    seed: int,
) -> Stages[Program]:
    """Calls `make` for F of every stage in order, then for B and W from the last stage on; for equal stages once.

    `shardings` has one entry per leaf of the staged model. The arguments of a program have the shardings with which
    `make` returned them before.
    """
    count = schedule.num_microbatches
    forward = staged.cut(microbatch_shapes(batch, count), seed=seed, train=True)
    functions = compile_stages(
        forward,
        schedule.stage_to_group,
        shardings,
        [mesh] * schedule.num_groups,
        train=True,
        remat="full" if staged.needs_full_remat else remat,
        split=schedule.splits_backward,
    )

    def abstract(shape: Sequence[int], dtype: jax.typing.DTypeLike, spec: Iterable[object] = ()) -> Abstract:
        return Abstract(tuple(shape), dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    def rows(x: Abstract) -> Abstract:
        shape = microbatched_shape(x.shape, count)
        return abstract(shape, x.dtype, (None, *microbatch_spec(shape[1:], mesh, axes)))

    pairs = zip(forward.leaves, shardings, strict=True)
    leaves = [abstract(x.shape, x.dtype, sharding.spec) for x, sharding in pairs]
    slot = abstract((), jnp.int32)
    values = _Values(leaves, [*map(rows, jax.tree.leaves(batch))], (slot, slot), abstract((), jnp.float32))
    stages = Stages(functions, make)
    _backward(stages, values, list(_forward(stages, values)))
    return stages


def _forward(stages: Stages[Program], values: _Values) -> Iterator[tuple[PyTree, ...]]:
    """F of every stage; yields what B and W are given: the arguments of F, and its residuals."""
    sent: dict[Var, Abstract] = {}
    for stage in stages.functions:
        received = [sent[v] for v in stage.received]
        data = [values.data[at] for at in stage.data]
        known = ([values.leaves[at] for at in stage.leaves], data, values.slot, received)
        out, residuals, *_ = stages.run(stage, "F", stage.forward, *known, [values.number for _ in stage.sums])
        yield (*known, residuals)
        sent |= dict(zip(stage.sent, out, strict=True))


def _backward(stages: Stages[Program], values: _Values, given: Sequence[tuple[PyTree, ...]]) -> None:
    """B and W from the last stage on."""
    wide = [x.update(dtype=jnp.promote_types(x.dtype, jnp.float32)) for x in values.leaves]
    cotangents: dict[Var, list[Abstract]] = {}  # the gradients of the receivers of a value
    for stage, first in zip(reversed(stages.functions), reversed(given), strict=True):
        summed = [cotangents[stage.sent[i]] for i in stage.floats_out]
        grads = [wide[at] for at in stage.trained]
        back, _, carry = stages.run(stage, "B", stage.backward, *first, summed, grads)
        for i, x in zip(stage.floats_in, back, strict=True):
            cotangents.setdefault(stage.received[i], []).append(x)
        if stage.has_weights:
            stages.run(stage, "W", stage.weights, *first, summed, carry, grads)
