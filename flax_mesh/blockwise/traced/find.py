"""Finds attention: a softmax over one dim, whose result is contracted along that dim with other data.

From each exp, forward: its sum determines the dim of the keys, its product the values. Then backward from the scores:
the product above them determines the dim of the queries. Equations between the products are evaluated, not recognized.
"""

from collections.abc import Collection
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from flax_mesh.blockwise.traced.dims import (
    VIEWS,
    Labels,
    Order,
    is_blockable,
    labels_after,
    labels_before,
    order_after,
    order_of,
)
from flax_mesh.blockwise.traced.graph import Atom, Level, Literal, Op, Value, source

FEWEST = 32  # queries or keys: a softmax over fewer is the softmax of a router
Uses = dict[int, list[tuple[Op | None, int]]]  # id of a value -> (operation, number of the input); None: an output


class NotFoundError(Exception):
    """Why an exp is not the softmax of an attention; "" if it has no resemblance to one."""


class Softmax(NamedTuple):
    """An attention. Its labels are the dims of the output of `exp`."""

    exp: Op
    product: Op
    value_at: int  # which operand of the product the values are
    scores: Atom  # without the shift by the maximum
    extra: tuple[Atom, ...]  # further columns of the scores, without values: sinks
    weights: tuple[tuple[Op, int], ...]  # operations from the exp to the operand of the sum or of the product
    divisions: frozenset[int]  # ids of the operations of `order` that divide by the sum
    summed: Value
    weighted: Value
    labels: dict[int, Labels]  # id of a result of `weights` -> labels
    q: int
    k: int
    lengths: tuple[int, int]


def are_scores(queries: int, keys: int, block: int) -> bool:
    """Whether dims of these sizes have more elements than a block of scores."""
    return queries * keys >= block**2 and min(queries, keys) >= FEWEST


def uses_of(level: Level) -> Uses:
    uses: Uses = {}
    for op in level.ops:
        for i, x in enumerate(op.inputs):
            uses.setdefault(id(x), []).append((op, i))
    for x in level.outputs:
        uses.setdefault(id(x), []).append((None, 0))
    return uses


def find_softmax(exp: Op, uses: Uses) -> list[Softmax]:
    """The attentions around an exp, one per product with values. Raises NotFoundError."""
    walk = _Forward(exp, uses)
    k, labels = walk.key_dim()
    scores, extra, kept = _columns(_unshifted(exp.inputs[0], k), k)
    if {*walk.cut(k, labels)} != {kept}:
        raise NotFoundError("the softmax is cut at other columns than those that are joined")
    q = _query_dim(scores, k)
    attentions: list[Softmax] = []
    for product, at, weighted in walk.products:
        if not walk.divided[id(weighted)]:
            raise NotFoundError("the operand of the product is not divided by the sum")
        contracted = product.params["dimension_numbers"][0][at]
        if [labels[id(weighted)][d] for d in contracted] != [k]:
            raise NotFoundError("")  # the weights of a router, for example
        after = labels_after(product, at, labels[id(weighted)], (q,)) or ()
        if q not in after:
            raise NotFoundError("the dim of the queries is lost before the product with the values")
        walk.check_sizes(q, k, labels)
        values = labels_before(product, 1 - at, after, (q,))
        if values is None or q in values:
            raise NotFoundError("")  # every query has other values
        lengths = exp.outputs[0].shape[q], scores.shape[k]
        order, divisions = tuple(walk.order), frozenset(walk.divisions)
        both = walk.sums[0][1], weighted
        attentions.append(Softmax(exp, product, 1 - at, scores, extra, order, divisions, *both, labels, q, k, lengths))
    return attentions


class _Forward:
    """The walk from an exp to its sum and to the products."""

    def __init__(self, exp: Op, uses: Uses):
        self.exp, self.uses = exp, uses
        self.order: list[tuple[Op, int]] = []
        self.sums: list[tuple[Op, Value]] = []
        self.products: list[tuple[Op, int, Value]] = []
        self.divided = {id(exp.outputs[0]): False}
        self.divisions: set[int] = set()
        self._walk()
        if not self.products:
            raise NotFoundError("")
        if len({id(x) for _, x in self.sums}) != 1:
            raise NotFoundError("the softmax is summed itself" if self.sums else "its sum is not that of the same exp")
        if len({op.params["axes"] for op, _ in self.sums}) != 1:
            raise NotFoundError("it is summed over different dims")
        self._mark_divided()

    def _walk(self) -> None:
        todo, seen = [self.exp.outputs[0]], {id(self.exp.outputs[0])}
        problems: list[str] = []
        while todo:
            x = todo.pop(0)
            for op, i in self.uses.get(id(x), []):
                if op is None:
                    problems.append("the softmax is also a result of the function or of a loop")
                elif op.name == "reduce_sum":
                    self.sums.append((op, x))
                elif op.name == "dot_general":
                    self.products.append((op, i, x))
                elif not _is_linear(op, i, seen):
                    problems.append(f"the softmax is also used by {op.name}")
                else:
                    self.order.append((op, i))
                    if id(op.outputs[0]) not in seen:
                        seen.add(id(op.outputs[0]))
                        todo.append(op.outputs[0])
        if problems and self.products:
            raise NotFoundError(problems[0])
        place = {id(op): n for n, op in enumerate(self.exp.level.ops)}
        self.order.sort(key=lambda each: place[id(each[0])])

    def _mark_divided(self) -> None:
        sums = {id(op.outputs[0]) for op, _ in self.sums}
        for op, i in self.order:
            divided = self.divided[id(op.inputs[i])]
            other = op.inputs[1 - i] if op.name in ("div", "mul") else None
            if (op.name == "div" and _comes_from(other, sums)) or (op.name == "mul" and _is_inverse(other, sums)):
                if divided:
                    raise NotFoundError("it is divided by its sum twice")
                divided = True
                self.divisions.add(id(op))
            self.divided[id(op.outputs[0])] = divided
        if any(self.divided[id(x)] for _, x in self.sums):
            raise NotFoundError("the divided softmax is summed")

    def _check_sums(self, k: int) -> None:
        """The sum of a row may only divide values of this row."""
        out = self.exp.outputs[0]
        rows: dict[int, Order | None] = {id(out): order_of(out.shape)}

        def after(op: Op, i: int, order: Order | None) -> Order | None:
            return None if order is None else order_after(op, i, order)

        for op, i in self.order:
            rows[id(op.outputs[0])] = after(op, i, rows[id(op.inputs[i])])
        todo = [(op.outputs[0], after(op, 0, rows[id(x)])) for op, x in self.sums]
        while todo:
            x, mine = todo.pop()
            for op, i in self.uses.get(id(x), []):
                if op is None:
                    raise NotFoundError("the sum of the softmax is also a result of the function or of a loop")
                if is_view(op) or (op.name == "div" and i == 1 and _is_number(op.inputs[0], 1)) or _is_power(op):
                    todo.append((op.outputs[0], after(op, i, mine)))
                elif id(op) not in self.divisions:
                    raise NotFoundError(f"the sum of the softmax is also used by {op.name}")
                else:
                    divided, divisor = rows[id(op.outputs[0])], after(op, i, mine)
                    if divided is None or divisor != _without(divided, k):
                        raise NotFoundError("it is divided by the sum of other rows")

    def key_dim(self) -> tuple[int, dict[int, Labels]]:
        """The dim of the keys, and the labels of all weights."""
        out = self.exp.outputs[0]
        labels: dict[int, Labels] = {id(out): tuple(range(len(out.shape)))}
        op, summed = self.sums[0]
        for op_, i in self.order:
            new = labels_after(op_, i, labels[id(op_.inputs[i])]) if op_.name != "slice" else labels[id(op_.inputs[i])]
            if new is None:
                raise NotFoundError(f"its dims are lost in {op_.name}")
            labels[id(op_.outputs[0])] = new
        if len(axes := op.params["axes"]) != 1:
            raise NotFoundError("it is a softmax over several dims")
        if labels[id(summed)] != labels[id(out)]:
            raise NotFoundError("its sum is taken in another layout")
        self._check_sums(k := int(axes[0]))
        return k, labels

    def check_sizes(self, q: int, k: int, labels: dict[int, Labels]) -> None:
        """The dims of queries and of keys may not be split or merged."""
        for op, _ in self.order:
            x = op.outputs[0]
            for d, label in enumerate(labels[id(x)]):
                first, stop = self.ranges[id(x)] if label == k else (0, self.exp.outputs[0].shape[q])
                if label in (q, k) and x.shape[d] != stop - first:
                    raise NotFoundError(f"the dim of {'keys' if label == k else 'queries'} is changed by {op.name}")

    def cut(self, k: int, labels: dict[int, Labels]) -> list[tuple[int, int]]:
        """The ranges of keys that the operands of the products have, [first, stop)."""
        every = 0, self.exp.outputs[0].shape[k]
        ranges = self.ranges = {id(self.exp.outputs[0]): every}
        for op, i in self.order:
            ranges[id(op.outputs[0])] = first, stop = ranges[id(op.inputs[i])]
            if op.name == "slice":
                starts, limits, strides = (op.params[x] for x in ("start_indices", "limit_indices", "strides"))
                if any(n != 1 for n in strides or ()):
                    raise NotFoundError("a part of the softmax is used")
                for d, size in enumerate(op.inputs[i].shape):
                    if (starts[d], limits[d]) != (0, size):
                        if labels[id(op.inputs[i])][d] != k or stop - first != size:
                            raise NotFoundError("a part of the softmax is used")
                        ranges[id(op.outputs[0])] = first + starts[d], first + limits[d]
        if ranges[id(self.sums[0][1])] != every:
            raise NotFoundError("a part of the softmax is summed")
        return [ranges[id(x)] for _, _, x in self.products]


def _without(order: Order, k: int) -> Order:
    """The order of an array that is repeated along the keys."""
    return tuple(tuple((None if label == k else label, step, n) for label, step, n in dim) for dim in order)


def is_view(op: Op) -> bool:
    """Whether it changes the layout or rounds: a conversion to integers is not linear, and has no gradient."""
    dtype = op.params.get("new_dtype", np.float32)
    return op.name in VIEWS and bool(jnp.issubdtype(dtype, jnp.floating))


def _is_linear(op: Op, i: int, weights: set[int]) -> bool:
    if is_view(op) or op.name == "slice":
        return True
    if op.name == "div":
        return i == 0
    if op.name == "mul":
        return id(op.inputs[1 - i]) not in weights
    others = [x for n, x in enumerate(op.inputs[1:], 1) if n != i]
    return op.name == "select_n" and i > 0 and all(_is_number(x, 0) for x in others)


def _is_number(x: Atom, number: float) -> bool:
    while isinstance(x, Value) and x.op is not None and x.op.name in ("broadcast_in_dim", "convert_element_type"):
        x = x.op.inputs[0]
    return isinstance(x, Literal) and np.ndim(x.value) == 0 and float(x.value) == number


def _is_power(op: Op) -> bool:
    return op.name == "integer_pow" and op.params["y"] == -1


def _comes_from(x: Atom | None, sums: Collection[int]) -> bool:
    while isinstance(x, Value) and id(x) not in sums:
        if x.op is None or not is_view(x.op):
            return False
        x = x.op.inputs[0]
    return isinstance(x, Value)


def _is_inverse(x: Atom | None, sums: Collection[int]) -> bool:
    while isinstance(x, Value) and x.op is not None:
        if x.op.name == "div" and _is_number(x.op.inputs[0], 1):
            return _comes_from(x.op.inputs[1], sums)
        if _is_power(x.op):
            return _comes_from(x.op.inputs[0], sums)
        if not is_view(x.op):
            return False
        x = x.op.inputs[0]
    return False


def _unshifted(x: Atom, k: int) -> Atom:
    """The scores without the value that is subtracted from each row, which does not change the softmax."""
    while isinstance(x, Value) and x.op is not None and x.op.name == "sub" and _is_constant_along(x.op.inputs[1], k):
        x = x.op.inputs[0]
    return x


def _is_constant_along(x: Atom, k: int) -> bool:
    while isinstance(x, Value):
        if x.shape == () or x.shape[k] == 1:
            return True
        if x.op is None or x.op.name not in ("broadcast_in_dim", "stop_gradient", "convert_element_type"):
            return False
        if x.op.name == "broadcast_in_dim":
            to = list(x.op.params["broadcast_dimensions"])
            return k not in to or x.op.inputs[0].shape[to.index(k)] == 1
        x = x.op.inputs[0]
    return True


def _columns(x: Atom, k: int) -> tuple[Atom, tuple[Atom, ...], tuple[int, int]]:
    """(scores, further columns, range of the scores): the largest of the arrays that are joined along the keys."""
    op = x.op if isinstance(x, Value) else None
    if op is None or op.name != "concatenate" or op.params["dimension"] != k:
        return x, (), (0, x.shape[k])
    sizes = [each.shape[k] for each in op.inputs]
    at = sizes.index(max(sizes))
    first = sum(sizes[:at])
    return op.inputs[at], tuple(each for n, each in enumerate(op.inputs) if n != at), (first, first + sizes[at])


def _query_dim(scores: Atom, k: int) -> int:
    """The largest dim of the scores that only one factor of a product has, where the other factor has the keys."""
    dim, most, seen = None, 0, set[tuple[int, Labels]]()
    todo: list[tuple[Atom, Labels]] = [(scores, tuple(range(len(scores.shape))))]
    while todo:
        x, labels = todo.pop()
        x = source(x)
        if isinstance(x, Literal) or (id(x), labels) in seen or x.op is None or x.op.bodies or k not in labels:
            continue
        seen.add((id(x), labels))
        op = x.op
        inputs = [labels_before(op, i, labels, (k,)) for i in range(len(op.inputs))]
        if not is_blockable(op, labels, (k,)) or any(each is None for each in inputs):
            continue
        if op.name == "dot_general":
            a, b = [{label for label in each or () if label is not None} for each in inputs]
            of_queries, other = (a - b, b - a) if k in b else (b - a, a - b)
            size = {label: x.shape[d] for d, label in enumerate(labels) if label is not None}
            if of_queries and not (k in a and k in b):
                best = max(of_queries, key=lambda label: size[label])
                if dim is None or size[best] > most:
                    dim, most = best, size[best]
                # Otherwise the scores themselves are multiplied by a parameter, as in talking heads.
                if max((size[label] for label in other if label != k), default=0) <= size[best]:
                    continue
        todo += [(x, each) for x, each in zip(op.inputs, inputs, strict=True) if each is not None]
    if dim is None:
        raise NotFoundError("no product of queries and keys is above the softmax")
    return dim
