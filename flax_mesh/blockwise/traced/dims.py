"""Equations on blocks: along which dims they are pointwise, which decides whether they have blocks, and their values.

The dims of an array have labels, one per dim of the scores of an attention; None for a dim that belongs to no dim of
the scores, and is complete in every block.
"""

# JAX has no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax
from jax.extend.random import threefry2x32_p
from jax.typing import ArrayLike, DTypeLike

from flax_mesh.blockwise.traced.graph import Atom, Literal, Op, source
from flax_mesh.program.program import Eqn
from flax_mesh.tree import is_key

Labels = tuple[int | None, ...]
# For every dim of an array, the parts of dims of the scores that it consists of: (label, step in this dim, size). Where
# dims are merged, labels name the first of them; two arrays with the same order have the same elements in each place.
Order = tuple[tuple[tuple[int | None, int, int], ...], ...]
POINTWISE = frozenset(
    """abs add and bitcast_convert_type ceil clamp convert_element_type copy copy_p cos div eq eq_to erf exp exp2 expm1
    floor ge gt integer_pow is_finite layout_constraint le log log1p logistic lt lt_to max min mul ne neg nextafter not
    optimization_barrier or pow reduce_precision rem reshard round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sharding_constraint sign sin sqrt square stop_gradient sub tan tanh xor name""".split()  # noqa: SIM905
)
REDUCTIONS = frozenset({"reduce_max", "reduce_min", "reduce_sum", "reduce_and", "reduce_or", "reduce_prod"})
# They change the layout or the dtype of an array, not its values.
VIEWS = frozenset(
    """broadcast_in_dim convert_element_type copy copy_p name reshape reshard sharding_constraint squeeze
    transpose""".split()  # noqa: SIM905
)
_SAME = {"sharding_constraint", "layout_constraint", "name", "optimization_barrier", "reshard", "copy", "copy_p"}
_LARGEST = 2**22  # elements of an array that is computed at trace time
_COUNTERS = ("iota", "random_bits")  # computed from the positions of a block


def dim_map(eqn: Eqn, number: int, *, major: bool = False) -> list[int | None] | None:
    """For every dim of an input, the dim of the output along which the equation is pointwise, or None if there is none.

    None in the place of the list: the equation is not known. With `major`, a dim that a reshape splits or merges
    belongs to the first of the dims that it is reshaped to: both can be split into equal consecutive parts.
    """
    x, out = eqn.invars[number].aval, eqn.outvars[0].aval
    name, params, rank = eqn.primitive.name, eqn.params, len(x.shape)
    if name in POINTWISE:
        if rank not in (0, len(out.shape)) or (name == "optimization_barrier" and len(eqn.outvars) > 1):
            return None
        return [d if x.shape[d] == out.shape[d] else None for d in range(rank)]
    if name == "broadcast_in_dim":
        to = params["broadcast_dimensions"]
        return [int(o) if x.shape[d] == out.shape[o] else None for d, o in enumerate(to)] if number == 0 else None
    if name == "transpose":
        return [list(params["permutation"]).index(d) for d in range(rank)]
    if name in REDUCTIONS or name == "squeeze":
        gone = {int(a) % rank for a in params["axes" if name in REDUCTIONS else "dimensions"]}
        left = [d for d in range(rank) if d not in gone]
        return [left.index(d) if d in left else None for d in range(rank)]
    if name == "reshape":
        return None if params.get("dimensions") is not None else _reshaped(x.shape, out.shape, major)
    if name == "dot_general":
        return _of_product(eqn, number)
    if name == "slice":
        whole = list(zip(params["start_indices"], params["limit_indices"], x.shape, strict=True))
        strides = params["strides"] or (1,) * rank
        return [d if (*whole[d][:2], strides[d]) == (0, whole[d][2], 1) else None for d in range(rank)]
    if name == "concatenate":
        return [d if d != params["dimension"] else None for d in range(rank)]
    if name == "gather":
        numbers = params["dimension_numbers"]
        if getattr(numbers, "operand_batching_dims", ()):
            return None
        if number > 0:
            return [*(d for d in range(len(out.shape)) if d not in numbers.offset_dims), None]
    nothing: list[int | None] = [None] * rank
    return nothing if name in ("gather", *_COUNTERS) else None


def _reshaped(before: tuple[int, ...], after: tuple[int, ...], major: bool) -> list[int | None]:
    starts: dict[tuple[int, int | None], int] = {}
    for d, size in enumerate(after):
        if size > 1:
            starts.setdefault((math.prod(after[:d]), None if major else size), d)
    keys = [(math.prod(before[:d]), None if major else size) for d, size in enumerate(before)]
    return [starts.get(key) if size > 1 else None for key, size in zip(keys, before, strict=True)]


def _of_product(eqn: Eqn, number: int) -> list[int | None]:
    contracted, batch = eqn.params["dimension_numbers"]
    ranks = [len(x.aval.shape) for x in eqn.invars]
    free = [[d for d in range(ranks[i]) if d not in (*contracted[i], *batch[i])] for i in range(2)]
    order = [*batch[number], *([None] * len(free[0]) if number else []), *free[number]]
    return [order.index(d) if d in order else None for d in range(ranks[number])]


def labels_before(op: Op, number: int, labels: Labels, whole: tuple[int, ...] = ()) -> Labels | None:
    """The labels of an input, given the labels of the output; None if the equation is not known.

    Labels in `whole` are only on dims of the same size; labels of dims that a reshape splits or merges are dropped.
    """
    exact, parts = dim_map(op.eqn, number), dim_map(op.eqn, number, major=True)
    if exact is None or parts is None:
        return None
    shape = op.inputs[number].aval.shape
    sure = [None if o is None or shape[d] == 1 else labels[o] for d, o in enumerate(exact)]
    further = [None if o is None or shape[d] == 1 else labels[o] for d, o in enumerate(parts)]
    return tuple(
        a if a is not None else None if b in sure or b in whole else b for a, b in zip(sure, further, strict=True)
    )


def labels_after(op: Op, number: int, labels: Labels, whole: tuple[int, ...] = ()) -> Labels | None:
    """The labels of the output, given the labels of one input; None if the equation is not known."""
    new: list[int | None] = [None] * len(op.outputs[0].aval.shape)
    for major in (False, True):
        dims = dim_map(op.eqn, number, major=major)
        if dims is None:
            return None
        for d, o in enumerate(dims):
            if o is not None and new[o] is None and labels[d] not in new and not (major and labels[d] in whole):
                new[o] = labels[d]
    return tuple(new)


def order_of(shape: Sequence[int]) -> Order:
    return tuple(((d, 1, size),) if size > 1 else () for d, size in enumerate(shape))


def order_after(op: Op, number: int, order: Order) -> Order | None:
    """The order of the output, given the order of one input; None if it is not known."""
    shape = op.outputs[0].aval.shape
    if op.name == "reshape":
        return _regrouped(order, shape) if op.params.get("dimensions") is None else None
    if (dims := dim_map(op.eqn, number)) is None:
        return None
    new: list[tuple[tuple[int | None, int, int], ...]] = [((None, 1, size),) if size > 1 else () for size in shape]
    for d, o in enumerate(dims):
        if o is not None:
            new[o] = order[d]
        elif op.name == "slice" and len(order[d]) == 1:
            label, step, _ = order[d][0]
            new[d] = ((label, step, shape[d]),) if shape[d] > 1 else ()
    return tuple(new)


def _regrouped(order: Order, shape: Sequence[int]) -> Order | None:
    left, new = [part for dim in order for part in dim], []
    for size in shape:
        parts: list[tuple[int | None, int, int]] = []
        while size > 1:
            if not left:  # an array without elements
                return None
            label, step, n = left.pop(0)
            if n > size and n % size == 0:
                left.insert(0, (label, step, n // size))
                step, n = step * (n // size), size
            if size % n:
                return None
            size //= n
            if parts and parts[-1][:2] == (label, step * n):
                n *= parts.pop()[2]
            parts.append((label, step, n))
        new.append(tuple(parts))
    return tuple(new)


def is_blockable(op: Op, labels: Labels, whole: tuple[int, ...]) -> bool:
    """Whether an equation can be evaluated on a block of its output, cut along the dims with the labels `whole`."""
    if len(op.outputs) != 1 or op.bodies:
        return False
    if op.name == "iota":
        return True
    if op.name == "random_bits":  # only these bits can be computed from the position of each
        is_threefry = str(op.inputs[0].aval.dtype) == "key<fry>" and op.params["bit_width"] == 32
        partitionable = jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue]
        return is_threefry and partitionable and not op.inputs[0].shape and math.prod(op.outputs[0].shape) < 2**32
    before = [labels_before(op, i, labels, whole) for i in range(len(op.inputs))]
    if any(x is None for x in before):
        return False
    if op.name == "broadcast_in_dim":
        return True
    have = {label for x in before if x is not None for label in x}
    return all(label in have for label in labels if label in whole)


@dataclass(frozen=True)
class Block:
    """Which part of the dims of the scores a block has.

    `sizes` are the sizes of dims that loops cut, and `offsets` the positions of their first elements; `parts` are the
    numbers of parts of dims that devices have a part of, and `index` the numbers of these parts.
    """

    sizes: Mapping[int, int]
    offsets: Mapping[int, ArrayLike]
    parts: Mapping[int, int]
    index: Mapping[int, jax.Array]

    def shape(self, shape: Sequence[int], labels: Labels) -> tuple[int, ...]:
        return tuple(
            size if label is None else self.sizes.get(label, size // self.parts.get(label, 1))
            for size, label in zip(shape, labels, strict=True)
        )

    def positions(self, dtype: DTypeLike, shape: Sequence[int], labels: Labels, dim: int) -> jax.Array:
        label, sizes = labels[dim], self.shape(shape, labels)
        positions = lax.broadcasted_iota(dtype, sizes, dim)
        if label is None:
            return positions
        if label in self.offsets:  # rows and columns that do not exist repeat the last one, whose results are finite
            offset = jnp.minimum(lax.broadcasted_iota(jnp.int32, sizes, dim) + self.offsets[label], shape[dim] - 1)
            return offset.astype(dtype)
        if label in self.index:
            return positions + jnp.asarray(self.index[label] * sizes[dim]).astype(dtype)
        return positions


def evaluate_block(op: Op, labels: Labels, values: Sequence[jax.Array], block: Block) -> jax.Array:
    name, params, out = op.name, op.params, op.outputs[0]
    shape = block.shape(out.shape, labels)
    if name in _SAME:
        return values[0]
    if name == "broadcast_in_dim":
        return lax.broadcast_in_dim(values[0], shape, params["broadcast_dimensions"])
    if name == "reshape":
        return lax.reshape(values[0], shape)
    if name == "iota":
        return block.positions(params["dtype"], out.shape, labels, params["dimension"])
    if name == "random_bits":
        return _random_bits(values[0], out.shape, labels, block)
    if name == "convert_element_type":
        return lax.convert_element_type(values[0], params["new_dtype"])
    if name == "slice":
        limits = [
            size if label is not None else limit
            for size, label, limit in zip(shape, labels, params["limit_indices"], strict=True)
        ]
        return lax.slice(values[0], params["start_indices"], limits, params["strides"])
    if name == "select_n":
        which, *cases = values
        values = [which if jnp.ndim(which) == 0 else jnp.broadcast_to(which, shape)]
        values += [jnp.broadcast_to(x, shape) for x in cases]
    # Shardings of the arrays do not hold for their blocks.
    unplaced = {key: None for key in ("sharding", "out_sharding") if key in params}
    return op.eqn.primitive.bind(*values, **{**params, **unplaced})


def _random_bits(key: jax.Array, shape: Sequence[int], labels: Labels, block: Block) -> jax.Array:
    """The bits of threefry in a block: it numbers the elements of the array in the order of memory."""
    place = jnp.zeros((), jnp.uint32)
    for d in range(len(shape)):
        stride = jnp.uint32(math.prod(shape[d + 1 :]) % 2**32)
        place = place + block.positions(jnp.uint32, shape, labels, d) * stride
    first, second = jax.random.key_data(key)
    high, low = threefry2x32_p.bind(first, second, jnp.zeros_like(place), place)
    return high ^ low


def known_value(x: Atom, cache: dict[int, np.ndarray | None]) -> np.ndarray | None:
    """A value that depends on no input, as an array of NumPy; None for every other value."""
    todo = [x := source(x)]
    while todo:
        each = todo[-1]
        op = None if id(each) in cache else _static_op(each)
        inputs = [source(each) for each in op.inputs] if op else []
        if missing := [each for each in inputs if id(each) not in cache]:
            todo += missing
        elif id(todo.pop()) not in cache:
            cache[id(each)] = _constant(each) if op is None else _computed(op, [cache[id(x)] for x in inputs])
    return cache[id(x)]


def _static_op(x: Atom) -> Op | None:
    """The operation that computes a value at trace time, if it depends on no input."""
    op = None if isinstance(x, Literal) else x.op
    if op is None or op.bodies or len(op.outputs) != 1 or x.aval.size > _LARGEST or op.eqn.effects:
        return None
    return None if op.name == "random_bits" or is_key(x.aval) else op


def _constant(x: Atom) -> np.ndarray | None:
    value = x.value if isinstance(x, Literal) else x.const
    return None if value is None or isinstance(value, core.Tracer) or is_key(x.aval) else np.asarray(value)


def _computed(op: Op, values: Sequence[np.ndarray | None]) -> np.ndarray | None:
    given = [x for x in values if x is not None]
    if len(given) < len(values):
        return None
    with jax.ensure_compile_time_eval():
        arrays = [jnp.asarray(x) for x in given]
        return np.asarray(evaluate_block(op, (None,) * len(op.outputs[0].shape), arrays, Block({}, {}, {}, {})))
