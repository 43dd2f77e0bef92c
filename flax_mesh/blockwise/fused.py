"""One attention as the call of a kernel, as a function of its operands, on the devices of a placement."""

# JAX has no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from flax_mesh.blockwise.formula import FEATURE, Operand, Role, formula_of
from flax_mesh.blockwise.head_tail import after, exchange, head_tail, work_of_band
from flax_mesh.blockwise.masks.mask import Bands, NoFormulaError
from flax_mesh.blockwise.masks.visits import Static
from flax_mesh.blockwise.place import Placement, mesh_of, on_devices, with_type_of
from flax_mesh.blockwise.traced.dims import Labels
from flax_mesh.blockwise.traced.region import Region
from flax_mesh.hardware import LANES
from flax_mesh.kernels import (
    KERNELS,
    Need,
    cudnn_attention,
    gpu_problem,
    misfit,
    rows_of,
    sees_keys,
    splash_attention,
    splash_block,
    splash_kernel,
)
from flax_mesh.text import first_line
from flax_mesh.tree import PyTree


class Fused:
    """An attention that the kernel `name` computes; of the devices of `platform`, or by its reference.

    Raises NoFormulaError if the kernel does not compute it. `bands` as in `mask.band_of`.
    """

    saved = 0  # bytes of scores

    def __init__(
        self,
        region: Region,
        static: Static,
        placement: Placement | None,
        name: str,
        platform: str,
        bands: Bands,
    ):
        mesh = mesh_of(region.out, jax.sharding.get_abstract_mesh())
        is_split = not mesh.empty and mesh.size > 1 and {*mesh.axis_types} != {AxisType.Manual}
        if name == "splash" and placement is None and is_split:  # XLA cannot split this kernel
            placement = Placement(mesh, {})
        self.region, self.placement, self.name = region, placement, name
        self.formula = formula = formula_of(region, static, bands)
        self.is_reference = platform != KERNELS[name].platform
        operands = formula.operands
        self.leaves = [x.value for x in operands.values()]
        q, k, v = (operands[x] for x in "qkv")
        self.dtype = v.value.aval.dtype
        need = Need(
            dtypes=tuple(str(x.value.aval.dtype) for x in (q, k, v)),
            queries=region.shape[region.q],
            keys=region.shape[region.k],
            head_dims=(self._size(k, FEATURE), self._size(v, FEATURE)),
            band=formula.band,
            cap=formula.cap,
            has_segments="q_ids" in operands,
            parts=self._parts,
            is_padded=bool(formula.padding),
            has_sink="sink" in operands,
        )
        if text := misfit(name, need):
            raise NoFormulaError(text)
        self.guards = self._guards()
        self.chunks, self.order = self._chunks()
        if name == "cudnn" and not self.is_reference:
            if text := gpu_problem():
                raise NoFormulaError(text)
            try:
                jax.eval_shape(self._attend, *(jax.ShapeDtypeStruct(x.shape, x.aval.dtype) for x in self.leaves))
            except RuntimeError as error:  # JAX could not find the version of cuDNN, or the GPU is too old for it
                raise NoFormulaError(f"cuDNN cannot be traced here: {first_line(error)}") from error

    def _guards(self) -> tuple[str, ...]:
        """What must hold for the data of the padding, as in `guard.TEXTS`."""
        formula = self.formula
        are_integers = any(x.value.aval.dtype != bool for name, x in formula.operands.items() if name in formula.seen)
        needs_order = formula.padding == "any" and not KERNELS[self.name].has_padding
        needs = {"numbers": are_integers, "keys": formula.needs_keys, "order": needs_order}
        return tuple(name for name, is_needed in needs.items() if is_needed)

    def _chunks(self) -> tuple[tuple[int, ...], str]:
        """The chunks of queries in head-tail order, if that is worth an exchange of rows, and a text about it."""
        length, parts, band = self.region.shape[self.region.q], self._parts, self.formula.band
        if parts == 1 or length % (2 * parts * LANES):
            return (), ""
        block = splash_block(length // (2 * parts))
        work = work_of_band(length, band, block, parts)
        return (head_tail(parts), work.text(block**2)) if work.saves(length // parts) else ((), "")

    @property
    def _parts(self) -> int:
        return self.placement.parts.get(self.region.q, 1) if self.placement else 1

    def _size(self, operand: Operand, *roles: Role) -> int:
        """Of the dims with these roles together, on one device."""
        parts = self.placement.parts if self.placement else {}
        dims = zip(operand.value.shape, operand.labels, operand.roles, strict=True)
        return math.prod(size // parts.get(-1 if x is None else x, 1) for size, x, role in dims if role in roles)

    @property
    def text(self) -> str:
        region, kernel = self.region, KERNELS[self.name]
        texts = [f"q {region.shape[region.q]} k {region.shape[region.k]}", kernel.title, self.formula.text]
        texts += [f"probabilities in {kernel.probabilities or self.dtype}"]
        texts += ["interpreted: slow, for tests"] if self.is_reference and self.name == "splash" else []
        if self.placement and not self.placement.axes and self.placement.mesh.size > 1:
            texts.append("all of it on every device")
        return ", ".join([*texts, *(self.placement.texts(region.q, self.order) if self.placement else [])])

    def __call__(self, values: Sequence[jax.Array]) -> jax.Array:
        place, formula = self.placement, self.formula
        specs = [place.spec(x.labels) if place else PartitionSpec() for x in formula.operands.values()]
        out = place.spec(self.region.out_labels) if place else PartitionSpec()
        if self.name == "cudnn":
            return self._typed(on_devices(place, self._attend, tuple(values), tuple(specs), out))
        heads = self._size(formula.operands["q"], *formula.heads, *formula.groups)
        length = self.region.shape[self.region.q]
        kernel = splash_kernel(length, formula.band, heads, self._parts, self.is_reference, formula.cap, self.chunks)
        of_kernel: object = jax.tree.map(lambda x: PartitionSpec(), kernel)
        if place is not None:
            names = place.axes.get(self.region.q, ())
            sharding = NamedSharding(place.mesh, PartitionSpec(None, names or None))
            of_kernel = kernel.manual_sharding_spec(sharding)
        return self._typed(on_devices(place, self._attend_splash, (kernel, *values), (of_kernel, *specs), out))

    def _typed(self, x: jax.Array) -> jax.Array:
        return with_type_of(self.placement, self.region.out, x.astype(self.region.out.aval.dtype))

    # On one device

    def _attend(self, *values: jax.Array) -> jax.Array:
        formula, given = self.formula, self._arranged(values)
        lengths = jnp.maximum(given["k_pad"].sum(1, dtype=jnp.int32), 1) if formula.padding else None
        q, k, v = (given[x] for x in "qkv")
        out = cudnn_attention(q, k, v, lengths, band=formula.band, scale=formula.scale, is_reference=self.is_reference)
        return self._as_written(self._without_keys(out, given))

    def _attend_splash(self, kernel: PyTree, *values: jax.Array) -> jax.Array:
        q, moved = self.region.q, list[jax.Array]()
        for x, operand in zip(values, self.formula.operands.values(), strict=True):
            is_split = self.chunks and q in operand.labels
            moved.append(self._exchanged(after(x, moved), operand.labels) if is_split else x)
        given = self._arranged(moved)
        q_BSHC = given["q"]
        q_BSHC = (q_BSHC.astype(jnp.float32) * self.formula.scale).astype(q_BSHC.dtype)  # the scale is not rounded
        sinks_H = given["sink"].astype(jnp.float32) if "sink" in given else None
        out = splash_attention(kernel, q_BSHC, given["k"], given["v"], *_segments(given), sinks_H=sinks_H)
        out = self._as_written(self._without_keys(out, given))
        return self._exchanged(out, self.region.out_labels, back=True) if self.chunks else out

    def _exchanged(self, x: jax.Array, labels: Labels, *, back: bool = False) -> jax.Array:
        assert self.placement is not None
        names = self.placement.axes[self.region.q]
        return exchange(x, labels.index(self.region.q), names, self._parts, back=back)

    def _arranged(self, values: Sequence[jax.Array]) -> dict[str, jax.Array]:
        """Queries, keys and values as (B, S, heads, C), ids and padding as (B, S), sinks as (heads,)."""
        formula = self.formula
        every = [*formula.heads, *formula.groups]
        arranged: dict[str, jax.Array] = {}
        for (name, operand), x in zip(formula.operands.items(), values, strict=True):
            dims = [[*formula.rows], [formula.at[0 if name[0] == "q" else 1]]]
            if name in ("q", "k", "v"):
                dims += [every if name == "q" else [*formula.heads], [FEATURE]]
            arranged[name] = _grouped(x, operand.roles, [every] if name == "sink" else dims)
            if name in formula.seen and (x.dtype != bool or not formula.seen[name]):
                arranged[name] = arranged[name] == formula.seen[name]
        return arranged

    def _without_keys(self, out_BSHC: jax.Array, given: Mapping[str, jax.Array]) -> jax.Array:
        """`out_BSHC`, where a query sees no key with the equal weights of all keys that it has as written."""
        if (low := self.formula.low) is None:
            return out_BSHC
        seen_BS = given.get("q_pad", jnp.ones(out_BSHC.shape[:2], bool))
        if "q_ids" in given:  # a query that sees a key sees the one at its position
            seen_BS &= given["k_pad"][:, self._positions]
        elif "k_pad" in given:
            seen_BS &= sees_keys(given["k_pad"], self._positions, self.formula.band)
        mean_BKC = given["v"].astype(jnp.float32).mean(1)
        if low == -math.inf:  # whose softmax, and gradients, are not numbers
            mean_BKC *= jnp.where(seen_BS.all(1), 1.0, jnp.nan)[:, None, None]
        mean_BHC = jnp.repeat(mean_BKC, out_BSHC.shape[2] // mean_BKC.shape[1], 1).astype(out_BSHC.dtype)
        return jnp.where(seen_BS[..., None, None], out_BSHC, mean_BHC[:, None])

    @property
    def _positions(self) -> jax.Array:
        """Of the queries of this device."""
        length, parts = self.region.shape[self.region.q], self._parts
        if self.placement is None or parts == 1:
            return jnp.arange(length)
        rows = jnp.asarray(rows_of(length, self.chunks or tuple(range(2 * parts))))
        return rows[jax.lax.axis_index(self.placement.axes[self.region.q])]

    def _as_written(self, out: jax.Array) -> jax.Array:
        formula = self.formula
        sizes: dict[Role, int] = {
            role: self._size(operand, role)
            for operand in (formula.operands["q"], formula.operands["v"])
            for role in operand.roles
        }
        dims = [*formula.rows, formula.at[0], *formula.heads, *formula.groups, FEATURE]
        out = out.reshape([sizes[role] for role in dims])
        out = out.transpose([dims.index(role) for role in formula.out if role is not None])
        return out.reshape([1 if role is None else sizes[role] for role in formula.out])


def _grouped(x: jax.Array, roles: Sequence[Role], dims: Sequence[Sequence[int]]) -> jax.Array:
    """`x` with one dim for each of `dims`, which are the roles that it consists of."""
    x = x.reshape([size for size, role in zip(x.shape, roles, strict=True) if role is not None])
    present = [role for role in roles if role is not None]
    x = x.transpose([present.index(role) for each in dims for role in each])
    sizes = iter(x.shape)
    return x.reshape([math.prod(next(sizes) for _ in each) for each in dims])


def _segments(given: Mapping[str, jax.Array]) -> list[jax.Array]:
    """Ids of queries and of keys, (B, S), which are equal for the keys that a query sees."""
    if not {"q_ids", "k_pad", "q_pad"} & {*given}:
        return []
    shapes = {side: given[side].shape[:2] for side in "qk"}
    ids = {side: given.get(f"{side}_ids", jnp.ones(shapes[side])).astype(jnp.int32) for side in "qk"}
    for number, side in enumerate("kq"):  # what is left out has an id that nothing else has
        if f"{side}_pad" in given:
            ids[side] = jnp.where(given[f"{side}_pad"], ids[side], _unused(given.get("k_ids"), number))
    return [ids["q"], ids["k"]]


def _unused(ids_BS: jax.Array | None, number: int) -> jax.Array | int:
    """(B, 1): the first or the second number from 0 on that is no id of a row. Without `ids_BS` all ids are 1."""
    if ids_BS is None:
        return -1 - number
    count = ids_BS.shape[1] + 2

    def of_row(ids_S: jax.Array) -> jax.Array:
        at = jnp.where((ids_S >= 0) & (ids_S < count), ids_S, count)
        used = jnp.zeros(count, bool).at[at].set(True, mode="drop")
        first = jnp.argmin(used)
        return jnp.argmin(used.at[first].set(True)) if number else first

    return jax.vmap(of_row)(ids_BS).astype(jnp.int32)[:, None]
