"""Leaves of a scanned stack that are split along their layers, and equations evaluated on them.

Every group of a pipeline stores the layers of its stages, so an array of the model, which has all layers, is several
arrays. Functions of the model are evaluated on these parts where that is possible, and otherwise on the whole.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.tree_util import DictKey

from flax_mesh.jax_compat import evaluate
from flax_mesh.program.program import Eqn
from flax_mesh.tree import PyTree

# Primitives that compute each element independently, so they can run on every chunk of a stack.
ELEMENTWISE = frozenset(
    """abs add add_any and atan2 cbrt ceil clamp convert_element_type copy cos cosh div eq erf exp exp2 expm1 floor ge
    gt integer_pow is_finite le log log1p log2 logistic lt max min mul ne neg nextafter not one_minus_square or pow real
    name reduce_precision rem round rsqrt select_n sign sin sinh sqrt square stop_gradient sub tan tanh
    xor""".split()  # noqa: SIM905
)
REDUCE = {"reduce_sum": jnp.add, "reduce_max": jnp.maximum, "reduce_min": jnp.minimum}
REDUCE |= {"reduce_and": jnp.logical_and, "reduce_or": jnp.logical_or}

_BY_ROW = {"dot_general", "transpose", "reshape", "broadcast_in_dim"}  # these may keep the rows of a stack apart


@jax.tree_util.register_pytree_with_keys_class
class Chunks:
    """A leaf of a scanned stack, split along its leading layer dim into `parts`. Part i starts at layer `starts[i]`."""

    def __init__(self, parts: Iterable[PyTree], starts: Iterable[int]):
        self.parts, self.starts = tuple(parts), tuple(starts)

    @property
    def sizes(self) -> list[int]:
        return [part.shape[0] for part in self.parts]

    def whole(self) -> jax.Array:
        return self.parts[0] if len(self.parts) == 1 else jnp.concatenate(self.parts, 0)

    def tree_flatten_with_keys(self):
        return [(DictKey(f"from {s}"), part) for s, part in zip(self.starts, self.parts, strict=True)], self.starts

    def tree_flatten(self):
        return self.parts, self.starts

    @classmethod
    def tree_unflatten(cls, starts: tuple[int, ...], parts: Iterable[PyTree]) -> "Chunks":
        return cls(parts, starts)


class Periods(NamedTuple):
    """Chunks of layers (L, ...), reshaped to rows of `period` layers, (L / period, period, ...).

    Some rows are in several chunks, so they are no Chunks themselves. Only a scan takes them, others take the whole.
    """

    chunks: Chunks
    period: int

    @property
    def starts(self) -> tuple[int, ...]:
        """The first row of each range of rows in one chunk, and of each row in several chunks."""
        ends = [start + size for start, size in zip(self.chunks.starts, self.chunks.sizes, strict=True)]
        cuts = {0, *(end // self.period for end in ends), *(-(-end // self.period) for end in ends)}
        return tuple(sorted(cuts)[:-1])

    @property
    def sizes(self) -> list[int]:
        stop = sum(self.chunks.sizes) // self.period
        return [b - a for a, b in pairwise([*self.starts, stop])]

    def rows(self) -> list["Value"]:
        """One item per range: an array of its rows, or Chunks of the single layers of a row in several chunks."""
        inside = [start for start in self.chunks.starts if start % self.period]
        shared = [any(start // self.period == first for start in inside) for first in self.starts]
        counts = [[1] * self.period if s else [n * self.period] for s, n in zip(shared, self.sizes, strict=True)]
        pieces = iter(split_chunks(self.chunks, [n for each in counts for n in each]))
        rows = [[whole(next(pieces)) for _ in each] for each in counts]
        return [
            Chunks(each, range(self.period)) if s else each[0].reshape(-1, self.period, *each[0].shape[1:])
            for s, each in zip(shared, rows, strict=True)
        ]

    def whole(self) -> jax.Array:
        layers = self.chunks.whole()
        return layers.reshape(-1, self.period, *layers.shape[1:])


Value: TypeAlias = jax.Array | Chunks | Periods  # an array in one piece or in several


def whole(value: Value) -> jax.Array:
    """The value itself, with Chunks concatenated."""
    return value.whole() if isinstance(value, Chunks | Periods) else value


def rows_of(value: Value, ranges: Sequence[tuple[int, int] | None]) -> list[jax.Array]:
    """The layers [first, stop) of a stack for all of its `ranges`, in order; None is the entire value."""
    if isinstance(value, Chunks) and None not in ranges:
        return [whole(piece) for piece in split_chunks(value, [r[1] - r[0] for r in ranges if r])]
    value = whole(value)
    return [value if r is None else value[slice(*r)] for r in ranges]


def split_chunks(chunks: Chunks, sizes: Sequence[int]) -> list[Chunks]:
    """Consecutive ranges of the layers; a part that is in several of them is split."""
    stops = [*accumulate(sizes)]
    pieces: list[tuple[list[jax.Array], list[int]]] = [([], []) for _ in sizes]
    for start, part in zip(chunks.starts, chunks.parts, strict=True):
        lows, highs = ([min(max(x, start), start + part.shape[0]) for x in at] for at in ([0, *stops[:-1]], stops))
        among = [k for k, (low, high) in enumerate(zip(lows, highs, strict=True)) if low < high]
        split = [part] if len(among) == 1 else jax.lax.split(part, [highs[k] - lows[k] for k in among])
        for k, rows in zip(among, split, strict=True):
            pieces[k][0].append(rows)
            pieces[k][1].append(lows[k] - (stops[k] - sizes[k]))
    return [Chunks(*piece) for piece in pieces]


def rows_like(value: Value, like: Chunks | Periods) -> list[Value]:
    """The rows of `value` for every chunk of `like`; the rows of Periods are `Periods.rows`; a scalar is repeated."""
    if isinstance(value, Chunks) and value.starts == like.starts:
        return list(value.parts)
    if isinstance(value, Periods) and value.starts == like.starts:
        return value.rows()
    value = whole(value)  # a stack that is split at other layers
    if not jnp.shape(value):
        return [value] * len(like.starts)
    return [value[s : s + size] for s, size in zip(like.starts, like.sizes, strict=True)]


def select(index: jax.Array, values: Sequence[Value]) -> Value:
    """`jax.lax.select_n`, chunk by chunk if a value is in Chunks."""
    chunks = next((v for v in values if isinstance(v, Chunks)), None)
    if chunks is None:
        return jax.lax.select_n(index, *map(whole, values))
    rows = [rows_like(v, chunks) for v in values]
    return Chunks((jax.lax.select_n(index, *part) for part in zip(*rows, strict=True)), chunks.starts)


def evaluate_on_chunks(eqn: Eqn, values: Sequence[Value]) -> list[Value]:
    """Evaluate an equation with Chunks as inputs. Concatenates them only if it cannot run on each chunk.

    Not for scans, whose bodies are programs: see `split/interpret.py`.
    """
    name = eqn.primitive.name
    values = [whole(value) if isinstance(value, Periods) else value for value in values]
    chunks = next((v for v in values if isinstance(v, Chunks)), None)
    if chunks is None:
        return evaluate(eqn, values)
    if name == "split" and eqn.params["axis"] == 0:
        return [*split_chunks(chunks, eqn.params["sizes"])]
    if name == "slice" and (sizes := _sizes_around_rows(eqn)):
        return [split_chunks(chunks, sizes)[1]]
    if name == "reshape" and (period := _period_of(eqn, chunks)):
        return [Periods(chunks, period)]
    if name in _BY_ROW and (result := _by_row(eqn, values, chunks)):
        return [result]
    if name in REDUCE and 0 in eqn.params["axes"]:
        parts = [evaluate(eqn, [part])[0] for part in chunks.parts]
        return [functools.reduce(REDUCE[name], parts)]
    # This REDUCE does not reduce over layers, and a reshard of the other dims keeps every layer where it is.
    if name in ELEMENTWISE or name in REDUCE or (name == "reshard" and not any(eqn.params["dst_sharding"].spec[:1])):
        rows = [rows_like(v, chunks) for v in values]
        return [Chunks((evaluate(eqn, part)[0] for part in zip(*rows, strict=True)), chunks.starts)]
    return evaluate(eqn, [whole(value) for value in values])


def _sizes_around_rows(eqn: Eqn) -> tuple[int, int, int] | None:
    """The layers before, in and after those that a slice takes; None if it takes none, or parts of them."""
    first, *starts = eqn.params["start_indices"]
    stop, *limits = eqn.params["limit_indices"]
    depth, *shape = eqn.invars[0].aval.shape
    apart = any(starts) or limits != shape or any(x != 1 for x in eqn.params["strides"] or ())
    return None if apart or first >= stop else (first, stop - first, depth - stop)


def _period_of(eqn: Eqn, chunks: Chunks) -> int | None:
    """The period of a reshape (L, ...) -> (L / period, period, ...) with a row of layers in several chunks, or None."""
    (depth, *inner), (count, *out) = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape or (1,)
    if eqn.params["sharding"] is not None or eqn.params["dimensions"] is not None:
        return None
    if not out or list(out[1:]) != inner or count * out[0] != depth:
        return None
    return out[0] if any(start % out[0] for start in chunks.starts) else None


def _by_row(eqn: Eqn, values: Sequence[Value], chunks: Chunks) -> Chunks | None:
    """Evaluate an equation that keeps the rows of the stack apart, one chunk at a time; None if it mixes them.

    So Muon's products of the matrices of a stack run on the group of each. A reshape may merge the layer dim with the
    next one, as (layers, experts, ...) -> (layers * experts, ...), or undo that.
    """
    name, params, out = eqn.primitive.name, eqn.params, eqn.outvars[0].aval
    if params.get("sharding") is not None or params.get("out_sharding") is not None:
        return None  # Explicit axes: the result must have one sharding
    if name == "dot_general":
        (_, _), batch = params["dimension_numbers"]
        if any(dims[:1] != (0,) for dims in map(tuple, batch)):
            return None
        rows = [rows_like(value, chunks) for value in values]
        return Chunks((evaluate(eqn, part)[0] for part in zip(*rows, strict=True)), chunks.starts)
    if name == "transpose":
        is_apart = params["permutation"][0] == 0
        return Chunks((evaluate(eqn, [x])[0] for x in chunks.parts), chunks.starts) if is_apart else None
    if name == "broadcast_in_dim":
        count = sum(part.shape[0] for part in chunks.parts)
        if params["broadcast_dimensions"][:1] != (0,) or out.shape[0] != count:
            return None
        shapes = [(x.shape[0], *out.shape[1:]) for x in chunks.parts]
        parts = zip(chunks.parts, shapes, strict=True)
        dims = params["broadcast_dimensions"]
        return Chunks((jax.lax.broadcast_in_dim(x, shape, dims) for x, shape in parts), chunks.starts)
    if params["dimensions"] is not None:
        return None
    before, after = (math.prod(shape[1:]) for shape in (eqn.invars[0].aval.shape, out.shape))
    sizes = [*chunks.starts, *(x.shape[0] for x in chunks.parts)]
    if not after or any(size * before % after for size in sizes):
        return None
    parts = (x.reshape(x.shape[0] * before // after, *out.shape[1:]) for x in chunks.parts)
    return Chunks(parts, (start * before // after for start in chunks.starts))
