"""The jitted programs of a pipeline for microbatches of one shape: F, B and W of every stage."""

import functools
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from flax_mesh.mpmd.runtime.transfers import GroupTransfers
from flax_mesh.mpmd.schedules.schedule import Action
from flax_mesh.mpmd.split.assign import StageProgram
from flax_mesh.mpmd.split.backward import differentiate
from flax_mesh.mpmd.split.trace import Forward, ModelLeaf
from flax_mesh.mpmd.transport.layout import sharding_on
from flax_mesh.mpmd.transport.ordered import OrderedTransfer
from flax_mesh.program.program import Program, Var, with_axes_of
from flax_mesh.step.callbacks import CallbackErrors, callbacks_in
from flax_mesh.tree import PyTree

Jitted = Callable[..., PyTree]
Slot = tuple[jax.Array, jax.Array]  # step and microbatch
Options = dict[str, object] | None  # of XLA


class StageFunctions(NamedTuple):
    """The jitted programs of one stage, on its group.

    The lists leaves, data and received are in the order of the fields of the same name; `slot` is (step, microbatch).

        forward(leaves, data, slot, received, sums) -> sent, residuals, new values, sums
        backward(leaves, data, slot, received, residuals, cotangents, grads) -> gradients of floats_in, grads, carry
        weights(leaves, data, slot, received, residuals, cotangents, carry, grads) -> grads
        both(leaves, data, slot, received, sums, grads) -> new values, sums, gradients of floats_in, grads, residuals of
            W, carry: F and B in one program, for a stage that sends nothing
    """

    stage: int
    group: int
    leaves: tuple[int, ...]  # inputs that are leaves of the model
    data: tuple[int, ...]  # inputs that are arrays of the batch: their indices in the batch
    trained: tuple[int, ...]  # leaves whose gradients this stage computes
    changed: tuple[int, ...]  # leaves that F updates
    stored: frozenset[int]  # leaves in `changed` that no earlier stage updates: the group of this stage stores them
    sums: tuple[int, ...]  # outputs that are summed over the microbatches
    received: tuple[Var, ...]
    sent: tuple[Var, ...]
    floats_in: tuple[int, ...]  # differentiable entries of `received`
    floats_out: tuple[int, ...]  # differentiable entries of `sent`
    forward: Jitted
    backward: Jitted  # only if has_weights; otherwise B computes all gradients
    weights: Jitted
    both: Jitted | None  # None: the stage sends activations, so its B waits for gradients
    has_weights: bool
    lasting: frozenset[int]  # residuals that W also needs; B frees the others


@dataclass(frozen=True, eq=False)
class CompiledPipeline:
    """The programs and tables that the executor needs for a pass over a schedule, for microbatches of one shape."""

    number: int  # counts compiled pipelines; the same in all processes
    trains: bool
    transfers: GroupTransfers
    stages: tuple[StageFunctions, ...]
    names: tuple[str, ...]  # names of the sums
    zeros: Mapping[int, Jitted]  # local group -> program that returns zeros: ({leaf: gradient}, sums of each stage)

    @cached_property
    def sender(self) -> Mapping[Var, tuple[int, int]]:
        """Sent variable -> (stage, index in its `sent`)."""
        return {v: (stage.stage, i) for stage in self.stages for i, v in enumerate(stage.sent)}

    @cached_property
    def receivers(self) -> Mapping[Var, tuple[int, ...]]:
        """Sent variable -> receiving stages."""
        return {v: tuple(stage.stage for stage in self.stages if v in stage.received) for v in self.sender}

    @cached_property
    def used(self) -> tuple[tuple[int, int], ...]:
        """(group, leaf) for every leaf that a stage of the group reads."""
        # Not from the stages of the training step: in `eval()` mode another stage may read a variable.
        return tuple(sorted({(stage.group, at) for stage in self.stages for at in stage.leaves}))

    def layout_key(self, kind: str, v: Var, stage: int) -> Hashable:
        """The layout key: one per activation (shared by all receivers), and one per (gradient, stage)."""
        return (self.number, kind, *self.sender[v], *((stage,) if kind == "B" else ()))

    def sends(self, action: Action) -> list[OrderedTransfer]:
        """The transfers of an action of any process, in order."""
        kind, k, microbatch = action
        stages, stage = self.stages, self.stages[k]
        values: list[tuple[Var, int, int]] = []  # variable, stage in its key, receiving group
        if kind == "F":
            values = [(v, r, stages[r].group) for v in stage.sent for r in self.receivers[v]]
        elif kind == "B":
            received = [stage.received[i] for i in stage.floats_in]
            values = [(v, k, stages[self.sender[v][0]].group) for v in received]
        return [
            OrderedTransfer(
                (kind, microbatch, s, *self.sender[v]), self.layout_key(kind, v, s), v.aval, stage.group, to
            )
            for v, s, to in values
        ]


def compile_stages(
    forward: Forward,
    group_of: Sequence[int],
    shardings: Sequence[NamedSharding],
    meshes: Sequence[Mesh | AbstractMesh],
    *,
    train: bool,
    remat: str,
    split: bool,
    errors: CallbackErrors | None = None,
    options: Options = None,
) -> tuple[StageFunctions, ...]:
    """The programs of every stage on the mesh of its group, which may be abstract; the first call compiles it.

    `shardings` has one entry per leaf, `group_of` has the group of every stage. With `errors`, callbacks record their
    exceptions in it.
    """
    wrt = [at for at, leaf in enumerate(forward.leaves) if leaf.trained]
    stages: list[StageFunctions] = []
    seen: set[int] = set()
    for number, (stage, group) in enumerate(zip(forward.stages, group_of, strict=True)):
        program = differentiate(stage, wrt, remat=remat, split=split) if train else stage
        program = program if errors is None else _recording(program, errors)
        compiler = _StageCompiler(forward, program, number, meshes[group], options)
        stages.append(compiler.compile(group, shardings, seen))
        seen |= set(stages[-1].changed)
    return tuple(stages)


def _recording(stage: StageProgram, errors: CallbackErrors) -> StageProgram:
    """The stage with callbacks that record their exceptions in `errors`."""
    parts = {name: getattr(stage, name) for name in ("forward", "backward", "weights")}
    return stage._replace(**{name: errors.recording(part) for name, part in parts.items() if part is not None})


class _StageCompiler:
    """Jits F, B and W of one stage: maps the arguments described in StageFunctions to the inputs of its programs."""

    def __init__(
        self,
        forward: Forward,
        program: StageProgram,
        stage: int,
        mesh: Mesh | AbstractMesh,
        options: Options,
    ):
        self.program, self.stage, self.mesh, self.options = program, stage, mesh, options
        self.updates = forward.updates
        self.num_leaves, self.num_arrays = len(forward.leaves), len(forward.program.inputs) - 2
        self.leaves = tuple(at for at in program.inputs if at < self.num_leaves)
        self.data = tuple(at for at in program.inputs if self.num_leaves <= at < self.num_arrays)

    def compile(self, group: int, shardings: Sequence[NamedSharding], stored_before: set[int]) -> StageFunctions:
        program, updates = self.program, self.updates
        changed = tuple(updates[at] for at in program.outputs if at in updates)
        new = [sharding_on(shardings[at], self.mesh) for at in changed]
        grads = [sharding_on(shardings[at], self.mesh) for at in program.trained]
        of_backward = grads if program.weights is None else None
        residuals = program.arguments[3] if program.weights else ()
        lasting = frozenset(i for i, v in enumerate(residuals) if program.weights and v in program.weights.inputs)
        can_fuse = not program.sent and program.backward is not None

        def jitted(fn: Jitted, name: str, donated: tuple[int, ...], out_shardings: PyTree) -> Jitted:
            return named_jit(fn, f"stage{self.stage}_{name}", donated, out_shardings, self.options)

        both, both_out = functools.partial(self.both, lasting=lasting), (new, None, None, of_backward, None, None)
        return StageFunctions(
            stage=self.stage,
            group=group,
            leaves=self.leaves,
            data=tuple(at - self.num_leaves for at in self.data),
            trained=program.trained,
            changed=changed,
            stored=frozenset(changed) - stored_before,
            sums=tuple(at for at in program.outputs if at not in updates),
            received=program.received,
            sent=program.sent,
            floats_in=program.floats_in,
            floats_out=program.floats_out,
            forward=jitted(self.forward, "forward", (4,), (None, None, new, None)),
            backward=jitted(self.backward, "backward", (6,), (None, of_backward, None)),
            weights=jitted(self.weights, "weights", (7,), grads),
            both=jitted(both, "forward_and_backward", (4, 5), both_out) if can_fuse else None,
            has_weights=program.weights is not None,
            lasting=lasting,
        )

    def inputs(self, leaves: Sequence[jax.Array], data: Sequence[jax.Array], slot: Slot) -> list[jax.Array]:
        """Values of the inputs of the stage; batch arrays are indexed by the microbatch."""
        step, microbatch = slot
        known = dict(zip(self.leaves, leaves, strict=True)) | {self.num_arrays: step, self.num_arrays + 1: microbatch}
        for at, array in zip(self.data, data, strict=True):
            known[at] = jax.lax.dynamic_index_in_dim(array, microbatch, keepdims=False)
        return [known[at] for at in self.program.inputs]

    def call(self, part: Program | None, *values: Sequence[jax.Array | None]) -> list[jax.Array]:
        assert part is not None
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            outs = self.program.call(part, *values)
            if not any(eqn.outvars for eqn in callbacks_in(part.eqns)) or AxisType.Explicit in self.mesh.axis_types:
                return outs
            # JAX returns the result of a callback, and arrays computed from it, on the first device of the mesh only.
            replicated = NamedSharding(self.mesh, PartitionSpec())
            return [jax.lax.with_sharding_constraint(x, replicated) for x in outs]

    def sum(self, cotangents: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
        """The sums of the cotangents of each sent activation over its receivers."""
        sent = [self.program.sent[i] for i in self.program.floats_out]
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            parts = [[with_axes_of(v, x) for x in addends] for v, addends in zip(sent, cotangents, strict=True)]
            return [functools.reduce(operator.add, each) for each in parts]

    def forward(self, leaves, data, slot, received, sums):
        program, updates = self.program, self.updates
        num_sent, num_outputs = len(program.sent), len(program.outputs)
        outs = self.call(program.forward, self.inputs(leaves, data, slot), received)
        values = dict(zip(program.outputs, outs[num_sent : num_sent + num_outputs], strict=True))
        new = [value for at, value in values.items() if at in updates]
        added = [value for at, value in values.items() if at not in updates]
        sums = [total + value for total, value in zip(sums, added, strict=True)]
        return outs[:num_sent], outs[num_sent + num_outputs :], new, sums

    def backward(self, leaves, data, slot, received, residuals, cotangents, grads):
        program = self.program
        summed = self.sum(cotangents)
        outs = self.call(program.backward, self.inputs(leaves, data, slot), received, summed, residuals)
        num = len(program.floats_in)
        to_inputs, gradients = outs[:num], outs[num:]
        if program.weights is not None:
            return to_inputs, grads, gradients
        return to_inputs, [g + x for g, x in zip(grads, gradients, strict=True)], []

    def weights(self, leaves, data, slot, received, residuals, cotangents, carry, grads):
        summed, inputs = self.sum(cotangents), self.inputs(leaves, data, slot)
        outs = self.call(self.program.weights, inputs, received, summed, residuals, carry)
        return [g + x for g, x in zip(grads, outs, strict=True)]

    def both(self, leaves, data, slot, received, sums, grads, lasting):
        _, residuals, new, sums = self.forward(leaves, data, slot, received, sums)
        to_inputs, grads, carry = self.backward(leaves, data, slot, received, residuals, [], grads)
        kept = [x if i in lasting else None for i, x in enumerate(residuals)]
        return new, sums, to_inputs, grads, kept, carry


def zeros_of_groups(
    stages: Sequence[StageFunctions],
    leaves: Sequence[ModelLeaf],
    shardings: Sequence[NamedSharding],
    meshes: Mapping[int, Mesh],
) -> dict[int, Jitted]:
    """For each group of `meshes`, a program that returns its zero gradients, sharded like their leaves, and sums."""

    def of_group(stages: Sequence[StageFunctions], mesh: Mesh) -> Jitted:
        trained = sorted({at for stage in stages for at in stage.trained})

        def zeros() -> tuple[dict[int, jax.Array], list[list[jax.Array]]]:
            wide = {at: jnp.zeros(leaves[at].shape, jnp.promote_types(leaves[at].dtype, jnp.float32)) for at in trained}
            return wide, [[jnp.zeros((), jnp.float32) for _ in stage.sums] for stage in stages]

        scalar = NamedSharding(mesh, PartitionSpec())
        placed = {at: sharding_on(shardings[at], mesh) for at in trained}
        return jax.jit(zeros, out_shardings=(placed, [[scalar for _ in stage.sums] for stage in stages]))

    return {group: of_group([s for s in stages if s.group == group], mesh) for group, mesh in meshes.items()}


def named_jit(fn: Jitted, name: str, donate: tuple[int, ...], out_shardings: PyTree, options: Options) -> Jitted:
    """`fn` jitted under a name that profiles show."""

    def named(*args):
        return fn(*args)

    named.__name__ = name
    return jax.jit(named, donate_argnums=donate, out_shardings=out_shardings, compiler_options=options)
