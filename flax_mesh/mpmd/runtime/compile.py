"""The jitted functions of the stages of a pipeline: F, B and W of each, on its group."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from flax_mesh.mpmd.split.backward import Slice, StageProgram, differentiate, forward_only
from flax_mesh.mpmd.split.split import StageCut
from flax_mesh.mpmd.transport.layout import sharding_on

Jitted = Callable[..., Any]


class StageFunctions(NamedTuple):
    """What one stage runs, on the group that holds it.

    Leaves, data and received are lists in the order of the index tuples beside them; `slot` is (step, microbatch).

        forward(leaves, data, slot, received, sums) -> sent, residuals, new values, sums
        backward(leaves, data, slot, received, residuals, cotangents, grads) -> gradients of floats_in, grads, carry
        weights(leaves, data, slot, received, residuals, cotangents, carry, grads) -> grads
    """

    stage: int
    leaves: tuple[int, ...]  # inputs that are leaves of the model
    data: tuple[int, ...]  # inputs that are arrays of the batch
    trained: tuple[int, ...]  # leaves that get gradients here
    changed: tuple[int, ...]  # leaves that get new values here
    sums: tuple[int, ...]  # outputs that are sums
    received: tuple[Any, ...]  # variables
    sent: tuple[Any, ...]
    floats_in: tuple[int, ...]
    floats_out: tuple[int, ...]
    forward: Jitted
    backward: Jitted  # not to be called where there is none: F alone, or B gives all gradients
    weights: Jitted
    has_weights: bool
    lasting: frozenset[int]  # residuals that W takes too


class Pass(NamedTuple):
    """What passes over a schedule have in common, for microbatches of the same shapes."""

    number: int  # in the order in which they were made, the same in all processes
    stages: list[StageFunctions]
    names: tuple[str, ...]  # of the sums
    sender: dict[Any, tuple[int, int]]  # variable that is sent -> stage, and its place in `sent` there
    receivers: dict[Any, list[int]]  # variable that is sent -> stages
    used: list[tuple[int, int]]  # (group, leaf of the staged model) for every leaf that a stage there reads


def compile_stages(
    cut: StageCut,
    meshes: Sequence[Mesh],
    shardings: Sequence[NamedSharding],
    trained: Sequence[bool],
    *,
    train: bool,
    remat: str,
    split: bool,
    options: dict[str, Any] | None = None,
) -> list[StageFunctions]:
    """The functions of every stage; `meshes` are those of their groups, `shardings` those of the leaves."""
    wrt = [at for at, is_trained in enumerate(trained) if is_trained]
    num_leaves = len(trained)
    found = []
    for stage, (piece, mesh) in enumerate(zip(cut.pieces, meshes, strict=True)):
        changed = tuple(cut.updates[at] for at in piece.outputs if at in cut.updates)
        built = (
            differentiate(cut.program, piece, wrt, remat=remat, split=split)
            if train
            else forward_only(cut.program, piece)
        )
        grads = [sharding_on(shardings[at], mesh) for at in built.trained]
        stage_of = _Layout(cut, built, num_leaves, len(cut.program.inputs) - 2, mesh, options)
        found.append(
            StageFunctions(
                stage=stage,
                leaves=stage_of.leaves,
                data=stage_of.data,
                trained=built.trained,
                changed=changed,
                sums=tuple(at for at in piece.outputs if at not in cut.updates),
                received=piece.received,
                sent=piece.sent,
                floats_in=built.floats_in,
                floats_out=built.floats_out,
                forward=stage_of.forward([sharding_on(shardings[at], mesh) for at in changed]),
                backward=stage_of.backward(grads),
                weights=stage_of.weights(grads),
                has_weights=built.weights is not None,
                lasting=frozenset(built.weights.residuals if built.weights else ()),
            )
        )
    return found


class _Layout:
    """How the arguments of the functions of one stage make up the inputs of its programs."""

    def __init__(self, cut: StageCut, built: StageProgram, num_leaves: int, num_arrays: int, mesh: Mesh, options: Any):
        self.cut, self.built, self.mesh, self.options = cut, built, mesh, options
        piece = built.piece
        self.leaves = tuple(at for at in piece.inputs if at < num_leaves)
        self.data = tuple(at for at in piece.inputs if num_leaves <= at < num_arrays)
        self.num_arrays = num_arrays

    def inputs(self, leaves: Sequence[Any], data: Sequence[Any], slot: tuple[Any, Any]) -> list[Any]:
        """Values of all inputs of the piece; of the batch the rows of the microbatch."""
        step, microbatch = slot
        known = dict(zip(self.leaves, leaves, strict=True)) | {self.num_arrays: step, self.num_arrays + 1: microbatch}
        for at, array in zip(self.data, data, strict=True):
            known[at] = jax.lax.dynamic_index_in_dim(array, microbatch, keepdims=False)
        return [known[at] for at in self.built.piece.inputs]

    def call(self, part: Slice | None, *groups: Sequence[Any]) -> list[Any]:
        assert part is not None
        picks = (part.inputs, part.received, part.cotangents, part.residuals, part.carry)
        values = [group[i] for pick, group in zip(picks, groups, strict=False) for i in pick]
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            return part.program.call(*values)

    def forward(self, changed: Sequence[NamedSharding]) -> Jitted:
        piece, updates = self.built.piece, self.cut.updates
        num_sent, num_outputs = len(piece.sent), len(piece.outputs)

        def forward(leaves, data, slot, received, sums):
            outs = self.call(self.built.forward, self.inputs(leaves, data, slot), received)
            made = dict(zip(piece.outputs, outs[num_sent : num_sent + num_outputs], strict=True))
            new = [value for at, value in made.items() if at in updates]
            added = [value for at, value in made.items() if at not in updates]
            sums = [total + value for total, value in zip(sums, added, strict=True)]
            return outs[:num_sent], outs[num_sent + num_outputs :], new, sums

        name = f"stage{self.stage_name}_forward"
        return named_jit(forward, name, (4,), (None, None, list(changed), None), self.options)

    def backward(self, trained: Sequence[NamedSharding]) -> Jitted:
        built = self.built
        whole = built.weights is None

        def backward(leaves, data, slot, received, residuals, cotangents, grads):
            summed = [_add(parts) for parts in cotangents]
            inputs = self.inputs(leaves, data, slot)
            outs = self.call(built.backward, inputs, received, summed, residuals)
            num = len(built.floats_in)
            to_inputs, rest = outs[:num], outs[num:]
            if not whole:
                return to_inputs, grads, rest
            return to_inputs, [g + x for g, x in zip(grads, rest, strict=True)], []

        name = f"stage{self.stage_name}_backward"
        return named_jit(backward, name, (6,), (None, list(trained) if whole else None, None), self.options)

    def weights(self, trained: Sequence[NamedSharding]) -> Jitted:
        def weights(leaves, data, slot, received, residuals, cotangents, carry, grads):
            summed = [_add(parts) for parts in cotangents]
            inputs = self.inputs(leaves, data, slot)
            outs = self.call(self.built.weights, inputs, received, summed, residuals, carry)
            return [g + x for g, x in zip(grads, outs, strict=True)]

        return named_jit(weights, f"stage{self.stage_name}_weights", (7,), list(trained), self.options)

    @property
    def stage_name(self) -> int:
        return self.cut.pieces.index(self.built.piece)


def named_jit(
    fn: Jitted, name: str, donate: tuple[int, ...], out_shardings: Any, options: dict[str, Any] | None
) -> Jitted:
    """`fn` jitted under a name, by which profiles show it."""
    fn.__name__ = name
    return jax.jit(fn, donate_argnums=donate, out_shardings=out_shardings, compiler_options=options)


def _add(parts: Sequence[Any]) -> Any:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
