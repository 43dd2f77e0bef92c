"""F, B and W of the stages of a pipeline, compiled for the devices of one group."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_mesh.mpmd.runtime.compile import StageFunctions, compile_stages
from flax_mesh.plan.recipe import Split
from flax_mesh.step.batch import microbatch_shapes, microbatch_spec


def compiled_stages(split: Split, mesh: Mesh, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """ "F0", "B0" and so on -> the compiled program; equal stages are one program, under the name of the first.

    `mesh` is that of one group. Stages are compiled in order: the arguments of a program have the shardings with which
    XLA returned them before.
    """
    schedule, count = split.schedule, split.schedule.num_microbatches
    part, seed = microbatch_shapes(split.recipe.batch, count), split.recipe.step_options.seed
    forward = split.staged.cut(part, seed=seed, train=True)
    stages = compile_stages(
        forward,
        schedule.stage_to_group,
        split.shardings,
        [mesh] * schedule.num_groups,
        train=True,
        remat=split.remat,
        split=schedule.splits_backward,
    )
    made = _Compiler(split, mesh, forward.leaves, len(stages), say)
    for stage in stages:
        made.forward(stage)
    for stage in reversed(stages):
        made.backward(stage)
    return made.found


class _Compiler:
    def __init__(self, split: Split, mesh: Mesh, leaves: Sequence[Any], count: int, say: Callable[[str], None]):
        self.split, self.mesh, self.leaves, self.count, self.say = split, mesh, leaves, count, say
        self.data = [self._rows(x) for x in jax.tree.leaves(split.recipe.batch)]
        self.found: dict[str, Any] = {}
        self.known: dict[int, tuple[Any, ...]] = {}  # leaves, data, (microbatch, step), activations
        self.residuals: dict[int, Any] = {}
        self.sent: dict[Any, Any] = {}
        self.cotangents: dict[Any, list[Any]] = {}
        self.cache: dict[Any, tuple[Any, Any]] = {}  # key -> (program, abstract results)

    def forward(self, stage: StageFunctions) -> None:
        slot = (self._abstract((), jnp.int32),) * 2
        received = [self.sent[v] for v in stage.received]
        known = ([self._leaf(at) for at in stage.leaves], [self.data[at] for at in stage.data], slot, received)
        sums = [self._abstract((), jnp.float32) for _ in stage.sums]
        out, self.residuals[stage.stage], _, _ = self._compile(stage, "F", stage.forward, *known, sums)
        self.known[stage.stage] = known
        self.sent |= dict(zip(stage.sent, out, strict=True))

    def backward(self, stage: StageFunctions) -> None:
        given = (*self.known[stage.stage], self.residuals[stage.stage])
        summed = [self.cotangents[stage.sent[i]] for i in stage.floats_out]
        grads = [self._leaf(at, wide=True) for at in stage.trained]
        back, _, carry = self._compile(stage, "B", stage.backward, *given, summed, grads)
        for i, x in zip(stage.floats_in, back, strict=True):
            self.cotangents.setdefault(stage.received[i], []).append(x)
        if stage.has_weights:
            self._compile(stage, "W", stage.weights, *given, summed, carry, grads)

    def _compile(self, stage: StageFunctions, kind: str, function: Any, *arguments: Any) -> Any:
        """Abstract results, with the shardings of the compiled program."""
        name = f"{kind}{stage.stage}"
        leaves = [(x.shape, str(x.dtype), str(x.sharding)) for x in jax.tree.leaves(arguments)]
        key = (kind, len(stage.sums), len(stage.sent), str(leaves))
        if key not in self.cache:
            self.say(f"compiling {kind} of stage {stage.stage} (of stages 0-{self.count - 1})")
            lowered = function.lower(*arguments)
            program = lowered.compile()
            self.cache[key] = program, jax.tree.map(_with_sharding, lowered.out_info, program.output_shardings)
        self.found[name], results = self.cache[key]
        return results

    def _leaf(self, at: int, wide: bool = False) -> jax.ShapeDtypeStruct:
        shape, dtype = self.leaves[at].shape, self.leaves[at].dtype
        dtype = jnp.promote_types(dtype, jnp.float32) if wide else dtype
        return self._abstract(shape, dtype, self.split.shardings[at].spec)

    def _rows(self, x: Any) -> jax.ShapeDtypeStruct:
        count = self.split.schedule.num_microbatches
        shape = (count, x.shape[0] // count, *x.shape[1:])
        spec = microbatch_spec(shape[1:], self.mesh, self.split.recipe.rules.axes)
        return self._abstract(shape, x.dtype, (None, *spec))

    def _abstract(self, shape: Sequence[int], dtype: Any, spec: Iterable[Any] = ()) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=NamedSharding(self.mesh, PartitionSpec(*spec)))


def _with_sharding(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
