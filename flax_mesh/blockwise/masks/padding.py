"""Padding: data of the queries or of the keys of a row that decide which of them are seen, followed to its origin.

Models often make a mask as numbers, before all layers: `(1 - keep) * -1e9`, which is added to the scores. Such numbers
are followed to the booleans or integers that they are computed from. These have no gradient; what starts from floats
may have one, and is no padding.
"""

# JAX has no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flax_mesh.blockwise.masks.mask import NoFormulaError, needed_steps
from flax_mesh.blockwise.masks.visits import Static
from flax_mesh.blockwise.traced.dims import (
    POINTWISE,
    VIEWS,
    Block,
    Labels,
    Order,
    evaluate_block,
    known_value,
    labels_before,
    order_after,
    order_of,
)
from flax_mesh.blockwise.traced.graph import Op, Value, source
from flax_mesh.blockwise.traced.region import Key, Region


class Padding(NamedTuple):
    key: Key  # a leaf of the scores
    origin: Value  # booleans, or integers, which may be other numbers than 0 and 1
    labels: Labels  # of the origin
    numbers: tuple[float, float]  # all elements of the leaf, where the origin is 0 and where it is 1


def padding_of(region: Region, static: Static, labels: Collection[int], ids: Collection[Key]) -> dict[str, Padding]:
    """The padding of queries, "q_pad", and of keys, "k_pad". `labels` are those that an operand may have.

    `ids` are the leaves with ids of documents. Raises NoFormulaError if there are several for one dim.
    """
    used = {x for step in needed_steps(region.score_steps, region.scores, {}) for x in step.inputs}
    paddings: dict[str, Padding] = {}
    for key, (value, of) in region.leaves.items():
        names = [name for name, label in (("q_pad", region.q), ("k_pad", region.k)) if label in of]
        if key not in used or key in ids or static.get(key) is not None or len(names) != 1:
            continue
        if (padding := _followed(key, value, of)) is None:
            continue
        sizes = zip(padding.origin.shape, padding.labels, strict=True)
        if names[0] in paddings or any(n > 1 and x not in labels for n, x in sizes):
            raise NoFormulaError("its padding is several arrays, or not by rows")
        paddings[names[0]] = padding
    return paddings


def _followed(key: Key, x: Value, labels: Labels) -> Padding | None:
    """From a leaf to the only array of data that it is computed from: the first integers, or booleans behind them."""
    ends: list[tuple[Value, Labels, list[tuple[Op, int]]]] = []
    path: list[tuple[Op, int]] = []
    while True:
        if not jnp.issubdtype(x.aval.dtype, jnp.floating):
            ends = [*ends[:1], (x, labels, [*path])]
        if x.aval.dtype == bool and (x.op is None or x.op.name != "not"):
            break
        if (before := _only_data(x, labels)) is None:
            break
        path.append((before.op, before.number))
        x, labels = before.value, before.labels
    if not ends:
        return None
    origin, labels, path = ends[-1] if ends[-1][0].aval.dtype == bool else ends[0]
    off, on = (_number(path, origin, n) for n in (0, 1))
    return None if off is None or on is None else Padding(key, origin, labels, (off, on))


class _Before(NamedTuple):
    op: Op
    number: int  # of the input
    value: Value
    labels: Labels


def _only_data(x: Value, labels: Labels) -> _Before | None:
    """The only input, of the operation that computes a value elementwise, that is not known at trace time."""
    op = x.op
    if op is None or len(op.outputs) > 1 or op.name not in POINTWISE | VIEWS:
        return None
    data = [n for n, each in enumerate(op.inputs) if known_value(each, {}) is None]
    before = labels_before(op, data[0], labels) if len(data) == 1 else None
    inner = source(op.inputs[data[0]]) if before is not None else None
    return _Before(op, data[0], inner, before) if before is not None and isinstance(inner, Value) else None


def _number(path: Sequence[tuple[Op, int]], origin: Value, number: int) -> float | None:
    """What all elements at the start of a path are, if all elements of its origin are this number."""
    x = np.full(origin.shape, number, origin.aval.dtype)
    with jax.ensure_compile_time_eval():
        for op, at in reversed(path):
            values = [x if n == at else known_value(each, {}) for n, each in enumerate(op.inputs)]
            arrays = [jnp.asarray(each) for each in values]
            x = np.asarray(evaluate_block(op, (None,) * len(op.outputs[0].shape), arrays, Block({}, {}, {}, {})))
    return float(x.reshape(-1)[0]) if x.size and bool((x == x.reshape(-1)[0]).all()) else None


def is_by_lengths(padding: Padding, k: int, seen: int) -> bool:
    """Whether known numbers that rise along the keys are compared with one number of a row."""
    x, labels = before_views(padding.origin, padding.labels)
    if x.op is None or x.op.name not in ("lt", "le", "gt", "ge"):
        return False
    sides = [(y, labels_before(x.op, n, labels) or ()) for n, y in enumerate(x.op.inputs)]
    low, high = sides if (x.op.name in ("lt", "le")) == bool(seen) else sides[::-1]
    for (given, of_given), (other, of_other), sign in ((low, high, 1), (high, low, -1)):
        known, limit = known_value(given, {}), source(other)
        if known is not None and k in of_given and isinstance(limit, Value):
            rises = (np.diff(sign * known.astype(np.float64), axis=of_given.index(k)) >= 0).all()
            if rises and k not in before_views(limit, of_other)[1]:
                return True
    return False


def before_views(x: Value, labels: Labels, views: Collection[str] = VIEWS) -> tuple[Value, Labels]:
    """The array that a view has the elements of, and its labels: without those along which it was repeated."""
    while x.op is not None and x.op.name in views and isinstance(before := source(x.op.inputs[0]), Value):
        given = labels_before(x.op, 0, labels)
        if given is None or (x.op.name != "broadcast_in_dim" and not {*labels} <= {*given, None}):
            break
        x, labels = before, given
    return x, labels


def numbers_of(paddings: Mapping[str, Padding]) -> dict[Key, tuple[float, float]]:
    return {padding.key: padding.numbers for padding in paddings.values()}


def sees_itself(region: Region, paddings: Mapping[str, Padding], ids: Key) -> bool:
    """Whether every query that sees a key of its document also sees the key at its own position.

    So it is if the same data leave queries and keys, or if the id of a key alone decides whether it is left.
    """
    both, of_keys = {region.q, region.k}, paddings.get("k_pad")
    if of_keys is None:
        return False
    at = of_keys.origin, of_keys.labels
    if of_queries := paddings.get("q_pad"):
        return _are_same(at, (of_queries.origin, of_queries.labels), both)
    wanted = elements_of(*region.leaves[ids], both)
    while (here := elements_of(*at, both)) is None or here != wanted:
        if (before := _only_data(*at)) is None or _parameters(before) is None:
            return False
        at = before.value, before.labels
    return True


def _are_same(a: tuple[Value, Labels], b: tuple[Value, Labels], both: set[int]) -> bool:
    """Whether the same operations compute two arrays from one; the dims of `both` count as one."""
    while (of_a := elements_of(*a, both)) is None or of_a != elements_of(*b, both):
        before = [_only_data(*before_views(*x)) for x in (a, b)]
        operations = [x and _parameters(x) for x in before]
        if before[0] is None or before[1] is None or operations[0] is None or operations[0] != operations[1]:
            return False
        a, b = ((x.value, x.labels) for x in (before[0], before[1]))
    return True


def _parameters(before: _Before) -> tuple[object, ...] | None:
    """What decides the values of an operation besides its data, None if it depends on the position of an element."""
    numbers = [known_value(each, {}) for n, each in enumerate(before.op.inputs) if n != before.number]
    if any(x is None or not x.size or (x != x.reshape(-1)[0]).any() for x in numbers):
        return None
    others = [x.reshape(-1)[0].item() for x in numbers if x is not None]
    return before.op.name, before.number, str(before.op.outputs[0].aval.dtype), *others


def elements_of(x: Value, labels: Labels, both: set[int]) -> tuple[int, tuple[object, ...]] | None:
    """(id of the array that has the same elements, label of each of its dims): the dims of `both` count as one."""
    views: list[Op] = []
    while x.op is not None and x.op.name in VIEWS and isinstance(before := source(x.op.inputs[0]), Value):
        if x.op.name == "convert_element_type" and before.aval.dtype != x.aval.dtype:
            break
        views.append(x.op)
        x = before
    order: Order | None = order_of(x.shape)
    for op in reversed(views):
        order = None if order is None else order_after(op, 0, order)
    if order is None or any(len(dim) > 1 or (dim and dim[0][0] is None) for dim in order):
        return None
    of = {dim[0][0]: "both" if label in both else label for dim, label in zip(order, labels, strict=True) if dim}
    return id(x), tuple(of.get(d) for d in range(len(x.shape)))
