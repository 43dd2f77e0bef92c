"""Which blocks of keys each block of queries visits: those that its mask leaves, then the others while they matter.

A skipped block of a finite mask is not nothing: a row that has no key has uniform weights over all keys. Blocks that
are skipped stay at the end of the order, and are visited if a row's maximum is not far enough above their bound.
"""

# JAX has no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from flax_mesh.blockwise.masks.bounds import Array, Bound, Cuts, bound_leaf, bound_scores, module_of, unknown
from flax_mesh.blockwise.traced.region import Key, Region, Values
from flax_mesh.tree import is_key

LOW = -1e3  # blocks whose scores are surely below this may be skipped
GAP = 104.0  # exp(-104) is 0 in float32, also as a denormal
Static: TypeAlias = Mapping[Key, np.ndarray | None]  # leaves that are known at trace time
Operand: TypeAlias = tuple[Key, Sequence[int]]  # of a product, with the dims that are contracted
ASSUMED = 1e6  # products are assumed to be within this, if a mask is added; checked at run time by norms


class Visits(NamedTuple):
    order: Array  # (blocks of queries, blocks of keys): the blocks that are visited first
    sure: Array  # (blocks of queries,): how many are visited in any case
    high: Array  # (blocks of queries,): bound of the scores of all others


@dataclass(frozen=True)
class Blocks:
    """How the dims of queries, of one device, and of keys are cut."""

    queries: int  # length on one device
    keys: int
    q_size: int
    k_size: int
    parts: int  # devices that the queries are split over
    chunks: tuple[int, ...] = ()  # of queries, of all devices in `head_tail` order; (): each has its rows in order

    @property
    def num_q(self) -> int:
        return -(-self.queries // self.q_size)

    @property
    def num_k(self) -> int:
        return -(-self.keys // self.k_size)

    def first_row(self, part: ArrayLike, i: ArrayLike) -> jax.Array:
        """The position of the first query of block `i` of a device."""
        part, at = cast(jax.Array, part), cast(jax.Array, i) * self.q_size
        if not self.chunks:
            return part * self.queries + at
        half = self.queries // 2
        return jnp.asarray(self.chunks)[2 * part + at // half] * half + at % half

    def cuts(self, region: Region, part: jax.Array | int | None = None) -> Cuts:
        """Of one device, or of all of them."""
        if part is None:
            rows = np.arange(self.parts)[:, None] * self.queries + np.arange(self.num_q) * self.q_size
            starts, stop = rows.reshape(-1), self.parts * self.queries
        else:
            starts = jnp.asarray(self.first_row(part, np.arange(self.num_q)))
            stop = self.parts * self.queries if self.chunks else (part + 1) * self.queries
        columns = np.arange(self.num_k) * self.k_size
        return {region.q: (starts, self.q_size, stop), region.k: (columns, self.k_size, self.keys)}


def needs_data(region: Region, static: Static) -> bool:
    """Whether a mask depends on data: on integers or booleans that are not known at trace time."""
    return any(
        static.get(key) is None and not is_key(x.aval) and not jnp.issubdtype(x.aval.dtype, jnp.floating)
        for key, (x, labels) in region.leaves.items()
        if labels and {region.q, region.k} & {*labels}
    )


def static_visits(region: Region, blocks: Blocks, static: Static) -> tuple[Visits, bool]:
    """Visits that are known at trace time, of all devices, and whether they hold only if products are small."""
    cuts = blocks.cuts(region)
    leaves = {
        key: bound_leaf(np.asarray(static[key]), labels, cuts) if static.get(key) is not None else unknown(len(labels))
        for key, (_, labels) in region.leaves.items()
    }
    shape = len(cuts[region.q][0]), blocks.num_k
    sure = _high(region, bound_scores(region, leaves, cuts, np.inf), shape)
    if _products(region) is None:
        return _visits(sure), False
    assumed = _high(region, bound_scores(region, leaves, cuts, ASSUMED), shape)
    is_guarded = bool(((assumed < LOW) & ~(sure < LOW)).any())
    return _visits(assumed if is_guarded else sure), is_guarded


def data_visits(
    region: Region, blocks: Blocks, values: Values, part: jax.Array | int, constants: Collection[Key]
) -> Visits:
    """Visits of one device, from the values of its leaves: integers, booleans and `constants`, known at trace time."""
    cuts = blocks.cuts(region, part)
    leaves: dict[Key, Bound] = {}
    for key, (x, labels) in region.leaves.items():
        is_known = key in constants or not (is_key(x.aval) or jnp.issubdtype(x.aval.dtype, jnp.floating))
        leaves[key] = bound_leaf(jnp.asarray(values[key]), labels, cuts) if is_known else unknown(len(labels))
    products = _products(region)
    bound = bound_scores(region, leaves, cuts, np.inf if products is None else ASSUMED)
    visits = _visits(_high(region, bound, (blocks.num_q, blocks.num_k)))
    return visits if products is None else guarded(region, visits, values)


def guarded(region: Region, visits: Visits, values: Values) -> Visits:
    """All blocks are visited if a product may be larger than assumed."""
    is_small = [_norm(x, y, values) < ASSUMED for x, y in _products(region) or []]
    sure = jnp.where(functools.reduce(jnp.logical_and, is_small), visits.sure, visits.order.shape[1])
    return visits._replace(sure=sure)


def _norm(x: Operand, y: Operand, values: Values) -> jax.Array:
    """The product of the largest norms of two operands, which their product cannot exceed."""
    norms = []
    for key, contracted in (x, y):
        value = lax.stop_gradient(values[key]).astype(jnp.float32)
        norms.append(jnp.sqrt(jnp.max(jnp.sum(value * value, tuple(contracted)))))
    return norms[0] * norms[1]


def _products(region: Region) -> list[tuple[Operand, Operand]] | None:
    """The operands of all products among the scores, with the dims that are contracted; None if one is no leaf."""
    products: list[tuple[Operand, Operand]] = []
    for step in region.score_steps:
        if step.op.name == "dot_general":
            if any(key not in region.leaves for key in step.inputs):
                return None
            contracted = step.op.params["dimension_numbers"][0]
            left, right = zip(step.inputs, contracted, strict=True)
            products.append((left, right))
    return products or None


def _high(region: Region, bound: Bound, shape: tuple[int, int]) -> Array:
    """The upper bounds of the blocks, (blocks of queries, blocks of keys)."""
    high = bound[1]
    m = module_of(high)
    high = m.max(high, axis=tuple(d for d in range(m.ndim(high)) if d not in (region.q, region.k)))
    return m.broadcast_to(high.T if region.q > region.k else high, shape)


def _visits(high: Array) -> Visits:
    m = module_of(high)
    skipped = high < LOW
    order = m.argsort(m.where(skipped, 1, 0), axis=1, stable=True).astype(np.int32)
    most = m.max(m.where(skipped, high, -np.inf), axis=1)
    finite = m.where(most == -np.inf, 0.0, most)
    with np.errstate(over="ignore"):  # a bound beyond float32 is infinite: blocks are visited
        most = (most + abs(finite) * 1e-6).astype(np.float32)  # above what rounding changes
    return Visits(order, m.sum(~skipped, axis=1).astype(np.int32), most)
