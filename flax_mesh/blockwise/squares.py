"""Arrays that grow with the square of the length of sequences, although no attention is recognized in them.

Two tests find them. First, a softmax by other means: an exponential that is summed over a dim and, behind operations of
any kind, contracted along it. Second, the dims of the inputs are followed through the program: an array is square if
two of its dims come from the same dim of one input, such as the scores of self-attention without a softmax.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import cast

import numpy as np

from flax_mesh.axes import Layout
from flax_mesh.blockwise.place import DimRules
from flax_mesh.blockwise.traced.dims import Labels
from flax_mesh.blockwise.traced.find import are_scores, is_view
from flax_mesh.blockwise.traced.graph import Level, Op, Value, all_levels, facts_of, source
from flax_mesh.program.program import Eqn

_EXPONENTIALS = frozenset({"exp", "exp2", "pow"})
_USUAL = frozenset({"div", "mul", "reduce_sum", "select_n"})  # between the exponential and the product with values
_PARTS = frozenset({"concatenate", "dynamic_slice", "pad", "rev", "slice"})  # their dims keep the origin, not the size


def unrecognized(
    top: Level, needed: set[int], named: set[int], small: Mapping[int, str], block: int
) -> list[tuple[Value, Op, str]]:
    """(array, its operation, reason why it stays) for the arrays that `needed` operations store.

    Args:
        top: The program.
        needed: Ids of the operations that are computed.
        named: Ids of operations whose arrays are named already. A square array that leads to one is left out.
        small: Why attentions that are recognized and small stay, by the ids of their exps.
        block: The fewest elements in each of the two dims of a softmax. Square arrays have `block` times `block`.
    """
    origins = facts_of(top, [_origin(n, len(x.shape)) for n, x in enumerate(top.inputs)], _Origins())
    unnamed: list[tuple[Value, Op, str]] = []
    for level in all_levels(top):
        ops = [op for op in level.ops if id(op) in needed]
        reasons = [(op, _other_softmax(op, islice(ops, n + 1, None), block)) for n, op in enumerate(ops)]
        similar = {id(op): small.get(id(op), reason) for op, reason in reasons if reason and id(op) not in named}
        outputs = [out for op in ops if not op.bodies for out in op.outputs]
        square = {id(out) for out in outputs if _is_square(out, origins.get(id(out)), block)}
        ends, before, first = named | similar.keys(), set[int](), list[tuple[Value, Op]]()
        for op in reversed(ops):
            if id(op) in ends or any(id(out) in before for out in op.outputs):
                before |= {id(x) for x in op.inputs}
            elif not any(id(source(x)) in square for x in op.inputs):
                first += [(out, op) for out in op.outputs if id(out) in square]
        unnamed += [(op.outputs[0], op, similar[id(op)]) for op in ops if id(op) in similar]
        unnamed += [(out, op, "no attention is recognized in it") for out, op in reversed(first)]
    return unnamed


def _other_softmax(op: Op, later: Iterable[Op], block: int) -> str:
    """Why an operation is not recognized as the softmax of an attention; "" if it is not similar to one.

    It is similar if it computes an exponential of `block` elements or more in two dims, which `later` operations sum
    over one of them and contract along it.
    """
    if not op.outputs or not (op.name in _EXPONENTIALS or _has_softmax(op)):
        return ""
    out = op.outputs[0]
    long = {d for d, size in enumerate(out.shape) if size >= block}
    if len(long) < 2 or 0 in out.shape:
        return ""
    dims = tuple(range(len(out.shape)))
    labels: dict[int, Labels] = {id(out): dims}
    shapes: dict[tuple[int, ...], Labels] = {out.shape: dims}
    summed, contracted, others = {*long} if op.bodies else set[int | None](), set[int | None](), list[str]()
    for user in later:
        for i, x in enumerate(user.inputs):
            if (given := labels.get(id(x))) is None or user.name in _EXPONENTIALS:
                continue
            if user.name == "reduce_sum":
                summed |= {given[d] for d in user.params["axes"]}
            elif user.name == "dot_general" and len(axes := user.params["dimension_numbers"][0][i]) == 1:
                contracted |= {given[d] for d in axes}
            if not contracted & long and long <= {*given} and not (user.name in _USUAL or is_view(user)):
                others.append(user.name)
            for result in user.outputs:
                new = _followed(user, i, given, result)
                if user.name == "reshape":  # back to a shape restores the dims that another reshape has merged
                    new = shapes.setdefault(result.shape, new)
                labels[id(result)] = shapes[result.shape] = _merged(labels.get(id(result)), new)
    if not long & summed & contracted:
        return ""
    if op.name != "exp":
        return f"its softmax is computed by {op.name}"
    return f"its softmax is followed by {others[0]}" if others else "its softmax has another form"


def _has_softmax(op: Op) -> bool:
    """Whether it is a function with its own derivative, and sums exponentials."""
    names = {inner.name for body in op.bodies for level in all_levels(body) for inner in level.ops}
    return op.is_closed and "reduce_sum" in names and not names.isdisjoint(_EXPONENTIALS)


def _followed(op: Op, i: int, labels: Labels, result: Value) -> Labels:
    dims = _RULES.dims(op.eqn, i, op.inputs[i].shape, result.shape)
    of = {o: label for label, o in zip(labels, dims, strict=True) if o is not None}
    return tuple(of.get(d) for d in range(len(result.shape)))


def _merged(labels: Labels | None, others: Labels) -> Labels:
    return others if labels is None else tuple(b if a is None else a for a, b in zip(labels, others, strict=True))


def _is_square(x: Value, origins: Layout | None, block: int) -> bool:
    """Whether two dims have a common origin, and at least `block` times `block` elements."""
    return any(
        {*origins[d]} & {*origins[e]} and are_scores(n, m, block)
        for d, n in enumerate(x.shape)
        for e, m in enumerate(x.shape[:d])
        if origins and 0 not in x.shape
    )


class _Origins(DimRules):
    """The dims of inputs, and of arrays that the function closes over, that each dim comes from."""

    def constant(self, value: object) -> Layout | None:
        return _origin(id(value), np.ndim(cast("np.ndarray", value)))

    def dims(self, eqn: Eqn, number: int, before: tuple[int, ...], after: tuple[int, ...]) -> Sequence[int | None]:
        if eqn.primitive.name in _PARTS and len(before) == len(after):
            return range(len(before))
        return super().dims(eqn, number, before, after)


def _origin(number: int, rank: int) -> Layout:
    return tuple((f"{number}.{d}",) for d in range(rank))


_RULES = _Origins()
