"""The collectives that follow from the shardings of an operation: one small rule per kind of operation.

Shardy decides where every value is split; XLA then inserts the collectives. The rules follow what XLA does, not
Shardy's own pass, which chooses otherwise:

- a value that is needed with fewer axes on a dim is gathered over them; more axes on a dim cost nothing (a slice);
- axes that move from one dim to another are an all-to-all, other changes of order a permute;
- a sum over a split dim (a matrix product, a reduction, a scatter, the lookup in a split table) is an all-reduce of the
  result. If all uses of the result need it split over these axes, it is counted as a reduce-scatter.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from flax_mesh.plan.program.read import COLLECTIVES, Array, Block, Operation, Program, Spec, axis_size

Dims = tuple[tuple[int, ...], ...]


class Exchange(NamedTuple):
    """One collective. `operand_bytes` is what one device passes to it, per execution."""

    kind: str
    axes: tuple[str, ...]  # mesh axes, in the order of the mesh
    operand_bytes: int
    operation: Operation  # that needs it
    times: int  # executions per step
    array: Array | None = None  # the operand that is exchanged; None: the result of the operation
    wanted: Spec = ()  # the spec that it is exchanged to
    result_bytes: int = 0  # on one device

    @property
    def phase(self) -> str:
        return self.operation.phase

    @property
    def payload_bytes(self) -> int:
        """As `sharding.report.hlo` defines it."""
        return self.result_bytes if self.kind == "all-gather" else self.operand_bytes


Found = tuple[str, tuple[str, ...], int]  # kind, axes, operand bytes


def find_exchanges(program: Program) -> list[Exchange]:
    """All collectives of a program, in the order of its operations."""
    return list(_in_block(program.block, program, 1))


def _in_block(block: Block, program: Program, times: int) -> Iterator[Exchange]:
    """A value that is needed twice with the same sharding is exchanged once; sums of partial sums are reduced once."""
    seen: set[tuple[int, Spec]] = set()
    partial = _Partial(block, program)
    for operation in block.operations:
        for (kind, axes, size), array, spec in _of_operation(operation, program, seen, partial):
            names = {axis.partition(":")[0] for axis in axes}
            count = math.prod(axis_size(axis, program.axis_sizes) for axis in axes)
            if size and count > 1:
                ordered = tuple(name for name in program.axis_sizes if name in names)
                result = size * count if kind == "all-gather" else size // count if kind == "reduce-scatter" else size
                yield Exchange(kind, ordered, size, operation, times, array, spec, result)
        for body in operation.bodies:
            yield from _in_block(body, program, times * operation.times)


def _of_operation(
    operation: Operation, program: Program, seen: set[tuple[int, Spec]], partial: "_Partial"
) -> Iterator[tuple[Found, Array | None, Spec]]:
    if operation.kind in COLLECTIVES:  # written by the user, in a shard_map
        size = sum(array.bytes for array in operation.inputs)
        yield (operation.kind.replace("_", "-"), axes_of_groups(operation, program.axis_sizes), size), None, ()
        return
    needed, over = RULES.get(operation.kind, _elementwise)(operation)
    for array, spec in zip(operation.inputs, needed, strict=False):
        if spec is not None and spec != array.spec and (id(array), spec) not in seen:
            seen.add((id(array), spec))
            for found in reshard(array, spec, program.axis_sizes):
                yield found, array, spec
    for found in partial.reduce(operation, tuple(over)):
        yield found, None, ()


def axes_of_groups(operation: Operation, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ. Device ids are positions in the mesh."""
    text = operation.attributes.get("replica_groups") or operation.attributes.get("source_target_pairs", "")
    if "dense" not in text and '"' in text:  # names of axes
        return tuple(name for name in sizes if f'"{name}"' in text)
    ids = [int(number) for number in re.findall(r"\d+", text.partition(" : ")[0])]
    places = np.array(np.unravel_index(ids, tuple(sizes.values()))) if ids else np.zeros((len(sizes), 1))
    return tuple(name for name, place in zip(sizes, places, strict=True) if (place != place[0]).any())


class _Partial:
    """Sums over split dims. XLA adds partial sums before it reduces them, except on CPUs."""

    def __init__(self, block: Block, program: Program):
        self.sizes, self.cpu = program.axis_sizes, program.platform == "cpu"
        self.pending: dict[int, tuple[str, ...]] = {}
        self.uses: dict[int, list[Operation]] = {}
        for operation in block.operations:
            for array in operation.inputs:
                self.uses.setdefault(id(array), []).append(operation)
        self.results = set(map(id, block.results))

    def reduce(self, operation: Operation, over: tuple[str, ...]) -> Iterator[Found]:
        waiting = [self.pending[id(array)] for array in operation.inputs if id(array) in self.pending]
        if waiting and len(waiting) == len(operation.inputs) and len(set(waiting)) == 1 and not over:
            over = waiting[0]
        if not over or not operation.outputs:
            return
        out = operation.outputs[0]
        if not self.cpu and self._summed(out):
            self.pending[id(out)] = over
            return
        scattered = tuple(axis for axis in over if axis in out.axes)
        rest = tuple(axis for axis in over if axis not in out.axes)
        size = sum(output.bytes for output in operation.outputs)
        if scattered:
            whole = size * math.prod(axis_size(axis, self.sizes) for axis in scattered)
            yield "reduce-scatter", scattered, whole
        if rest:
            yield "all-reduce", rest, size

    def _summed(self, array: Array) -> bool:
        """Whether the only use of a value is an addition to another value that is a sum over a split dim."""
        uses = self.uses.get(id(array), [])
        if len(uses) != 1 or uses[0].kind != "add" or id(array) in self.results:
            return False
        return all(x.producer is not None and self._is_partial(x.producer) for x in uses[0].inputs)

    def _is_partial(self, operation: Operation) -> bool:
        if operation.kind == "add":
            return all(
                x.producer is not None and len(self.uses.get(id(x), [])) == 1 and self._is_partial(x.producer)
                for x in operation.inputs
            )
        return operation.kind == "dot_general" and bool(_dot(operation)[1])


def partial_axes(operation: Operation) -> tuple[str, ...]:
    """The mesh axes over which the result of an operation is a sum of the results of the devices."""
    return tuple(RULES.get(operation.kind, _elementwise)(operation)[1])


def reshard(array: Array, wanted: Spec, sizes: Mapping[str, int]) -> Iterator[Found]:
    """The collectives that change the sharding of a value to `wanted`."""
    if array.spec == wanted or not array.shape:
        return
    had = {axis: dim for dim, axes in enumerate(array.spec) for axis in axes}
    wants = {axis: dim for dim, axes in enumerate(wanted) for axis in axes}
    moved = tuple(axis for axis, dim in had.items() if axis in wants and wants[axis] != dim)
    lost = tuple(axis for axis in had if axis not in wants)
    new = math.prod(axis_size(axis, sizes) for axis in wants if axis not in had)  # sliced first
    size = -(-array.bytes // new)
    if moved:
        yield "all-to-all", moved, size
    if lost:
        yield "all-gather", lost, size
    if (
        not moved
        and not lost
        and any(set(a) <= set(b) and a != b[: len(a)] for a, b in zip(array.spec, wanted, strict=True))
    ):
        yield "collective-permute", tuple(had), size


Rule = tuple[Sequence[Spec | None], Sequence[str]]


def _elementwise(operation: Operation) -> Rule:
    """Operands of the shape of the result need its sharding."""
    out = operation.outputs[0] if operation.outputs else None
    if out is None:
        return [], ()
    return [out.spec if array.shape == out.shape else None for array in operation.inputs], ()


def _none(operation: Operation) -> Rule:
    return [], ()


def _reshard(operation: Operation) -> Rule:
    return [operation.outputs[0].spec], ()


def _broadcast(operation: Operation) -> Rule:
    (x,), (out,) = operation.inputs, operation.outputs
    dims = operation.dims("broadcast_dimensions")
    return [tuple(out.spec[d] if x.shape[i] == out.shape[d] else () for i, d in enumerate(dims))], ()


def _transpose(operation: Operation) -> Rule:
    (out,) = operation.outputs
    spec: list[tuple[str, ...]] = [()] * len(out.shape)
    for at, dim in enumerate(operation.dims("permutation")):
        spec[dim] = out.spec[at]
    return [tuple(spec)], ()


def _reshape(operation: Operation) -> Rule:
    """The axes of the result on the dims that they come from; a split that cannot be expressed is gathered."""
    (x,), (out,) = operation.inputs, operation.outputs
    spec = reshaped(out.spec, out.shape, x.shape, {})
    lost = x.axes - {axis for axes in spec for axis in axes}
    kept = x.axes & {axis for dim in out.spec for axis in dim}
    if not lost or kept == x.axes:  # a dim that is split over both of its factors stays where it is
        return [], ()
    return [tuple(tuple(a for a in axes if a in out.axes) for axes in x.spec)], ()


def reshaped(spec: Spec, shape: Sequence[int], to: Sequence[int], sizes: Mapping[str, int]) -> Spec:
    """The spec of a value after a reshape: axes of the first dim of a group go to the first dim of the new group."""
    result: list[tuple[str, ...]] = [()] * len(to)
    i = j = 0
    while i < len(shape) and j < len(to):
        start_i, start_j, a, b = i, j, shape[i], to[j]
        while a != b:
            if a < b and i + 1 < len(shape):
                i += 1
                a *= shape[i]
            elif j + 1 < len(to):
                j += 1
                b *= to[j]
            else:
                break
        axes = tuple(axis for dim in spec[start_i : i + 1] for axis in dim)
        target = next((d for d in range(start_j, j + 1) if to[d] > 1), start_j)
        if axes:
            result[target] = axes
        i, j = i + 1, j + 1
    return tuple(result)


def _dot(operation: Operation) -> Rule:
    lhs, rhs, out = *operation.inputs[:2], operation.outputs[0]
    batch_l, batch_r, contract_l, contract_r = dot_dims(operation)
    free_l = [d for d in range(len(lhs.shape)) if d not in batch_l + contract_l]
    free_r = [d for d in range(len(rhs.shape)) if d not in batch_r + contract_r]
    need_l: list[tuple[str, ...]] = [()] * len(lhs.shape)
    need_r: list[tuple[str, ...]] = [()] * len(rhs.shape)
    for at, (a, b) in enumerate(zip(batch_l, batch_r, strict=True)):
        need_l[a] = need_r[b] = out.spec[at]
    for at, d in enumerate(free_l):
        need_l[d] = out.spec[len(batch_l) + at]
    for at, d in enumerate(free_r):
        need_r[d] = out.spec[len(batch_l) + len(free_l) + at]
    partial: list[str] = []
    for a, b in zip(contract_l, contract_r, strict=True):
        both = [axis for axis in lhs.spec[a] if axis in rhs.spec[b]]
        one = [axis for axis in (*lhs.spec[a], *rhs.spec[b]) if axis not in both and axis not in out.axes]
        if lhs.spec[a] and rhs.spec[b]:
            one = []  # split in two ways: what they do not share is gathered
        need_l[a] = need_r[b] = (*both, *one)
        partial += need_l[a]
    needed = [tuple(tuple(axis for axis in axes if axis not in partial) for axes in need) for need in (need_l, need_r)]
    for need, dims in zip(needed, (contract_l, contract_r), strict=True):
        for at, d in enumerate(dims):
            axes = need_l[contract_l[at]]
            need_ = list(need)
            need_[d] = axes
            needed[needed.index(need)] = need = tuple(need_)
    return needed, partial


def dot_dims(operation: Operation) -> Dims:
    """(batch dims of lhs, of rhs, contracting dims of lhs, of rhs) of a dot_general."""
    text = operation.attributes["dot_dimension_numbers"]
    return tuple(_dims_of(text, name) for name in DOT_FIELDS)


DOT_FIELDS = (
    "lhs_batching_dimensions",
    "rhs_batching_dimensions",
    "lhs_contracting_dimensions",
    "rhs_contracting_dimensions",
)


def _dims_of(text: str, name: str) -> tuple[int, ...]:
    at = text.find(name)
    if at < 0:
        return ()
    inside = text[text.index("[", at) + 1 : text.index("]", at)]
    return tuple(int(number) for number in inside.split(",") if number.strip())


def _convolution(operation: Operation) -> Rule:
    """Batch and output features as the result needs them; the sum over input features as in a matrix product."""
    lhs, rhs = operation.inputs[:2]
    out = operation.outputs[0]
    left, right, result = conv_labels(operation)
    contracted_l, contracted_r = left.index("f"), right.index("i")
    batch, features = out.spec[result.index("b")], out.spec[result.index("f")]
    both = tuple(axis for axis in lhs.spec[contracted_l] if axis in rhs.spec[contracted_r])
    need_l: list[tuple[str, ...]] = [()] * len(left)
    need_r: list[tuple[str, ...]] = [()] * len(right)
    need_l[left.index("b")] = tuple(axis for axis in batch if axis not in both)
    need_r[right.index("o")] = tuple(axis for axis in features if axis not in both)
    need_l[contracted_l] = need_r[contracted_r] = both
    return [tuple(need_l), tuple(need_r)], both


def conv_labels(operation: Operation) -> tuple[list[str], list[str], list[str]]:
    """The labels of the dims of both operands and of the result: b, f, i, o, and numbers for spatial dims."""
    left, right, result = re.findall(r"\[([^\]]*)\]", operation.attributes["dimension_numbers"])[:3]
    return left.split(", "), right.split(", "), result.split(", ")


def _reduce(operation: Operation) -> Rule:
    count = len(operation.inputs) // 2
    dims, out = operation.dims("dimensions"), operation.outputs[0]
    partial: list[str] = []
    needed: list[Spec | None] = []
    for x in operation.inputs[:count]:
        kept = [d for d in range(len(x.shape)) if d not in dims]
        spec = list(x.spec)
        for at, d in enumerate(kept):
            spec[d] = out.spec[at]
        for d in dims:
            partial += [axis for axis in x.spec[d] if axis not in partial]
        spec = [axes if d in dims else tuple(a for a in axes if a not in partial) for d, axes in enumerate(spec)]
        needed.append(tuple(spec))
    return needed, partial


def _gather(operation: Operation) -> Rule:
    """A lookup: the rows of a split table are selected where they are, and summed."""
    table, indices = operation.inputs
    out = operation.outputs[0]
    text = operation.attributes["dimension_numbers"]
    indexed = set(_dims_of(text, "start_index_map"))
    partial = [axis for d in indexed for axis in table.spec[d] if axis not in out.axes]
    clash = tuple(() if d in indexed and set(axes) & out.axes else axes for d, axes in enumerate(table.spec))
    offsets = _dims_of(text, "offset_dims")
    removed = set(_dims_of(text, "collapsed_slice_dims")) | set(_dims_of(text, "operand_batching_dims"))
    free = [d for d in range(len(table.shape)) if d not in removed]
    wanted = list(clash)
    for d, at in zip(free, offsets, strict=False):
        if d not in indexed:
            wanted[d] = out.spec[at] if table.shape[d] == out.shape[at] else ()
    return [tuple(wanted), None], partial


def _scatter(operation: Operation) -> Rule:
    """Updates are added to a replicated or split table; what the batch is split over is summed."""
    count = len(operation.inputs) // 2
    table, updates, out = operation.inputs[0], operation.inputs[count + 1], operation.outputs[0]
    text = operation.attributes["scatter_dimension_numbers"]
    window = set(_dims_of(text, "update_window_dims"))
    partial = [a for d, axes in enumerate(updates.spec) if d not in window for a in axes if a not in out.axes]
    needed: list[Spec | None] = [None] * len(operation.inputs)
    gathered = {a for d, axes in enumerate(updates.spec) if d not in window for a in axes if a in out.axes}
    if gathered:
        needed[count + 1] = tuple(tuple(a for a in axes if a not in gathered) for axes in updates.spec)
    del table
    return needed, partial


def _last(operation: Operation) -> Rule:
    """A sort, or another operation along dims: they must not be split."""
    dims = operation.dims("dimension")
    return [tuple(() if d in dims else axes for d, axes in enumerate(x.spec)) for x in operation.inputs], ()


def _slice(operation: Operation) -> Rule:
    """A part of a dim: dims that are cut must not be split; the others are as the result needs them."""
    x, out = operation.inputs[0], operation.outputs[0]
    if len(x.shape) != len(out.shape):
        return [], ()
    return [
        tuple(
            out.spec[d] if x.shape[d] == out.shape[d] else tuple(a for a in x.spec[d] if a in out.spec[d])
            for d in range(len(x.shape))
        )
    ], ()


def _update(operation: Operation) -> Rule:
    x, update, out = *operation.inputs[:2], operation.outputs[0]
    return [out.spec, tuple(out.spec[d] if update.shape[d] == x.shape[d] else () for d in range(len(x.shape)))], ()


def _concatenate(operation: Operation) -> Rule:
    out = operation.outputs[0]
    return [out.spec for _ in operation.inputs], ()


RULES = {
    "reshard": _reshard,
    "sharding_constraint": _reshard,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "dot_general": _dot,
    "convolution": _convolution,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "sort": _last,
    "slice": _slice,
    "dynamic_slice": _slice,
    "dynamic_update_slice": _update,
    "concatenate": _concatenate,
    "pad": _slice,
    "while": _none,
    "case": _none,
    "shard": _none,
    "iota": _none,
    "constant": _none,
    "rng_bit_generator": _none,
    "custom_call": _none,
    "reduce_window": _none,
    "select_and_scatter": _none,
}
