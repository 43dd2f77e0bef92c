"""Interval arithmetic: bounds of the scores of every block, from positions at trace time or from data at run time.

The same code runs on NumPy arrays and on traced ones. A bound is a pair (low, high) of arrays with the dims of
the value: the number of blocks in a dim of queries or keys, and 1 or all elements in another.
"""

# JAX has no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from flax_mesh.blockwise.traced.dims import REDUCTIONS, Labels, dim_map
from flax_mesh.blockwise.traced.graph import Literal, Op
from flax_mesh.blockwise.traced.region import Key, Region, Step

Array: TypeAlias = np.ndarray | jax.Array
Bound: TypeAlias = tuple[Array, Array]
Cuts: TypeAlias = Mapping[
    int, tuple[Array, int, int | jax.Array]
]  # label -> (first positions of the blocks, their size, length)
_EXACT = 2.0**24  # integers from here on are rounded in float32


def bound_scores(
    region: Region,
    leaves: Mapping[Key, Bound],
    cuts: Cuts,
    of_product: float,
    fixed: Mapping[Key, float] = MappingProxyType({}),
) -> Bound:
    """Bounds of the scores, if every product is within `of_product`, and the values `fixed` are these numbers."""
    env = dict(leaves)
    for step in region.score_steps:
        if step.output in fixed:
            env[step.output] = filled(len(step.op.outputs[0].shape), *[fixed[step.output]] * 2)
            continue
        args = [_number(x.value) if isinstance(x, Literal) else env[x] for x in step.inputs]
        rank = len(step.op.outputs[0].shape)
        with np.errstate(all="ignore"):
            bound = _of_step(step, args, rank, cuts, of_product) or unknown(rank)
            env[step.output] = _without_nan(_as_stored(step.op, bound), rank)
    return env.get(region.scores) or unknown(len(region.shape))


def bound_leaf(x: Array, labels: Labels, cuts: Cuts) -> Bound:
    """The least and the largest element of every block; other dims are kept."""
    m = module_of(x)
    low = x.astype(np.float64 if m is np else jnp.float32)
    high = low
    if m is jnp and jnp.issubdtype(x.dtype, jnp.integer):
        low, high = low - _slack(low), high + _slack(high)
    for d, label in enumerate(labels):
        if label is not None and label in cuts:
            starts, size, _ = cuts[label]
            rows = np.minimum(np.arange(len(starts))[:, None] * size + np.arange(size), x.shape[d] - 1)
            if m is np:
                rows = np.minimum(starts[:, None] + np.arange(size), x.shape[d] - 1)
            low = m.min(m.take(low, rows, axis=d), axis=d + 1)
            high = m.max(m.take(high, rows, axis=d), axis=d + 1)
    return low, high


def unknown(rank: int) -> Bound:
    return filled(rank, -np.inf, np.inf)


def filled(rank: int, low: float, high: float) -> Bound:
    return np.full((1,) * rank, low), np.full((1,) * rank, high)


def module_of(*values: object) -> ModuleType:
    return jnp if any(isinstance(x, jax.Array) for x in values) else np


def _as_stored(op: Op, bound: Bound) -> Bound:
    """The bound of a result in its dtype: floats may be rounded or not, and integers that overflow can be any."""
    (low, high), dtype, m = bound, op.outputs[0].aval.dtype, module_of(*bound)
    if jnp.issubdtype(dtype, jnp.floating):
        if op.name in _INEXACT:
            slack = 4 * float(jnp.finfo(dtype).eps)
            low, high = (m.where(abs(x) < np.inf, x + abs(x) * by, x) for x, by in ((low, -slack), (high, slack)))
        rounded = [m.asarray(x).astype(dtype).astype(m.result_type(x)) for x in (low, high)]
        return m.minimum(low, rounded[0]), m.maximum(high, rounded[1])
    if not jnp.issubdtype(dtype, jnp.integer):
        return bound
    low, high = m.asarray(low), m.asarray(high)
    if m is jnp:
        low, high = low - _slack(low), high + _slack(high)
    overflows = (low < float(jnp.iinfo(dtype).min)) | (high > float(jnp.iinfo(dtype).max))
    return m.where(overflows, -np.inf, low), m.where(overflows, np.inf, high)


def _slack(x: Array) -> jax.Array:
    return jnp.where(abs(x) >= _EXACT, abs(x) * 2**-22, 0)


def _number(value: ArrayLike) -> Bound:
    return np.asarray(value, np.float64), np.asarray(value, np.float64)


def _without_nan(bound: Bound, rank: int) -> Bound:
    low, high = bound
    m = module_of(low, high)
    low, high = (m.reshape(x, (1,) * rank) if m.ndim(x) == 0 else x for x in (low, high))
    return m.where(m.isnan(low), -np.inf, low), m.where(m.isnan(high), np.inf, high)


def _of_step(step: Step, args: Sequence[Bound], rank: int, cuts: Cuts, of_product: float) -> Bound | None:
    op, name, m = step.op, step.op.name, module_of(*(x for pair in args for x in pair))
    if name == "dot_general":
        return filled(rank, -of_product, of_product)
    if name == "iota":
        return _positions(step, rank, cuts)
    if name == "broadcast_in_dim":
        to = [int(d) for d in op.params["broadcast_dimensions"]]
        return tuple(_expanded(m, x, to, rank) for x in args[0])  # pyright: ignore[reportReturnType]
    if name == "transpose":
        return tuple(m.transpose(x, op.params["permutation"]) for x in args[0])  # pyright: ignore[reportReturnType]
    if name in ("squeeze", "reshape"):
        kept = dim_map(op.eqn, 0) or []
        return _merged(m.min, args[0][0], kept, rank), _merged(m.max, args[0][1], kept, rank)
    if name in REDUCTIONS and name in ("reduce_max", "reduce_min", "reduce_and", "reduce_or"):
        gone = tuple(op.params["axes"])
        return m.min(args[0][0], axis=gone), m.max(args[0][1], axis=gone)
    if name == "convert_element_type":
        old, new = op.inputs[0].aval.dtype, op.params["new_dtype"]
        if new == np.bool_ and not jnp.issubdtype(old, np.bool_):
            return _truth(m, args[0])
        is_cut = jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.integer)
        return (m.trunc(args[0][0]), m.trunc(args[0][1])) if is_cut else args[0]
    if name in _LOGIC and op.outputs[0].aval.dtype != bool:
        return None
    if name == "div" and jnp.issubdtype(op.outputs[0].aval.dtype, jnp.integer):
        low, high = _divided(m, *args)
        slack = 2.0**-21 if m is jnp else 0.0
        return m.floor(low - abs(low) * slack), m.ceil(high + abs(high) * slack)
    if name == "select_n":
        return _selected(m, *args) if len(args) == 3 else None
    if name == "integer_pow":
        return _multiplied(m, _absolute(m, args[0]), _absolute(m, args[0])) if op.params["y"] == 2 else None
    rule = _RULES.get(name)
    return None if rule is None else rule(m, *args)


def _positions(step: Step, rank: int, cuts: Cuts) -> Bound:
    dim = step.op.params["dimension"]
    shape = [1] * rank
    label = step.labels[dim]
    if label not in cuts:
        return np.zeros(shape), np.full(shape, step.op.outputs[0].shape[dim] - 1.0)
    starts, size, stop = cuts[label]
    m = module_of(starts)
    shape[dim] = len(starts)
    ends = m.minimum(starts + size, stop) - 1
    return m.reshape(starts * 1.0, shape), m.reshape(ends * 1.0, shape)


def _expanded(m: ModuleType, x: Array, to: Sequence[int], rank: int) -> Array:
    shape = [1] * rank
    for d, o in enumerate(to):
        shape[o] = x.shape[d] if m.ndim(x) else 1
    return m.reshape(x, shape)


def _merged(reduce: Callable[..., Array], x: Array, kept: Sequence[int | None], rank: int) -> Array:
    """A bound over the dims that are merged or split, the others kept."""
    if gone := tuple(d for d, o in enumerate(kept) if o is None):
        x = reduce(x, axis=gone)
    shape = [1] * rank
    for size, o in zip(x.shape, [o for o in kept if o is not None], strict=True):
        shape[o] = size
    return x.reshape(shape)


def _truth(m: ModuleType, x: Bound) -> Bound:
    low, high = x
    return m.where((low > 0) | (high < 0), 1.0, 0.0), m.where((low == 0) & (high == 0), 0.0, 1.0)


def _multiplied(m: ModuleType, x: Bound, y: Bound) -> Bound:
    products = [m.where((a == 0) | (b == 0), 0.0, a * b) for a in x for b in y]
    return functools.reduce(m.minimum, products), functools.reduce(m.maximum, products)


def _divided(m: ModuleType, x: Bound, y: Bound) -> Bound:
    low, high = y
    sure = (low > 0) | (high < 0)
    inverse = (
        m.where(sure, 1.0 / m.where(sure, high, 1.0), -np.inf),
        m.where(sure, 1.0 / m.where(sure, low, 1.0), np.inf),
    )
    return _multiplied(m, x, inverse)


def _absolute(m: ModuleType, x: Bound) -> Bound:
    low, high = x
    crosses = (low <= 0) & (high >= 0)
    return m.where(crosses, 0.0, m.minimum(abs(low), abs(high))), m.maximum(abs(low), abs(high))


def _selected(m: ModuleType, which: Bound, if_false: Bound, if_true: Bound) -> Bound:
    surely, never = which[0] > 0, which[1] < 1
    low = m.where(surely, if_true[0], m.where(never, if_false[0], m.minimum(if_false[0], if_true[0])))
    return low, m.where(surely, if_true[1], m.where(never, if_false[1], m.maximum(if_false[1], if_true[1])))


def _comparison(yes: Callable[..., Array], no: Callable[..., Array]) -> Callable[..., Bound]:
    return lambda m, x, y: (m.where(yes(*x, *y), 1.0, 0.0), m.where(no(*x, *y), 0.0, 1.0))


def _are_equal(a: Array, b: Array, c: Array, d: Array) -> Array:
    return (a == b) & (c == d) & (a == c)


def _are_apart(a: Array, b: Array, c: Array, d: Array) -> Array:
    return (b < c) | (a > d)


def _rising(name: str) -> Callable[..., Bound]:
    return lambda m, x: (getattr(m, name)(x[0]), getattr(m, name)(x[1]))


def _both(function: str) -> Callable[..., Bound]:
    return lambda m, x, y: (getattr(m, function)(x[0], y[0]), getattr(m, function)(x[1], y[1]))


_INEXACT = ("div", "exp", "sqrt", "tanh")  # devices round them in different ways
_LOGIC = ("and", "or", "not")
_RULES: dict[str, Callable[..., Bound]] = {
    "add": lambda m, x, y: (x[0] + y[0], x[1] + y[1]),
    "sub": lambda m, x, y: (x[0] - y[1], x[1] - y[0]),
    "neg": lambda m, x: (-x[1], -x[0]),
    "mul": _multiplied,
    "div": _divided,
    "max": _both("maximum"),
    "min": _both("minimum"),
    "and": _both("minimum"),
    "or": _both("maximum"),
    "not": lambda m, x: (1.0 - x[1], 1.0 - x[0]),
    "abs": _absolute,
    "square": lambda m, x: _multiplied(m, _absolute(m, x), _absolute(m, x)),
    "clamp": lambda m, low, x, high: tuple(m.minimum(m.maximum(x[n], low[n]), high[n]) for n in (0, 1)),
    "ge": _comparison(lambda a, b, c, d: a >= d, lambda a, b, c, d: b < c),
    "gt": _comparison(lambda a, b, c, d: a > d, lambda a, b, c, d: b <= c),
    "le": _comparison(lambda a, b, c, d: b <= c, lambda a, b, c, d: a > d),
    "lt": _comparison(lambda a, b, c, d: b < c, lambda a, b, c, d: a >= d),
    "eq": _comparison(_are_equal, _are_apart),
    "ne": _comparison(_are_apart, _are_equal),
    **{name: _rising(name) for name in ("tanh", "exp", "floor", "ceil", "sign", "sqrt")},
    **dict.fromkeys(
        ("stop_gradient", "copy", "copy_p", "name", "sharding_constraint", "reshard", "reduce_precision"),
        lambda m, x: x,
    ),
}
