"""One attention in blocks, as a function of its leaves that JAX can differentiate, on the devices of a placement.

Reverse mode runs the loops. Forward mode, and the derivative of a gradient, compute the attention as it was written.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend import core as jex
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from flax_mesh.blockwise.dims import Block
from flax_mesh.blockwise.loops import Loops, Saved, Values
from flax_mesh.blockwise.place import Layout, Placement, axes_of_spec
from flax_mesh.blockwise.region import Region
from flax_mesh.blockwise.visits import Blocks, Visits, data_visits, guarded, needs_data, static_visits
from flax_mesh.jax_compat import linear_primitive
from flax_mesh.program.graph import Value
from flax_mesh.tree import num_bytes

RESIDUALS = "attention"  # the name, for policies of jax.checkpoint, of the residuals that the backward pass reads
BLOCK, BLOCK_ON_GPUS = 512, 1024  # of queries and of keys; on an H100, 1024 take 0.6 to 0.7 of the time of 512
_MOST = 2**24  # scores in one block, over batch and heads
_LEAST = 128
_MOST_BLOCKS = 2048  # along a dim: a table has the bounds of the scores of every pair


class Attention:
    """`static` are leaves that are known at trace time; `layouts` has the layouts of leaves, by the id of the value."""

    def __init__(
        self,
        region: Region,
        static: Mapping[Any, Any],
        placement: Placement | None,
        layouts: Mapping[int, Layout],
        block: int | None = None,
    ):
        self.region, self.placement, self.keys = region, placement, list(region.leaves)
        self.parts = placement.parts if placement else {}
        self.blocks = _blocks(region, self.parts, block or _default_block())
        self.has_data = needs_data(region, static)
        self.constants = {key for key, x in static.items() if x is not None}
        self.static, self.is_guarded = static_visits(region, self.blocks, static)
        self.gathered = self._gathered(static, layouts) if placement and region.q in placement.axes else {}

    def _gathered(self, static: Mapping[Any, Any], layouts: Mapping[int, Layout]) -> dict[Any, int]:
        """key -> dim of the keys, of the leaves whose parts are on different devices."""
        assert self.placement is not None
        names, gathered = self.placement.axes[self.region.q], {}
        for key, (x, labels) in self.region.leaves.items():
            if self.region.k not in labels or self.region.q in labels or static.get(key) is not None:
                continue
            dim, known = labels.index(self.region.k), layouts.get(id(x))
            if self._is_explicit:
                known = axes_of_spec(x.aval.sharding.spec, len(x.shape))
            is_split = set(names) <= set(known[dim]) if known else jnp.issubdtype(x.aval.dtype, jnp.floating)
            if is_split and x.shape[dim] % self.parts[self.region.q] == 0:
                gathered[key] = dim
        return gathered

    @property
    def _is_explicit(self) -> bool:
        return self.placement is not None and AxisType.Explicit in self.placement.mesh.axis_types

    def _with_type_of(self, value: Value, x: Any) -> Any:
        if self.placement is None or not self._is_explicit:
            return x
        return _with_spec(x, self.placement.mesh, value.aval.sharding.spec)

    @property
    def saved(self) -> int:
        """Bytes, per device, of the arrays of scores that the attention as written keeps for its backward pass."""
        return 3 * num_bytes(self.region.softmax.exp.outputs[0].aval) // math.prod(self.parts.values())

    @property
    def text(self) -> str:
        blocks, region = self.blocks, self.region
        total = blocks.parts * blocks.num_q * blocks.num_k
        visited = "blocks by data" if self.has_data else f"{int(self.static.count.sum())} of {total} blocks"
        texts = [f"q {region.shape[region.q]} k {region.shape[region.k]}, {visited}"]
        for d, names in self.placement.axes.items() if self.placement else ():
            texts.append(f"{'queries' if d == region.q else f'dim {d}'} over {'+'.join(names)}")
        return ", ".join([*texts, "gathered keys"] if self.gathered else texts)

    # On one device

    def _loops(self) -> Loops:
        axes = self.placement.axes if self.placement else {}
        index = {d: lax.axis_index(names) for d, names in axes.items()}
        return Loops(self.region, self.blocks, self.parts, index, self._trips)

    @property
    def _trips(self) -> float:
        """Blocks of keys that a block of queries visits on the device with most of them; masks of data skip more."""
        return float(self.static.count.reshape(self.blocks.parts, -1).sum(1).max()) / self.blocks.num_q

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

    def _forward(self, *given: Any) -> tuple[Any, Saved, list[Any]]:
        values = dict(zip(self.keys, given, strict=True))
        if self.gathered:
            names = self._axes(self.region.q)
            done: list[Any] = []
            for key, dim in self.gathered.items():
                values[key] = lax.all_gather(_after(values[key], done), names, axis=dim, tiled=True)
                done = [values[key]]
        loops = self._loops()
        out, saved = loops.forward(values, self._visits(loops, values))
        return out, saved, [values[key] for key in self.gathered]

    def _backward(
        self, wanted: Sequence[Any], given: Sequence[Any], saved: Saved, out: Any, gradient: Any
    ) -> list[Any]:
        values, loops = dict(zip(self.keys, given, strict=True)), self._loops()
        visits = self._visits(loops, values)
        gradients = loops.backward(values, wanted, visits, saved, out, gradient)
        summed: list[Any] = []
        for key in wanted:
            summed.append(self._summed(key, _after(gradients[key], summed[-1:])))
        return [x.astype(values[key].dtype) for key, x in zip(wanted, summed, strict=True)]

    def _summed(self, key: Any, x: Any) -> Any:
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
        return self.placement.axes[label] if self.placement else ()

    # On all devices

    def _mapped(self, fn: Callable[..., Any], args: Any, ins: Any, outs: Any) -> Any:
        if self.placement is None:
            return fn(*args)
        mesh = self.placement.mesh
        if self._is_explicit:
            args = jax.tree.map(lambda spec, x: _with_spec(x, mesh, spec), ins, args, is_leaf=_is_spec)
        return jax.shard_map(fn, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)(*args)

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

    def _result_specs(self) -> tuple[PartitionSpec, Saved]:
        if (place := self.placement) is None:
            return PartitionSpec(), Saved(PartitionSpec(), PartitionSpec(), PartitionSpec())
        rows = place.spec(tuple(range(len(self.region.shape))), without=self.region.k)
        every = tuple(name for names in place.axes.values() for name in names)
        return place.spec(self.region.out_labels), Saved(rows, rows, PartitionSpec(every))

    def forward(self, values: Sequence[Any]) -> tuple[Any, Saved, list[Any]]:
        """(result, the residuals of the backward pass, the leaves with all keys)."""
        ins, after = self._specs(split_keys=True), self._specs(split_keys=False)
        outs = (*self._result_specs(), [after[self.keys.index(key)] for key in self.gathered])
        out, saved, gathered = self._mapped(self._forward, tuple(values), tuple(ins), outs)
        complete = dict(zip(self.gathered, gathered, strict=True))
        return out, saved, [complete.get(key, x) for key, x in zip(self.keys, values, strict=True)]

    def backward(
        self, wanted: Sequence[int], values: Sequence[Any], saved: Saved, out: Any, gradient: Any
    ) -> list[Any]:
        """The gradients of the leaves with the numbers `wanted`."""
        keys, (out_spec, saved_specs) = [self.keys[n] for n in wanted], self._result_specs()
        ins = (self._specs(split_keys=False), saved_specs, out_spec, out_spec)
        stored = self._specs(split_keys=True)
        fn = functools.partial(self._backward, keys)
        gradients = self._mapped(fn, (list(values), saved, out, gradient), ins, [stored[n] for n in wanted])
        return [self._with_type_of(self.region.leaves[key][0], x) for key, x in zip(keys, gradients, strict=True)]

    def plain(self, *values: Any) -> Any:
        """The attention as it was written: all blocks at once."""
        region = self.region
        queries, keys = region.shape[region.q], region.shape[region.k]
        blocks = Blocks(queries, keys, queries, keys, 1)
        loops = Loops(region, blocks, {}, {})
        env = dict(zip(self.keys, values, strict=True))
        block: Block = loops.block(0, 0)
        x = jnp.concatenate([loops.scores(env, block), *map(loops.full_columns, loops.columns(env))], region.k)
        m = lax.stop_gradient(x.max(region.k, keepdims=True))
        e = jnp.exp(x - jnp.where(m == -jnp.inf, 0.0, m))
        of_keys = lax.slice_in_dim(e, 0, keys, axis=region.k)
        part, total = loops.weigh(env, of_keys, block)
        total = total + lax.slice_in_dim(e, keys, e.shape[region.k], axis=region.k).sum(region.k, keepdims=True)
        if region.selects:
            total, _ = loops.without_empty(total, loops.keeps(env, of_keys, block))
        return (part / loops.to_out(total)).astype(region.out.aval.dtype)

    # For JAX

    def __call__(self, values: Sequence[Any]) -> Any:
        floats = [n for n, x in enumerate(values) if jnp.issubdtype(x.dtype, jnp.floating)]

        def plain_of(values: Sequence[Any], numbers: Sequence[int]) -> Callable[..., Any]:
            def call(*some: Any) -> Any:
                given = dict(zip(numbers, some, strict=True))
                return self.plain(*(given.get(n, x) for n, x in enumerate(values)))

            return call

        @jax.custom_jvp
        def attend(*values: Any) -> Any:
            return self.forward(values)[0]

        @jax.custom_jvp
        def forwarded(*values: Any) -> Any:
            return self.forward(values)

        @forwarded.defjvp
        def forwarded_jvp(values: Any, tangents: Any) -> tuple[Any, Any]:
            """Of second derivatives. The residuals have no tangents, because the tangents of `pulled` are complete."""
            results = out, saved, _ = forwarded(*values)
            change = jax.jvp(plain_of(values, floats), [values[n] for n in floats], [tangents[n] for n in floats])[1]
            still = Saved(
                jnp.zeros_like(saved.maximum),
                jnp.zeros_like(saved.total),
                np.zeros(saved.visited.shape, jax.dtypes.float0),
            )
            return results, (change.astype(out.dtype), still, list(tangents))

        @functools.partial(attend.defjvp, symbolic_zeros=True)
        def jvp(values: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
            out, saved, values = forwarded(*values)
            out, saved = jax.tree.map(lambda x: checkpoint_name(x, RESIDUALS), (out, saved))
            values = [
                checkpoint_name(x, RESIDUALS) if self.keys[n] in self.gathered else x for n, x in enumerate(values)
            ]
            wanted = [n for n in floats if not isinstance(tangents[n], SymbolicZero)]
            residuals = (list(values), saved, out)
            flat, tree = jax.tree.flatten(residuals)

            def apply(flat: Sequence[Any], given: Sequence[Any]) -> Any:
                values = jax.tree.unflatten(tree, flat)[0]
                return jax.jvp(plain_of(values, wanted), tuple(values[n] for n in wanted), tuple(given))[1]

            def transpose(flat: Sequence[Any], gradient: Any) -> list[Any]:
                return list(pulled(wanted, *jax.tree.unflatten(tree, flat), gradient))

            given = [tangents[n] for n in wanted]
            return out, _tangent().bind(
                *flat, *given, count=len(flat), apply=apply, transpose=transpose, out=jax.typeof(out)
            )

        @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
        def pulled(wanted: Sequence[int], values: Any, saved: Saved, out: Any, gradient: Any) -> Any:
            return tuple(self.backward(wanted, values, saved, out, gradient))

        @pulled.defjvp
        def pulled_jvp(wanted: Sequence[int], primals: Any, tangents: Any) -> tuple[Any, Any]:
            values, saved, out, gradient = primals

            def pull(some: Any, gradient: Any) -> Any:
                given = dict(zip(floats, some, strict=True))
                every = [given.get(n, x) for n, x in enumerate(values)]
                return jax.vjp(plain_of(every, wanted), *(every[n] for n in wanted))[1](gradient)

            at = [values[n] for n in floats], gradient
            change = [tangents[0][n] for n in floats], tangents[3]
            return pulled(wanted, values, saved, out, gradient), jax.jvp(pull, at, change)[1]

        return self._with_type_of(self.region.out, attend(*values))


def _default_block() -> int:
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    return BLOCK_ON_GPUS if platform == "gpu" else BLOCK


def _after(x: Any, done: Sequence[Any]) -> Any:
    """`x`, for a collective operation that starts after those with the results `done`."""
    return lax.optimization_barrier((x, *done))[0] if done else x


def _blocks(region: Region, parts: Mapping[int, int], block: int) -> Blocks:
    of_queries = parts.get(region.q, 1)
    lengths = [region.shape[region.q] // of_queries, region.shape[region.k]]
    others = math.prod(size // parts.get(d, 1) for d, size in enumerate(region.shape) if d not in (region.q, region.k))
    while others * block * block > _MOST and block > _LEAST:
        block //= 2
    sizes = [-(-length // min(-(-length // block), _MOST_BLOCKS)) for length in lengths]
    return Blocks(lengths[0], lengths[1], sizes[0], sizes[1], of_queries)


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _with_spec(x: Any, mesh: Any, spec: PartitionSpec) -> Any:
    return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def _apply(*args: Any, count: int, apply: Any, transpose: Any, out: Any) -> Any:
    return apply(args[:count], args[count:])


def _type(*args: Any, count: int, apply: Any, transpose: Any, out: Any) -> Any:
    return out


def _transpose(gradient: Any, *args: Any, count: int, apply: Any, transpose: Any, out: Any) -> list[Any]:
    return [None] * count + list(transpose(args[:count], gradient))


def _batch(args: Any, dims: Any, *, count: int, apply: Any, transpose: Any, out: Any) -> tuple[Any, int]:
    axes = [d if isinstance(d, int) else None for d in dims]
    size = next(x.shape[d] for x, d in zip(args, axes, strict=True) if d is not None)
    before, given = axes[:count], []
    for x, d in zip(args[count:], axes[count:], strict=True):
        given.append(jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0))

    def applied(residuals: Any, tangents: Any) -> Any:
        return jax.vmap(apply, in_axes=(before, 0))(list(residuals), list(tangents))

    def transposed(residuals: Any, gradient: Any) -> Any:
        return jax.vmap(transpose, in_axes=(before, 0))(list(residuals), gradient)

    new = core.ShapedArray((size, *out.shape), out.dtype)
    result = _tangent().bind(*args[:count], *given, count=count, apply=applied, transpose=transposed, out=new)
    return result, 0


@functools.cache
def _tangent() -> jex.Primitive:
    """A linear function of its last operands, whose transposed is another function than JAX would derive."""
    return linear_primitive("blockwise_attention_tangent", _apply, _type, _transpose, _batch)
