"""Which scores the mask of an attention leaves, computed from its equations.

The scores are evaluated with 0 and with -LOWEST in the place of every product. An element that is 0 and then positive
is a score; one that is below LOWEST is masked; every other one, such as a bias, belongs to no mask. Blocks of which
interval arithmetic says this of all elements are not evaluated. If data decide which keys are left, a query may have
none: then all its scores must be the same number, whatever the product is, so that its weights are known.
"""

# JAX has no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from flax_mesh.blockwise.masks.bounds import Bound, Cuts, bound_leaf, bound_scores, filled, unknown
from flax_mesh.blockwise.masks.visits import ASSUMED, Blocks, Static
from flax_mesh.blockwise.traced.dims import Block, evaluate_block
from flax_mesh.blockwise.traced.graph import Literal
from flax_mesh.blockwise.traced.region import Key, Region, Step
from flax_mesh.kernels import Band

LOWEST = -6e4  # a finite mask is from here on as good as -inf; the lowest float16 is -65504
_BLOCK = 512
_DATA = "its mask depends on data other than ids of documents or padding"
Fixed: TypeAlias = Mapping[Key, float]
Conditions: TypeAlias = Mapping[Key, tuple[float, float]]  # two numbers of which an array of data consists


class Seen(NamedTuple):
    """Which keys are seen."""

    band: Band
    low: float | None  # the score of every other key, if it is one number; else a query without a key needs its scores
    where: tuple[int, ...]  # for each condition, which of its numbers leaves keys: 0 or 1


Bands: TypeAlias = dict[Hashable, Seen | str]  # of masks, or why they are none


class NoFormulaError(Exception):
    """The equations of an attention are not the formula of a kernel, for a reason."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


def needed_steps(steps: Sequence[Step], wanted: Key, without: Fixed) -> list[Step]:
    """The steps that a value is computed by, if the values of `without` are given."""
    needed, computed = {wanted}, list[Step]()
    for step in reversed(steps):
        if step.output in needed and step.output not in without:
            needed |= {*step.inputs}
            computed.append(step)
    return computed[::-1]


def band_of(
    region: Region, static: Static, product: Key, conditions: Conditions, known: Bands, *, is_padded: bool
) -> Seen:
    """The keys that each query sees where all `conditions` hold, if it sees none where one does not.

    `is_padded`: some queries may see no key. Every layer has the same mask: `known` are those that are checked.
    """
    mask = _Mask(region, static, product, conditions, is_padded)
    if (key := mask.key) not in known:
        try:
            known[key] = Seen(mask.band, mask.low, (*mask.seen.values(),))
        except NoFormulaError as error:
            known[key] = error.reason
    if isinstance(checked := known[key], str):
        raise NoFormulaError(checked)
    return checked


class _Mask:
    low: float | None = -math.inf  # the score of a key that is not seen

    def __init__(self, region: Region, static: Static, product: Key, conditions: Conditions, is_padded: bool):
        self.region, self.product, self.conditions, self.is_padded = region, product, conditions, is_padded
        self.seen = dict.fromkeys(conditions, 1)
        self.lows: set[float] = set()  # the scores of keys that are not seen
        fixed = self._fixed(0.0)
        self.steps = needed_steps(region.score_steps, region.scores, fixed)
        inputs = {x for step in self.steps for x in step.inputs if not isinstance(x, Literal)}
        leaves = [key for key in region.leaves if key in inputs and key not in fixed]
        for key in leaves:
            if static.get(key) is None:
                dtype = region.leaves[key][0].aval.dtype
                kind = "an array is added, which may need a gradient" if jnp.issubdtype(dtype, jnp.floating) else ""
                raise NoFormulaError(kind or _DATA)
        if any(step.op.name == "random_bits" for step in self.steps):
            raise NoFormulaError("its scores have dropout")
        self.leaves = {key: np.asarray(static[key]) for key in leaves}
        both = {region.q, region.k}
        depends = {
            label
            for key, x in self.leaves.items()
            for d, label in enumerate(region.leaves[key][1])
            if (x != x.take([0], d)).any()
        }
        depends |= {step.labels[step.op.params["dimension"]] for step in self.steps if step.op.name == "iota"}
        if depends - both - {None}:
            raise NoFormulaError("its mask differs between rows or heads")
        shapes = [(step.op.outputs[0].shape, step.labels) for step in self.steps]
        shapes.append((region.shape, tuple(range(len(region.shape)))))
        sizes: dict[int, set[int]] = {}
        for shape, labels in shapes:
            for size, label in zip(shape, labels, strict=True):
                if label is not None and label not in both:
                    sizes.setdefault(label, set()).add(size)
        # One element of every other dim is enough, unless the dim is split or merged.
        self.parts = {d: max(x) for d, x in sizes.items() if len(x) == 1}

    @property
    def key(self) -> Hashable:
        """Equal for masks that are computed in the same way."""
        numbers: dict[Key, int] = {x: n for n, x in enumerate((self.product, *self.conditions, *self.leaves))}
        rows: list[Hashable] = [
            (x.shape, str(x.dtype), x.tobytes(), self.region.leaves[key][1]) for key, x in self.leaves.items()
        ]
        for step in self.steps:
            inputs = [str(x.value) if isinstance(x, Literal) else numbers[x] for x in step.inputs]
            out = step.op.outputs[0].aval
            rows.append((step.op.name, str(step.op.params), out.shape, str(out.dtype), step.labels, *inputs))
            numbers[step.output] = len(numbers)
        given = (*self.conditions.values(),)
        return self.region.shape, self.region.q, self.region.k, self.is_padded, given, *rows

    @property
    def band(self) -> Band:
        queries, keys = self.region.shape[self.region.q], self.region.shape[self.region.k]
        self.seen = {key: self._where(key) for key in self.conditions}
        first, last = (self.evaluated(i, 1, 0, keys)[0].nonzero()[0] for i in (0, queries - 1))
        if not (first.size and last.size):
            raise NoFormulaError("a query sees no key")
        left, right = queries - 1 - int(last[0]), int(first[-1])
        band = (None if last[0] == 0 else left), (None if right == keys - 1 else right)
        self.check(band)
        return band

    def _where(self, key: Key) -> int:
        """Which number of a condition leaves keys, if the other one hides all."""
        queries, keys = self.region.shape[self.region.q], self.region.shape[self.region.k]
        cuts = Blocks(queries, keys, queries, keys, 1).cuts(self.region)
        hides = [
            bool((self._bounds(cuts, {self.product: 0.0, key: x})[1] <= LOWEST).all()) for x in self.conditions[key]
        ]
        if hides[0] == hides[1]:
            raise NoFormulaError(_DATA)
        return hides.index(False)

    def _fixed(self, product: float) -> dict[Key, float]:
        return {self.product: product, **{key: self.conditions[key][n] for key, n in self.seen.items()}}

    def _scores(self, i: int, rows: int, j: int, columns: int, fixed: Fixed) -> np.ndarray:
        region = self.region
        starts, sizes = {region.q: i, region.k: j}, {region.q: rows, region.k: columns}
        block = Block(sizes, starts, self.parts, {})
        with jax.ensure_compile_time_eval():
            env: dict[Key, jax.Array] = {}
            for key, x in self.leaves.items():
                for d, label in enumerate(region.leaves[key][1]):
                    if label in self.parts:
                        x = x.take([0], d)
                    elif label in sizes:
                        x = x.take(np.minimum(starts[label] + np.arange(sizes[label]), x.shape[d] - 1), d)
                env[key] = jnp.asarray(x)
            arrays = {step.output: (step.op.outputs[0], step.labels) for step in region.score_steps} | {**region.leaves}
            for key, number in fixed.items():
                value, labels = arrays[key]
                env[key] = jnp.full(block.shape(value.shape, labels), number, value.aval.dtype)
            for step in self.steps:
                args = [jnp.asarray(x.value, x.aval.dtype) if isinstance(x, Literal) else env[x] for x in step.inputs]
                env[step.output] = evaluate_block(step.op, step.labels, args, block)
            x = jnp.asarray(env[region.scores], jnp.float32)
            x = jnp.moveaxis(x, (region.q, region.k), (-2, -1))
            return np.asarray(x).reshape(-1, *x.shape[-2:])

    def evaluated(self, i: int, rows: int, j: int, columns: int) -> np.ndarray:
        """Which scores of a block are seen."""
        at_0, at_1 = (self._scores(i, rows, j, columns, self._fixed(x)) for x in (0.0, -LOWEST))
        seen = (at_0 == 0) & (at_1 > 0)
        if self.is_padded:
            self.lows |= {float(x) for at in (at_0, at_1) for x in np.unique(at[~seen])}
        if not (seen | (at_0 <= LOWEST)).all() or (seen != seen[:1]).any():
            raise NoFormulaError("numbers are added to its scores")
        return seen[0]

    def _bounds(self, cuts: Cuts, fixed: Fixed) -> Bound:
        region, rank = self.region, {key: len(labels) for key, (_, labels) in self.region.leaves.items()}
        leaves = {key: unknown(n) for key, n in rank.items()}
        for key in {*rank} & {*self.conditions}:
            low, high = sorted(self.conditions[key])
            leaves[key] = filled(rank[key], fixed.get(key, low), fixed.get(key, high))
        leaves |= {key: bound_leaf(x, region.leaves[key][1], cuts) for key, x in self.leaves.items()}
        others = tuple(d for d in range(len(region.shape)) if d not in (region.q, region.k))
        low, high = bound_scores(region, leaves, cuts, ASSUMED, fixed)
        shape = tuple(len(cuts[d][0]) for d in (region.q, region.k))
        low, high = np.asarray(low).min(others), np.asarray(high).max(others)
        low, high = (x.T if region.q > region.k else x for x in (low, high))
        return np.broadcast_to(low, shape), np.broadcast_to(high, shape)

    def check(self, band: Band) -> None:
        """Raises NoFormulaError if an element is seen that the band does not have, or the other way round."""
        queries, keys = self.region.shape[self.region.q], self.region.shape[self.region.k]
        blocks = Blocks(queries, keys, min(_BLOCK, queries), min(_BLOCK, keys), 1)
        cuts = blocks.cuts(self.region)
        at_0, at_1 = (self._bounds(cuts, self._fixed(x)) for x in (0.0, -LOWEST))
        seen, masked = (at_0[0] == 0) & (at_0[1] == 0) & (at_1[0] > 0), at_0[1] <= LOWEST
        i, j = np.arange(blocks.num_q)[:, None] * blocks.q_size, np.arange(blocks.num_k) * blocks.k_size
        low = j - np.minimum(i + blocks.q_size, queries) + 1  # of position of key - position of query
        high = np.minimum(j + blocks.k_size, keys) - 1 - i
        left, right = (math.inf if x is None else x for x in band)
        every, none = (low >= -left) & (high <= right), (high < -left) | (low > right)
        is_wrong = bool((seen & ~every | masked & ~none).any())
        for at in np.argwhere(~(seen | masked)):
            i, j = (int(n) * size for n, size in zip(at, (blocks.q_size, blocks.k_size), strict=True))
            rows, columns = np.arange(i, i + blocks.q_size), np.arange(j, j + blocks.k_size)
            distance = np.minimum(columns, keys - 1) - np.minimum(rows, queries - 1)[:, None]
            of_block = self.evaluated(i, len(rows), j, len(columns))
            is_wrong |= bool((of_block != (distance >= -left) & (distance <= right)).any())
        if is_wrong:
            raise NoFormulaError("its mask is neither causal nor a window")
        self.lows |= {float(x) for at in (*at_0, *at_1) for x in np.unique(at[masked])} if self.is_padded else set()
        for key, numbers in self.conditions.items() if self.is_padded else ():
            low, high = self._bounds(cuts, {key: numbers[1 - self.seen[key]]})
            self.lows |= {float(low.min()), float(high.max())}
        self.low = None if len(self.lows) > 1 else next(iter(self.lows), self.low)
