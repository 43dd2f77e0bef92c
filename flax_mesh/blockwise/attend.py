"""One attention in blocks, as a function of its leaves, on the devices of a placement."""

# JAX has no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from flax_mesh.axes import Layout, axes_of_spec
from flax_mesh.blockwise.derivatives import Arrays, Results, differentiable
from flax_mesh.blockwise.head_tail import Work, after, exchange, head_tail, is_worth, work_of
from flax_mesh.blockwise.loops import Loops, Saved
from flax_mesh.blockwise.masks.visits import Blocks, Static, Visits, data_visits, guarded, needs_data, static_visits
from flax_mesh.blockwise.place import Placement, on_devices, with_type_of
from flax_mesh.blockwise.traced.region import Key, Region, Values
from flax_mesh.kernels import rows_of
from flax_mesh.tree import is_key, num_bytes

_MOST = 2**24  # scores in one block, over batch and heads
_LEAST = 128
_MOST_BLOCKS = 2048  # along a dim: a table has the bounds of the scores of every pair


class Attention:
    """`static` are leaves that are known at trace time; `layouts` has the layouts of leaves, by the id of the value."""

    name = "blockwise"

    def __init__(
        self,
        region: Region,
        static: Static,
        placement: Placement | None,
        layouts: Mapping[int, Layout],
        block: int,
    ):
        self.region, self.placement, self.keys = region, placement, list(region.leaves)
        self.leaves = [x for x, _ in region.leaves.values()]
        self.parts = placement.parts if placement else {}
        self.blocks = _blocks(region, self.parts, block)
        self.has_data = needs_data(region, static)
        self.constants = {key for key, x in static.items() if x is not None}
        split = {*self.parts} - {region.q}
        self.known = {key: x for key, x in static.items() if x is not None and not split & {*region.leaves[key][1]}}
        self.static, self.is_guarded = static_visits(region, self.blocks, static)
        self.work: Work | None = None  # in head-tail order
        if self.blocks.parts > 1:
            self._balance(static, block)
        self.gathered = self._gathered(static, layouts) if placement and region.q in placement.axes else {}

    def _balance(self, static: Static, block: int) -> None:
        """Puts the queries in head-tail order if that is worth an exchange of rows."""
        blocks, region = self.blocks, self.region
        per_query = np.asarray(self.static.sure).reshape(blocks.parts, -1).mean(1) * blocks.k_size
        leaves = [(x, labels) for x, labels in region.leaves.values() if region.q in labels]
        moves = all(region.k not in labels and not is_key(x.aval) for x, labels in leaves)
        if not moves or blocks.queries % 2 or not is_worth(per_query.max(), per_query.mean()):
            return
        halves = _blocks(region, {**self.parts, region.q: 2 * blocks.parts}, block)
        count = next((n for n in range(halves.num_q, 2 * halves.num_q) if halves.queries % n == 0), 0)
        if not count:
            return
        chunks = head_tail(blocks.parts)
        cut = replace(blocks, q_size=halves.queries // count, k_size=halves.k_size, chunks=chunks)
        visits, is_guarded = static_visits(region, cut, static)
        work = work_of(np.asarray(visits.sure) * cut.q_size * cut.k_size, blocks.parts)
        if work.saves(blocks.queries):
            of_chunks = (np.asarray(x).reshape(len(chunks), -1, *x.shape[1:])[[*chunks]] for x in visits)
            self.static = Visits(*(x.reshape(-1, *x.shape[2:]) for x in of_chunks))
            self.blocks, self.is_guarded, self.work = cut, is_guarded, work

    def _gathered(self, static: Static, layouts: Mapping[int, Layout]) -> dict[Key, int]:
        """key -> dim of the keys, of the leaves whose parts are on different devices."""
        assert self.placement is not None
        names, gathered = self.placement.axes[self.region.q], {}
        for key, (x, labels) in self.region.leaves.items():
            if self.region.k not in labels or self.region.q in labels or static.get(key) is not None:
                continue
            dim, known = labels.index(self.region.k), layouts.get(id(x))
            if self.placement.is_explicit:
                known = axes_of_spec(x.aval.sharding.spec, len(x.shape))
            is_split = set(names) <= set(known[dim]) if known else jnp.issubdtype(x.aval.dtype, jnp.floating)
            if is_split and x.shape[dim] % self.parts[self.region.q] == 0:
                gathered[key] = dim
        return gathered

    @property
    def saved(self) -> int:
        """Bytes, per device, of the arrays of scores that the attention as written keeps for its backward pass."""
        return 3 * num_bytes(self.region.softmax.exp.outputs[0].aval) // math.prod(self.parts.values())

    @property
    def text(self) -> str:
        blocks, region = self.blocks, self.region
        total = blocks.parts * blocks.num_q * blocks.num_k
        of_rows = self.work.text(blocks.q_size * blocks.k_size) if self.work else ""
        visited = "blocks by data" if self.has_data else f"{int(self.static.sure.sum())} of {total} blocks"
        texts = [f"q {region.shape[region.q]} k {region.shape[region.k]}, {visited}"]
        texts += self.placement.texts(region.q, of_rows) if self.placement else []
        return ", ".join([*texts, "gathered keys"] if self.gathered else texts)

    # On one device

    def _loops(self) -> Loops:
        axes = self.placement.axes if self.placement else {}
        index = {d: lax.axis_index(names) for d, names in axes.items()}
        return Loops(self.region, self.blocks, self.parts, index, self._trips)

    @property
    def _trips(self) -> float:
        """Blocks of keys that a block of queries visits on the device with most of them; masks of data skip more."""
        return float(self.static.sure.reshape(self.blocks.parts, -1).sum(1).max()) / self.blocks.num_q

    def _visits(self, loops: Loops, values: Values) -> Visits:
        part = loops.index.get(self.region.q, 0)
        if self.has_data:
            return data_visits(self.region, self.blocks, values, part, self.constants)
        visits = self.static
        if self.blocks.parts > 1:
            row, count = part * self.blocks.num_q, self.blocks.num_q
            visits = Visits(*(lax.dynamic_slice_in_dim(jnp.asarray(x), row, count) for x in visits))
            if not (self.static.high > -math.inf).any():
                visits = visits._replace(high=np.full(count, -np.inf, np.float32))
        return guarded(self.region, visits, values) if self.is_guarded else visits

    def _forward(self, *given: jax.Array) -> Results:
        values, loops = dict(zip(self.keys, given, strict=True)), self._loops()
        names, done = self._axes(self.region.q), list[jax.Array]()
        for key, dim in self.gathered.items():
            values[key] = lax.all_gather(after(values[key], done), names, axis=dim, tiled=True)
            done = [values[key]]
        values = self._moved(values, done)
        out, saved = loops.forward(values, self._visits(loops, values))
        return self._exchanged(out, loops.out_dim, back=True), saved, [values[key] for key in self.gathered]

    def _exchanged(self, x: jax.Array, dim: int, *, back: bool = False) -> jax.Array:
        names = self._axes(self.region.q)
        return exchange(x, dim, names, self.blocks.parts, back=back) if self.blocks.chunks else x

    def _moved(self, values: Values, done: Arrays = (), *, back: bool = False) -> Values:
        """`values`, those with a dim of queries in head-tail order, or `back`."""
        moved, q = dict(values), self.region.q
        for key in values if self.blocks.chunks else ():
            if q not in (labels := self.region.leaves[key][1]):
                continue
            if key in self.known and not back:
                rows = jnp.asarray(rows_of(self.region.shape[q], self.blocks.chunks))[lax.axis_index(self._axes(q))]
                moved[key] = jnp.take(jnp.asarray(self.known[key]), rows, labels.index(q))
            else:
                moved[key] = self._exchanged(after(values[key], done), labels.index(q), back=back)
                done = [moved[key]]
        return moved

    def _backward(
        self, wanted: Sequence[Key], given: Arrays, saved: Saved[jax.Array], out: jax.Array, gradient: jax.Array
    ) -> list[jax.Array]:
        values, loops = dict(zip(self.keys, given, strict=True)), self._loops()
        delta = loops.delta(out, gradient)
        if self.blocks.chunks:
            gradient = self._exchanged(gradient, loops.out_dim)
            delta = self._exchanged(after(delta, [gradient]), self.region.q)
            values = self._moved(values, [delta])
        visits = self._visits(loops, values)
        gradients = self._moved(loops.backward(values, wanted, visits, saved, gradient, delta), back=True)
        summed: list[jax.Array] = []
        for key in wanted:
            summed.append(self._summed(key, after(gradients[key], summed[-1:])))
        return [x.astype(values[key].dtype) for key, x in zip(wanted, summed, strict=True)]

    def _summed(self, key: Key, x: jax.Array) -> jax.Array:
        """The sum over the devices that have other queries, heads or rows of the same leaf."""
        axes = self.placement.axes if self.placement else {}
        labels = self.region.leaves[key][1]
        others = [d for d in axes if d not in labels]
        if key in self.gathered:
            x = lax.psum_scatter(x, self._axes(self.region.q), scatter_dimension=self.gathered[key], tiled=True)
            others.remove(self.region.q)
        names = tuple(name for d in others for name in axes[d])
        return lax.psum(x, names) if names else x

    def _axes(self, label: int) -> tuple[str, ...]:
        return self.placement.axes.get(label, ()) if self.placement else ()

    # On all devices

    def _specs(self, *, split_keys: bool) -> list[PartitionSpec]:
        """Of the leaves: with their keys as they are stored, or gathered."""
        place, specs = self.placement, []
        for key in self.keys:
            labels = self.region.leaves[key][1]
            spec = [*(place.spec(labels) if place else PartitionSpec(*[None] * len(labels)))]
            if key in self.gathered and split_keys:
                spec[self.gathered[key]] = self._axes(self.region.q)
            specs.append(PartitionSpec(*spec))
        return specs

    def _result_specs(self) -> tuple[PartitionSpec, Saved[PartitionSpec]]:
        if (place := self.placement) is None:
            return PartitionSpec(), Saved(PartitionSpec(), PartitionSpec(), PartitionSpec())
        rows = place.spec(tuple(range(len(self.region.shape))), without=self.region.k)
        every = tuple(name for names in place.axes.values() for name in names)
        return place.spec(self.region.out_labels), Saved(rows, rows, PartitionSpec(every))

    def forward(self, values: Arrays) -> Results:
        """(result, the residuals of the backward pass, the leaves with all keys)."""
        ins, after = self._specs(split_keys=True), self._specs(split_keys=False)
        outs = (*self._result_specs(), [after[self.keys.index(key)] for key in self.gathered])
        out, saved, gathered = on_devices(self.placement, self._forward, tuple(values), tuple(ins), outs)
        complete = dict(zip(self.gathered, gathered, strict=True))
        return out, saved, [complete.get(key, x) for key, x in zip(self.keys, values, strict=True)]

    def backward(
        self, wanted: Sequence[int], values: Arrays, saved: Saved[jax.Array], out: jax.Array, gradient: jax.Array
    ) -> list[jax.Array]:
        """The gradients of the leaves with the numbers `wanted`."""
        keys, (out_spec, saved_specs) = [self.keys[n] for n in wanted], self._result_specs()
        ins = (self._specs(split_keys=False), saved_specs, out_spec, out_spec)
        stored = self._specs(split_keys=True)
        fn = functools.partial(self._backward, keys)
        gradients = on_devices(
            self.placement, fn, (list(values), saved, out, gradient), ins, [stored[n] for n in wanted]
        )
        return [
            with_type_of(self.placement, self.region.leaves[key][0], x) for key, x in zip(keys, gradients, strict=True)
        ]

    def plain(self, *values: jax.Array) -> jax.Array:
        """The attention as it was written: all blocks at once."""
        region = self.region
        queries, keys = region.shape[region.q], region.shape[region.k]
        blocks = Blocks(queries, keys, queries, keys, 1)
        loops = Loops(region, blocks, {}, {})
        env = dict(zip(self.keys, values, strict=True))
        block = loops.block(0, 0)
        x = jnp.concatenate([loops.scores(env, block), *map(loops.full_columns, loops.columns(env))], region.k)
        m = lax.stop_gradient(x.max(region.k, keepdims=True))
        e = jnp.exp(x - jnp.where(m == -jnp.inf, 0.0, m))
        of_keys = lax.slice_in_dim(e, 0, keys, axis=region.k)
        part, total = loops.weigh(env, of_keys, block)
        total = total + lax.slice_in_dim(e, keys, e.shape[region.k], axis=region.k).sum(region.k, keepdims=True)
        if region.selects:
            total, _ = loops.without_empty(total, loops.keeps(env, of_keys, block))
        return (part / loops.to_out(total)).astype(region.out.aval.dtype)

    def is_gathered(self, number: int) -> bool:
        """Whether the keys of a leaf are gathered from other devices."""
        return self.keys[number] in self.gathered

    def __call__(self, values: Arrays) -> jax.Array:
        """The result, which JAX can differentiate."""
        return with_type_of(self.placement, self.region.out, differentiable(self, values)(*values))


def _blocks(region: Region, parts: Mapping[int, int], block: int) -> Blocks:
    of_queries = parts.get(region.q, 1)
    lengths = [region.shape[region.q] // of_queries, region.shape[region.k]]
    others = math.prod(size // parts.get(d, 1) for d, size in enumerate(region.shape) if d not in (region.q, region.k))
    while others * block * block > _MOST and block > _LEAST:
        block //= 2
    sizes = [-(-length // min(-(-length // block), _MOST_BLOCKS)) for length in lengths]
    return Blocks(lengths[0], lengths[1], sizes[0], sizes[1], of_queries)
