"""How operands must be split for an operation to run on each device by itself: one small rule per kind of operation."""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from flax_mesh.plan.program.program import Operation, Spec

Axes = tuple[str, ...]


class Needs(NamedTuple):
    """The spec that an operation needs of each operand, None for any, and the axes over which its result is summed."""

    specs: Sequence[Spec | None]
    partial: Sequence[str] = ()


def sharding_needs(operation: Operation) -> Needs:
    return RULES.get(operation.kind, _elementwise)(operation)


def _elementwise(operation: Operation) -> Needs:
    """Operands of the shape of the result need its sharding."""
    if not operation.outputs:
        return Needs([])
    out = operation.outputs[0]
    return Needs([out.spec if array.shape == out.shape else None for array in operation.inputs])


def _as_result(operation: Operation) -> Needs:
    return Needs([operation.outputs[0].spec for _ in operation.inputs])


def _broadcast(operation: Operation) -> Needs:
    (x,), (out,) = operation.inputs, operation.outputs
    dims = operation.dims("broadcast_dimensions")
    return Needs([tuple(out.spec[d] if x.shape[i] == out.shape[d] else () for i, d in enumerate(dims))])


def _transpose(operation: Operation) -> Needs:
    (out,) = operation.outputs
    spec: list[Axes] = [()] * len(out.shape)
    for at, dim in enumerate(operation.dims("permutation")):
        spec[dim] = out.spec[at]
    return Needs([tuple(spec)])


def _reshape(operation: Operation) -> Needs:
    """Axes that the result keeps stay where they are."""
    (x,), (out,) = operation.inputs, operation.outputs
    return Needs([tuple(_within(axes, out.axes) for axes in x.spec)])


def _dot(operation: Operation) -> Needs:
    """A contracted dim that both operands split in the same way, or that only one splits, is a sum over its axes."""
    lhs, rhs, out = *operation.inputs[:2], operation.outputs[0]
    batch_l, batch_r, contract_l, contract_r = dot_dims(operation)
    free_l = [d for d in range(len(lhs.shape)) if d not in batch_l + contract_l]
    free_r = [d for d in range(len(rhs.shape)) if d not in batch_r + contract_r]
    contracted = [_contracted(lhs.spec[a], rhs.spec[b], out.axes) for a, b in zip(contract_l, contract_r, strict=True)]
    partial = [axis for axes in contracted for axis in axes]
    result = [_without(axes, partial) for axes in out.spec]  # batch dims, free dims of lhs, free dims of rhs
    count = len(batch_l)
    need_l = dict(zip([*batch_l, *free_l, *contract_l], [*result[: count + len(free_l)], *contracted], strict=True))
    of_rhs = [*result[:count], *result[count + len(free_l) :], *contracted]
    need_r = dict(zip([*batch_r, *free_r, *contract_r], of_rhs, strict=True))
    return Needs([tuple(need[d] for d in sorted(need)) for need in (need_l, need_r)], partial)


def _contracted(left: Axes, right: Axes, taken: frozenset[str]) -> Axes:
    """The axes over which a contracted dim stays split. Axes that split only one operand may be taken by the result."""
    both = _within(left, right)
    return both if left and right else _without((*left, *right), taken)


def dot_dims(operation: Operation) -> tuple[tuple[int, ...], ...]:
    """(batch dims of lhs, of rhs, contracting dims of lhs, of rhs) of a dot_general."""
    text = operation.attributes["dot_dimension_numbers"]
    kinds, sides = ("batching", "contracting"), ("lhs", "rhs")
    return tuple(dims_of(text, f"{side}_{kind}_dimensions") for kind in kinds for side in sides)


def dims_of(text: str, name: str) -> tuple[int, ...]:
    """The numbers of a field such as `lhs_batching_dimensions = [0, 2]`."""
    at = text.find(name)
    if at < 0:
        return ()
    inside = text[text.index("[", at) + 1 : text.index("]", at)]
    return tuple(int(number) for number in inside.split(",") if number.strip())


def _convolution(operation: Operation) -> Needs:
    """Batch and output features as the result needs them; the sum over input features as in a matrix product."""
    lhs, rhs = operation.inputs[:2]
    left, right, result = conv_labels(operation)
    out = dict(zip(result, operation.outputs[0].spec, strict=True))
    both = _within(lhs.spec[left.index("f")], rhs.spec[right.index("i")])
    of_lhs = {"b": _without(out["b"], both), "f": both}
    of_rhs = {"o": _without(out["f"], both), "i": both}
    needed = [tuple(of.get(label, ()) for label in labels) for labels, of in ((left, of_lhs), (right, of_rhs))]
    return Needs(needed, both)


def conv_labels(operation: Operation) -> tuple[list[str], list[str], list[str]]:
    """The labels of the dims of both operands and of the result: b, f, i, o, and numbers for spatial dims."""
    left, right, result = re.findall(r"\[([^\]]*)\]", operation.attributes["dimension_numbers"])[:3]
    return left.split(", "), right.split(", "), result.split(", ")


def _reduce(operation: Operation) -> Needs:
    """The result is a sum over the axes of the reduced dims."""
    dims, out = operation.dims("dimensions"), operation.outputs[0]
    arrays = operation.inputs[: len(operation.inputs) // 2]  # the others are initial values
    partial = list(dict.fromkeys(axis for x in arrays for d in dims for axis in x.spec[d]))
    needed: list[Spec] = []
    for x in arrays:
        kept = iter(out.spec)
        needed.append(tuple(x.spec[d] if d in dims else _without(next(kept), partial) for d in range(len(x.shape))))
    return Needs(needed, partial)


def _gather(operation: Operation) -> Needs:
    """A lookup: the rows of a split table are selected where they are, and summed."""
    table, out = operation.inputs[0], operation.outputs[0]
    text = operation.attributes["dimension_numbers"]
    indexed = dims_of(text, "start_index_map")
    removed = dims_of(text, "collapsed_slice_dims") + dims_of(text, "operand_batching_dims")
    wanted = [_without(axes, out.axes) if d in indexed else axes for d, axes in enumerate(table.spec)]
    free = [d for d in range(len(table.shape)) if d not in removed]
    for d, at in zip(free, dims_of(text, "offset_dims"), strict=False):
        if d not in indexed:
            wanted[d] = out.spec[at] if table.shape[d] == out.shape[at] else ()
    return Needs([tuple(wanted), None], [axis for d in indexed for axis in wanted[d]])


def _scatter(operation: Operation) -> Needs:
    """Rows of updates are added where they belong; the axes that split them are summed over, or gathered first."""
    count = len(operation.inputs) // 2
    updates, out = operation.inputs[count + 1], operation.outputs[0]
    window = dims_of(operation.attributes["scatter_dimension_numbers"], "update_window_dims")
    rows = [axis for d, axes in enumerate(updates.spec) if d not in window for axis in axes]
    taken = [axis for axis in rows if axis in out.axes]
    needed: list[Spec | None] = [None] * len(operation.inputs)
    if taken:
        needed[count + 1] = tuple(_without(axes, taken) for axes in updates.spec)
    return Needs(needed, [axis for axis in rows if axis not in out.axes])


def _along(operation: Operation) -> Needs:
    """Dims along which an operation works, such as a sort, must not be split."""
    dims = operation.dims("dimension")
    return Needs([tuple(() if d in dims else axes for d, axes in enumerate(x.spec)) for x in operation.inputs])


def _slice(operation: Operation) -> Needs:
    """Dims that are cut keep the axes that the result has there; the others are as the result needs them."""
    x, out = operation.inputs[0], operation.outputs[0]
    triples = zip(x.spec, out.spec, x.shape, out.shape, strict=True)
    return Needs([tuple(b if size == cut else _within(a, b) for a, b, size, cut in triples)])


def _update(operation: Operation) -> Needs:
    x, update, out = *operation.inputs[:2], operation.outputs[0]
    sizes = zip(out.spec, x.shape, update.shape, strict=True)
    return Needs([out.spec, tuple(axes if whole == part else () for axes, whole, part in sizes)])


def _within(axes: Sequence[str], other: Sequence[str] | frozenset[str]) -> Axes:
    return tuple(axis for axis in axes if axis in other)


def _without(axes: Sequence[str], other: Sequence[str] | frozenset[str]) -> Axes:
    return tuple(axis for axis in axes if axis not in other)


# Operations without a rule.
LOCAL = ("while", "case", "if", "shard", "iota", "constant", "rng_bit_generator", "custom_call", "to_device", "to_host")
RULES: dict[str, Callable[[Operation], Needs]] = {
    **dict.fromkeys((*LOCAL, "reduce_window", "select_and_scatter"), lambda operation: Needs([])),
    "reshard": _as_result,
    "concatenate": _as_result,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "dot_general": _dot,
    "convolution": _convolution,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "sort": _along,
    "slice": _slice,
    "dynamic_slice": _slice,
    "pad": _slice,
    "dynamic_update_slice": _update,
}
