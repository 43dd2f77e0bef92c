"""The loops over blocks of an attention on one device: online softmax forward, recomputation backward.

The statistics of a row are two numbers, its maximum m and the sum l of exp(x - m): with a finite mask over the whole
row m is -1e38, and m + log l would lose log l. Where factors of the weights are negative, l is too.
"""

# JAX has no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from flax_mesh.blockwise.masks.visits import GAP, Blocks, Visits
from flax_mesh.blockwise.traced.dims import Block, Labels, dim_map
from flax_mesh.blockwise.traced.graph import Literal
from flax_mesh.blockwise.traced.region import Key, Region, Values, run_steps

T = TypeVar("T")
_F32 = jnp.float32
# Of a block of queries: number of visited blocks of keys, maximum, sum, result, which results have quotients.
Carry: TypeAlias = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]
_TRIPS = re.compile(r"trips=([\d.]+)/while$")


def expected_trips(source: str) -> float | None:
    """The mean trip count of a loop over blocks of keys, from the name stack of its operation; None for others.

    Plans count it, because the loop itself ends at a number of blocks that the program computes.
    """
    match = _TRIPS.search(source)
    return float(match[1]) if match else None


class Saved(NamedTuple, Generic[T]):
    """The residuals that the backward pass reads besides the leaves and the result."""

    maximum: T
    total: T
    visited: T  # per block of queries, the number of blocks of keys


@dataclass(frozen=True)
class Loops:
    """An attention on one device, which has `parts` of the dims of the scores."""

    region: Region
    blocks: Blocks
    parts: Mapping[int, int]
    index: Mapping[int, jax.Array]  # which of them this device has
    trips: float = 1  # blocks of keys that a block of queries visits, as far as that is known at trace time

    # Shapes

    def block(self, at_q: ArrayLike, at_k: ArrayLike) -> Block:
        q, k, blocks = self.region.q, self.region.k, self.blocks
        offsets = {q: blocks.first_row(self.index.get(q, 0), at_q), k: at_k * blocks.k_size}
        return Block({q: blocks.q_size, k: blocks.k_size}, offsets, self.parts, self.index)

    def _shape_of(self, shape: Sequence[int], labels: Labels, num_q: int, num_k: int) -> tuple[int, ...]:
        return Block({self.region.q: num_q, self.region.k: num_k}, {}, self.parts, {}).shape(shape, labels)

    def rows(self, num_rows: int) -> tuple[int, ...]:
        """The shape of statistics."""
        return self._shape_of(self.region.shape, tuple(range(len(self.region.shape))), num_rows, 1)

    def out_shape(self, num_rows: int) -> tuple[int, ...]:
        return self._shape_of(self.region.out.shape, self.region.out_labels, num_rows, 1)

    @property
    def out_dim(self) -> int:
        return self.region.out_labels.index(self.region.q)

    def to_out(self, statistics: jax.Array) -> jax.Array:
        """Statistics of rows, such that they can be broadcast to the result."""
        region, x = self.region, statistics
        for op, labels in region.layout:
            shape = self._shape_of(op.outputs[0].shape, labels, statistics.shape[region.q], 1)
            if op.name == "broadcast_in_dim":
                x = lax.broadcast_in_dim(x, shape, op.params["broadcast_dimensions"])
            elif op.name == "reshape":
                x = lax.reshape(x, shape)
            elif op.name == "transpose":
                x = lax.transpose(x, op.params["permutation"])
            elif op.name == "squeeze":
                x = lax.squeeze(x, op.params["dimensions"])
        product = region.softmax.product
        dims = dim_map(product.eqn, 1 - region.softmax.value_at) or []
        kept = sorted((o, d) for d, o in enumerate(dims) if o is not None)
        x = lax.transpose(x, [*(d for _, d in kept), *(d for d, o in enumerate(dims) if o is None)])
        sizes = {o: x.shape[n] for n, (o, _) in enumerate(kept)}
        return x.reshape([sizes.get(d, 1) for d in range(len(region.out.shape))])

    def from_out(self, x: jax.Array) -> jax.Array:
        """The transposed of `to_out`: sums over the dims that only the result has."""
        like = jax.ShapeDtypeStruct(self.rows(x.shape[self.out_dim]), x.dtype)
        to_out = lambda s: jnp.broadcast_to(self.to_out(s), x.shape)  # noqa: E731
        return jax.linear_transpose(to_out, like)(x)[0]

    def delta(self, out: jax.Array, gradient: jax.Array) -> jax.Array:
        """Of every row, the sum of the result times its gradient, which the backward pass reads."""
        return self.from_out(gradient.astype(_F32) * out.astype(_F32))

    # One block

    def cut(self, values: Values, label: int, at: jax.Array) -> Values:
        size = self.blocks.q_size if label == self.region.q else self.blocks.k_size
        return {key: _cut(x, self._dim(key, label), at * size, size) for key, x in values.items()}

    def _dim(self, key: Key, label: int) -> int | None:
        labels = self.region.leaves[key][1]
        return labels.index(label) if label in labels else None

    def scores(self, env: Values, block: Block) -> jax.Array:
        region = self.region
        run_steps(region.score_steps, env, block)
        x = jnp.asarray(env[region.scores]).astype(_F32)
        if self.blocks.num_k * self.blocks.k_size > self.blocks.keys:
            at = lax.broadcasted_iota(jnp.int32, x.shape, region.k) + block.offsets[region.k]
            x = jnp.where(at < self.blocks.keys, x, -jnp.inf)
        return jnp.broadcast_to(x, block.shape(region.shape, tuple(range(len(region.shape)))))

    def weigh(
        self, env: Values, e: jax.Array, block: Block, quotient: Callable[[jax.Array], jax.Array] = lambda x: x
    ) -> tuple[jax.Array, jax.Array]:
        """(the part of the result, the part of the sum) of a block with the undivided weights `e`."""
        region = self.region
        env[region.exp] = e.astype(region.softmax.exp.outputs[0].aval.dtype)
        run_steps(region.weight_steps, env, block, quotient)
        total = env[region.summed].astype(_F32).sum(region.k, keepdims=True)
        operands = [env[region.weighted], env[region.values]]
        dtype = jnp.promote_types(*(x.dtype for x in operands))
        left, right = [x.astype(dtype) for x in operands][:: 1 if region.softmax.value_at else -1]
        numbers = region.softmax.product.params["dimension_numbers"]
        precision = region.softmax.product.params["precision"]
        return lax.dot_general(left, right, numbers, precision, _F32), total

    def keeps(self, env: Values, e: jax.Array, block: Block) -> jax.Array:
        """Whether the result has quotients of a row by its sum: all others are selected away, also 0 / 0."""
        return jnp.isnan(self.weigh(env, e, block, lambda x: jnp.full_like(x, jnp.nan))[0])

    def without_empty(self, total: jax.Array, kept: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(`total` with 1 for rows that have no key and whose weights are all selected away, these rows)."""
        empty = (total == 0) & (self.from_out(kept.astype(_F32)) == 0)
        return jnp.where(empty, 1.0, total), empty

    def columns(self, env: Values) -> list[jax.Array]:
        """The further columns of the scores."""
        values = [x.value if isinstance(x, Literal) else env[x] for x in self.region.extra]
        return [jnp.asarray(x).astype(_F32) for x in values]

    def full_columns(self, x: jax.Array) -> jax.Array:
        """Further columns, in the shape of the scores but for the dim of the keys."""
        shape = list(self.region.shape)
        shape[self.region.k] = x.shape[self.region.k]
        return jnp.broadcast_to(x, shape)

    # All blocks

    def _named(self) -> AbstractContextManager[object]:
        """Around a loop over blocks of keys: see `expected_trips`."""
        return jax.named_scope(f"trips={self.trips:g}")

    def forward(self, values: Values, visits: Visits) -> tuple[jax.Array, Saved[jax.Array]]:
        region, blocks = self.region, self.blocks
        values = {key: self._padded(key, x) for key, x in values.items()}
        rows, out_shape = self.rows(blocks.q_size), self.out_shape(blocks.q_size)
        order, count, high = map(jnp.asarray, visits)
        may_return = not isinstance(visits.high, np.ndarray) or bool((visits.high > -math.inf).any())

        def of_queries(i: jax.Array) -> tuple[jax.Array, ...]:
            of_rows = self.cut(values, region.q, i)
            maximum, total = self._start(of_rows, rows)

            def goes_on(carry: Carry) -> jax.Array:
                t, m, total, _, kept = carry
                further = jnp.any(m - high[i] < GAP) if may_return else False
                if region.selects:  # 0 or NaN?
                    further |= jnp.any((self.to_out(total) == 0) & ~kept)
                return (t < count[i]) | ((t < blocks.num_k) & further)

            def visit(carry: Carry) -> Carry:
                t, m, total, out, kept = carry
                j = order[i, t]
                env, block = self.cut(of_rows, region.k, j), self.block(i, j)
                x = self.scores(env, block)
                new = jnp.maximum(m, x.max(region.k, keepdims=True))
                safe = jnp.where(new == -jnp.inf, 0.0, new)
                fix = jnp.exp(m - safe)
                e = jnp.exp(x - safe)
                part, added = self.weigh(env, e, block)
                total = total * fix + added
                if region.selects:
                    kept |= lax.cond(jnp.any(total == 0), lambda: self.keeps(env, e, block), lambda: nothing)
                return t + 1, new, total, out * self.to_out(fix) + part, kept

            nothing = jnp.zeros(out_shape, bool)
            carry = jnp.int32(0), maximum, total, jnp.zeros(out_shape, _F32), nothing
            with self._named():
                t, m, total, out, kept = lax.while_loop(goes_on, visit, carry)
            m = jnp.where(m == -jnp.inf, 0.0, m)
            if region.selects:
                total, empty = self.without_empty(total, kept)
                m = jnp.where(empty, jnp.inf, m)  # without weights
            return (out / self.to_out(total)).astype(region.out.aval.dtype), m, total, t

        out, m, total, visited = lax.map(of_queries, jnp.arange(blocks.num_q))
        joined = [_joined(x, d, blocks.queries) for x, d in ((out, self.out_dim), (m, region.q), (total, region.q))]
        return joined[0], Saved(joined[1], joined[2], visited)

    def _start(self, of_rows: Values, rows: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        m, total = jnp.full(rows, -jnp.inf, _F32), jnp.zeros(rows, _F32)
        for x in self.columns(of_rows):
            new = jnp.maximum(m, x.max(self.region.k, keepdims=True))
            safe = jnp.where(new == -jnp.inf, 0.0, new)
            m, total = new, total * jnp.exp(m - safe) + jnp.exp(x - safe).sum(self.region.k, keepdims=True)
        return m, total

    def backward(
        self,
        values: Values,
        wanted: Sequence[Key],
        visits: Visits,
        saved: Saved[jax.Array],
        gradient: jax.Array,
        delta: jax.Array,
    ) -> Values:
        """The gradients of the leaves `wanted`, in float32 and summed over the queries of this device."""
        q, blocks, size = self.region.q, self.blocks, self.blocks.q_size
        shapes = {key: x.shape for key, x in values.items()}
        values = {key: self._padded(key, x) for key, x in values.items()}
        gradient = gradient.astype(_F32)
        missing = blocks.num_q * size - blocks.queries
        # Rows that do not exist have weights of 0.
        rows = [(gradient, self.out_dim, 0.0), (delta, q, 0.0), (saved.maximum, q, jnp.inf), (saved.total, q, 1.0)]
        rows = [(_grown(x, d, missing, value), d) for x, d, value in rows]
        order = jnp.asarray(visits.order)
        row_keys = [key for key in wanted if self._dim(key, q) is not None and self._dim(key, self.region.k) is None]

        def of_queries(sums: Values, i: jax.Array) -> tuple[Values, Values]:
            mine = self.cut(values, q, i)
            g, d, m, total = (_cut(x, dim, i * size, size) for x, dim in rows)

            def visit(t: jax.Array, carry: tuple[Values, Values]) -> tuple[Values, Values]:
                sums, grads = carry
                j = order[i, t]
                env, block = self.cut(mine, self.region.k, j), self.block(i, j)

                def of_block(leaves: Values) -> tuple[jax.Array, jax.Array]:
                    inner = {**env, **leaves}
                    x = self.scores(inner, block)
                    return self.weigh(inner, jnp.exp(x - m) / total, block)

                _, pull = jax.vjp(of_block, {key: env[key] for key in wanted})
                gradients = pull((g, -d))[0]
                sums = {key: self._added(key, x, gradients[key], i, j) for key, x in sums.items()}
                return sums, {key: x + gradients[key].astype(_F32) for key, x in grads.items()}

            zeros = {key: jnp.zeros(mine[key].shape, _F32) for key in row_keys}
            with self._named():
                sums, grads = lax.fori_loop(0, saved.visited[i], visit, (sums, zeros))
            for key, x in self._of_columns(mine, [key for key in wanted if key in self.region.extra], m, total, -d):
                of = grads if key in row_keys else sums
                of[key] = of[key] + x.astype(_F32)
            return sums, grads

        zeros = {key: jnp.zeros(values[key].shape, _F32) for key in wanted if key not in row_keys}
        sums, grads = lax.scan(of_queries, zeros, jnp.arange(blocks.num_q))
        gradients = {key: _joined(x, self._dim(key, q) or 0, blocks.queries) for key, x in grads.items()}
        return {key: _limited(x, shapes[key]) for key, x in {**sums, **gradients}.items()}

    def _of_columns(
        self, mine: Values, keys: Sequence[Key], m: jax.Array, total: jax.Array, gradient: jax.Array
    ) -> Iterable[tuple[Key, jax.Array]]:
        """The gradients of further columns of the scores, from the rows of some queries."""

        def weights(leaves: Values) -> jax.Array:
            each = [jnp.exp(x - m) / total for x in self.columns({**mine, **leaves})]
            return sum((x.sum(self.region.k, keepdims=True) for x in each), jnp.zeros((), _F32))

        if not keys:
            return []
        out, pull = jax.vjp(weights, {key: mine[key] for key in keys})
        return pull(jnp.broadcast_to(gradient, out.shape))[0].items()

    def _added(self, key: Key, total: jax.Array, x: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        at: list[jax.Array] = [jnp.int32(0)] * x.ndim
        for label, number, size in ((self.region.q, i, self.blocks.q_size), (self.region.k, j, self.blocks.k_size)):
            if (d := self._dim(key, label)) is not None:
                at[d] = jnp.int32(number * size)
        old = lax.dynamic_slice(total, at, x.shape)
        return lax.dynamic_update_slice(total, old + x.astype(_F32), at)

    def _padded(self, key: Key, x: jax.Array) -> jax.Array:
        blocks = self.blocks
        for label, size in (
            (self.region.q, blocks.num_q * blocks.q_size),
            (self.region.k, blocks.num_k * blocks.k_size),
        ):
            if (d := self._dim(key, label)) is not None:  # by the last element: 0 could be a divisor
                x = _extended(x, d, size - x.shape[d])
        return x


def _cut(x: jax.Array, dim: int | None, start: ArrayLike, size: int) -> jax.Array:
    return x if dim is None else lax.dynamic_slice_in_dim(x, start, size, axis=dim)


def _joined(x: jax.Array, dim: int, length: int) -> jax.Array:
    """(block, ..., element of a block at `dim`, ...) as one dim of `length`."""
    x = jnp.moveaxis(x, 0, dim)
    x = x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])
    return lax.slice_in_dim(x, 0, length, axis=dim)


def _grown(x: jax.Array, dim: int, count: int, value: float = 0.0) -> jax.Array:
    if count <= 0:
        return x
    return lax.pad(x, jnp.asarray(value, x.dtype), [(0, count * (d == dim), 0) for d in range(x.ndim)])


def _extended(x: jax.Array, dim: int, count: int) -> jax.Array:
    """`x` with `count` more copies of its last element along a dim."""
    if count <= 0:
        return x
    last = lax.slice_in_dim(x, x.shape[dim] - 1, None, axis=dim)
    copies = jnp.broadcast_to(last, [count if d == dim else size for d, size in enumerate(x.shape)])
    return lax.concatenate([x, copies], dim)


def _limited(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    return lax.slice(x, [0] * x.ndim, shape)
