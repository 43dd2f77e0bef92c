"""The operations between the two products of an attention, on blocks, and the leaves from which they start."""

# JAX has no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from flax_mesh.blockwise.traced.dims import Block, Labels, evaluate_block, is_blockable, labels_after, labels_before
from flax_mesh.blockwise.traced.find import NotFoundError, Softmax
from flax_mesh.blockwise.traced.graph import Atom, Literal, Op, Value, source

Key: TypeAlias = tuple[int, Labels] | Literal  # (id of a value, labels) or a number
Values: TypeAlias = dict[Key, jax.Array]


class Step(NamedTuple):
    op: Op
    labels: Labels  # of the output
    inputs: tuple[Key, ...]
    output: Key
    divides: bool = False  # by the sum: the loops divide the result instead


@dataclass(frozen=True)
class Region:
    softmax: Softmax
    leaves: Mapping[Key, tuple[Value, Labels]]
    score_steps: tuple[Step, ...]  # from the leaves to the scores, shared ones of masks and dropout included
    weight_steps: tuple[Step, ...]  # from the exp to the operands of the sum and of the product
    scores: Key
    exp: Key
    summed: Key
    weighted: Key
    values: Key
    extra: tuple[Key, ...]  # columns without values
    layout: tuple[
        tuple[Op, Labels], ...
    ]  # from the exp to the operand of the product: they apply to the statistics of rows too
    out_labels: Labels

    @property
    def q(self) -> int:
        return self.softmax.q

    @property
    def k(self) -> int:
        return self.softmax.k

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the scores."""
        return tuple(self.softmax.scores.shape)

    @property
    def out(self) -> Value:
        return self.softmax.product.outputs[0]

    @property
    def selects(self) -> bool:
        """Whether weights are selected after the division: rows without a key may then be 0 and not NaN."""
        after = itertools.dropwhile(lambda step: not step.divides, self.weight_steps)
        return any(step.op.name == "select_n" for step in after)

    def steps_labels(self) -> Sequence[tuple[Op, Labels]]:
        return [(step.op, step.labels) for step in (*self.score_steps, *self.weight_steps)]


def region_of(softmax: Softmax) -> Region:
    """Raises NotFoundError if the operations cannot be evaluated on blocks."""
    walk = _Walk(softmax)
    all_labels = tuple(range(len(softmax.scores.shape)))
    scores = walk.visit(softmax.scores, all_labels)
    exp = walk.key(softmax.exp.outputs[0], all_labels)
    extra = tuple(walk.leaf(x, tuple(None if d == softmax.k else d for d in all_labels)) for x in softmax.extra)
    weight_steps, keys = _weights(walk, softmax, exp)
    weighted = softmax.labels[id(softmax.weighted)]
    at, product = softmax.value_at, softmax.product
    out = labels_after(product, 1 - at, weighted, (softmax.q, softmax.k)) or ()
    contracted, first = product.params["dimension_numbers"][0], softmax.product.inputs[at]
    before = labels_before(product, at, out, (softmax.q, softmax.k)) or (None,) * len(first.shape)
    value_labels = tuple(softmax.k if d in contracted[at] else label for d, label in enumerate(before))
    values = walk.leaf(first, value_labels)
    _check_jumps(walk)
    between = {op.name for op, _ in _path(softmax, softmax.summed)}
    if softmax.extra and not between <= {"convert_element_type", "slice"}:  # a sum of bfloat16 is one of float32
        raise NotFoundError("further columns of the scores are changed before they are summed")
    return Region(
        softmax=softmax,
        leaves=walk.leaves,
        score_steps=tuple(walk.steps),
        weight_steps=tuple(weight_steps),
        scores=scores,
        exp=exp,
        summed=keys[id(softmax.summed)],
        weighted=keys[id(softmax.weighted)],
        values=values,
        extra=extra,
        layout=tuple((op, softmax.labels[id(op.outputs[0])]) for op, _ in _path(softmax, softmax.weighted)),
        out_labels=out,
    )


class _Walk:
    """Backward from a value: an operation whose output has both dims is a step, everything else a leaf."""

    def __init__(self, softmax: Softmax):
        self.whole = (softmax.q, softmax.k)
        self.steps: list[Step] = []
        self.leaves: dict[Key, tuple[Value, Labels]] = {}
        self.seen: set[Key] = set()

    def key(self, x: Atom, labels: Labels) -> tuple[int, Labels]:
        return id(x), tuple(label if x.shape[d] > 1 else None for d, label in enumerate(labels))

    def leaf(self, x: Atom, labels: Labels) -> Key:
        x = source(x)
        if isinstance(x, Literal):
            return x
        key = self.key(x, labels)
        self.leaves[key] = x, key[1]
        return key

    def visit(self, x: Atom, labels: Labels) -> Key:
        todo: list[Step | tuple[Atom, Labels]] = [(x, labels)]
        while todo:
            item = todo.pop()
            if isinstance(item, Step):
                self.steps.append(item)
            elif isinstance(each := source(item[0]), Value) and (key := self.key(each, item[1])) not in self.seen:
                self.seen.add(key)
                todo += self._inputs(each, key)
        return self._key_of(x, labels)

    def _key_of(self, x: Atom, labels: Labels) -> Key:
        return x if isinstance(x := source(x), Literal) else self.key(x, labels)

    def _inputs(self, x: Value, key: tuple[int, Labels]) -> list[Step | tuple[Atom, Labels]]:
        """The step of a value, to be added after its inputs, and these inputs with their labels, the last one first."""
        op, labels = x.op, key[1]
        if op is None or not {*self.whole} <= {*labels} or not is_blockable(op, labels, self.whole):
            self.leaf(x, labels)
            return []
        if op.name in ("iota", "random_bits"):
            return [Step(op, labels, tuple(self.leaf(each, (None,) * len(each.shape)) for each in op.inputs), key)]
        before = [labels_before(op, i, labels, self.whole) or () for i in range(len(op.inputs))]
        inputs = [*zip(op.inputs, before, strict=True)]
        return [Step(op, labels, tuple(self._key_of(*each) for each in inputs), key), *reversed(inputs)]


_JUMPS = frozenset("ceil eq eq_to floor ge gt le le_to lt lt_to ne round sign".split())  # noqa: SIM905


def _check_jumps(walk: _Walk) -> None:
    """A condition on scores of a block and on stored values of the same scores would depend on their rounding."""
    products: dict[Key, set[Op]] = {}
    stored: dict[Key, set[Key]] = {key: {key} for key in walk.leaves}
    for step in walk.steps:
        inputs = [x for x in step.inputs if not isinstance(x, Literal)]
        products[step.output] = set().union(*(products.get(x, ()) for x in inputs))
        stored[step.output] = set().union(*(stored.get(x, ()) for x in inputs))
        if step.op.name == "dot_general":
            products[step.output].add(step.op)
        elif step.op.name in _JUMPS and (of := products[step.output]):
            for key in stored[step.output]:
                if _depends_on(walk.leaves[key][0], of):
                    raise NotFoundError(f"{step.op.name} compares its scores with values computed from the same scores")


def _depends_on(x: Value, products: Collection[Op]) -> bool:
    """Whether a value is computed from one of the products, or from one with the same operands."""
    operands = {frozenset(map(id, map(source, op.inputs))) for op in products}
    todo, seen = list[Atom]([x]), set[int]()
    while todo:
        each = source(todo.pop())
        op = each.op if isinstance(each, Value) else None
        if op is None or id(op) in seen:
            continue
        seen.add(id(op))
        if op.name == "dot_general" and frozenset(map(id, map(source, op.inputs))) in operands:
            return True
        todo += op.inputs
    return False


def _weights(walk: _Walk, softmax: Softmax, exp: Key) -> tuple[list[Step], dict[int, Key]]:
    keys, steps = {id(softmax.exp.outputs[0]): exp}, list[Step]()
    for op, i in sorted(
        {*_path(softmax, softmax.summed), *_path(softmax, softmax.weighted)}, key=softmax.weights.index
    ):
        out, labels = op.outputs[0], softmax.labels[id(op.outputs[0])]
        source_key = keys[id(op.inputs[i])]
        if op.name == "slice":
            keys[id(out)] = source_key
            continue
        if id(op) in softmax.divisions:
            keys[id(out)] = key = walk.key(out, labels)
            steps.append(Step(op, labels, (source_key,), key, divides=True))
            continue
        if softmax.extra and len(op.inputs) > 1 and out.shape[labels.index(softmax.k)] != softmax.lengths[1]:
            raise NotFoundError(f"{op.name} is before the further columns of the scores are cut off")
        inputs: list[Key] = []
        for n, other in enumerate(op.inputs):
            before = labels_before(op, n, labels, walk.whole)
            if before is None:
                raise NotFoundError(f"its dims are lost in {op.name}")
            inputs.append(source_key if n == i else walk.visit(other, before))
        keys[id(out)] = key = walk.key(out, labels)
        steps.append(Step(op, labels, tuple(inputs), key))
    return steps, keys


def _path(softmax: Softmax, x: Value) -> list[tuple[Op, int]]:
    """The operations from the exp to the operand of the sum or of the product, in order."""
    made_by, path = {id(op.outputs[0]): (op, i) for op, i in softmax.weights}, list[tuple[Op, int]]()
    at: Atom = x
    while at is not softmax.exp.outputs[0]:
        path.append(made_by[id(at)])
        op, i = path[-1]
        at = op.inputs[i]
    return path[::-1]


def _same(x: jax.Array) -> jax.Array:
    return x


def run_steps(steps: Sequence[Step], env: Values, block: Block, quotient: Callable[..., jax.Array] = _same) -> None:
    """`quotient` returns the result of a division by the sum."""
    for step in steps:
        values = [jnp.asarray(x.value, x.aval.dtype) if isinstance(x, Literal) else env[x] for x in step.inputs]
        env[step.output] = quotient(*values) if step.divides else evaluate_block(step.op, step.labels, values, block)
