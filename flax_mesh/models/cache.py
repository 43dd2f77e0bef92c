"""The keys and values of all tokens so far, which attention reads instead of computing them again for every token.

Shape letters: L layers, B batch, P slots of the prompt, T slots, K key-value heads, H heads, C head dim.

    slots 0 .. P-1   the prompt, and padding after a shorter one, which no query reads
    slots P .. T-1   the generated tokens: token i of every row is in slot P + i

A row whose prompt has ended can take another prompt, whose token i is in slot P + i too. The number of slots is fixed:
FLOPs and bytes of a step do not depend on the number of tokens so far.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from flax_mesh.axes import Mode, PartitionAxis, num_parts
from flax_mesh.mesh.context import current_mesh
from flax_mesh.models.settings.pattern import LayerKind
from flax_mesh.sharding.constrain import constrain
from flax_mesh.sharding.explicit import on_auto_axes
from flax_mesh.tree import PyTree

STATE_DIMS = ("batch", "heads", None, None)
_SMALLEST_BUCKET = 16  # slots of a prompt
_Pair = tuple[jax.Array, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys, after the rotation, and values of a batch; in latent attention rotated keys of all heads, and latents.

    Attributes:
        keys: One array (B, K, C, T) for each layer, or one array (L, B, K, C, T) for each scanned stack of layers.
        values: As `keys`.
        lengths_B: Number of tokens in the prompt of each row, int32.
        prompt: P, the slot of the first generated token, int32.
        used_B: Slot of the next token of each row: P plus the generated tokens that the model has read, int32.
        states: Two arrays (B, H, ...) for each layer, or (L, B, H, ...) for each stack, whose size does not depend on
            the number of tokens: of delta nets, which are not among the layers of `keys` and `values`.
    """

    keys: PyTree
    values: PyTree
    lengths_B: jax.Array
    prompt: jax.Array
    used_B: jax.Array
    states: PyTree = ()

    def pairs(self, kinds: Sequence[LayerKind]) -> list[_Pair]:
        """Keys and values, or states, of layers of these kinds in their order; `by_kind` is the inverse."""
        attention, states = zip(self.keys, self.values, strict=True), iter(self.states)
        return [next(states if kind.delta else attention) for kind in kinds]

    @property
    def used(self) -> jax.Array:
        """Slot of the next token of the longest continuation."""
        return jnp.max(self.used_B)

    @property
    def num_slots(self) -> int:
        return jax.tree.leaves(self.keys)[0].shape[-1]

    @property
    def positions_B(self) -> jax.Array:
        """Position of the next token of each row: the number of tokens before it."""
        return self.lengths_B + self.used_B - self.prompt

    def mask_BT(self, num_slots: int, window: int) -> jax.Array:
        """Which slots the next token attends to, including itself; `window` limits the number of positions."""
        slots_T = jnp.arange(num_slots)
        is_prompt_BT = slots_T < self.lengths_B[:, None]
        is_read_BT = is_prompt_BT | ((slots_T >= self.prompt) & (slots_T <= self.used_B[:, None]))
        if not window:
            return is_read_BT
        positions_BT = jnp.where(is_prompt_BT, slots_T, self.lengths_B[:, None] + slots_T - self.prompt)
        return is_read_BT & (self.positions_B[:, None] - positions_BT < window)

    def with_rows(self, other: "KVCache", rows_R: jax.Array, axes: PartitionAxis) -> "KVCache":
        """This cache with the rows of `other`, which has as many slots, in `rows_R`; a row B is none."""
        stack = ("layers",) * (jax.tree.leaves(self.keys)[0].ndim - 4)
        dims = (*stack, *cache_dims(axes, jax.tree.leaves(self.keys)[0].shape[-3]))
        each = (dims, dims, (*stack, *STATE_DIMS))

        def put(rows_R: jax.Array, old: PyTree, new: PyTree, used: list[jax.Array]) -> tuple[PyTree, ...]:
            at = (*[slice(None)] * len(stack), rows_R)
            lengths_B, lengths_R, used_B, used_R = used
            counts = lengths_B.at[rows_R].set(lengths_R, mode="drop"), used_B.at[rows_R].set(used_R, mode="drop")
            arrays = []
            for dims, before, after in zip(each, old, new, strict=True):
                write = lambda x, y, dims=dims: constrain(x.at[at].set(y, mode="drop"), dims, axes=axes, mode="decode")  # noqa: E731
                arrays.append(jax.tree.map(write, before, after))
            return *arrays, *counts

        used = [self.lengths_B, other.lengths_B, self.used_B, other.used_B]
        arrays = rows_R, *((x.keys, x.values, x.states) for x in (self, other)), used
        keys, values, states, lengths_B, used_B = on_auto_axes(
            put, *arrays, out=[*each, (), ()], axes=axes, mode="decode"
        )
        return KVCache(keys, values, lengths_B, self.prompt, used_B, states)


def by_kind(pairs: Sequence[_Pair], kinds: Sequence[LayerKind]) -> tuple[PyTree, PyTree, PyTree]:
    """The lists `keys`, `values` and `states` of a cache, from pairs of arrays of layers of these kinds."""
    attention = [pair for pair, kind in zip(pairs, kinds, strict=True) if not kind.delta]
    states = [pair for pair, kind in zip(pairs, kinds, strict=True) if kind.delta]
    return [keys for keys, _ in attention], [values for _, values in attention], states


def kv_axis(axes: PartitionAxis) -> str:
    """The logical axis of the heads of keys and values: copies of replicated heads are split as query heads are."""
    return "kv_heads" if axes.mesh_axes("kv_heads") else "heads"


def cache_dims(axes: PartitionAxis, heads: int) -> tuple[str | None, ...]:
    """Of an array with so many heads; a single one, such as the latents of all heads, is not split."""
    return "batch", None if heads == 1 else kv_axis(axes), "head_dim", "key_sequence"


def num_copies(axes: PartitionAxis, mesh: Mesh | AbstractMesh | None, num_kv_heads: int, mode: Mode) -> int:
    """Copies of each replicated key-value head, the fewest that the parts of the query heads divide.

    Then a device has the key-value heads of its query heads and no others. Prefill and decode use one cache.
    """
    if mesh is None or axes.mesh_axes("kv_heads"):
        return 1
    modes: tuple[Mode, ...] = ("train",) if mode == "train" else ("prefill", "decode")
    parts = math.lcm(*(num_parts(axes, mesh.shape, "heads", mode=mode) for mode in modes))
    return parts // math.gcd(parts, num_kv_heads)


def split_heads(x_BSKC: jax.Array, axes: PartitionAxis, mode: Mode) -> jax.Array:
    """Keys or values in the sharding of attention, with copies of replicated heads."""
    copies = num_copies(axes, current_mesh(), x_BSKC.shape[2], mode)
    x_BSKC = jnp.repeat(x_BSKC, copies, axis=2) if copies > 1 else x_BSKC
    return constrain(x_BSKC, ("batch", None, kv_axis(axes), "head_dim"), axes=axes, mode=mode)


def pad_slots(x_BPKC: jax.Array, num_slots: int, axes: PartitionAxis) -> jax.Array:
    """The keys or values (B, K, C, T) of a prompt with slots for `num_slots` tokens, in the sharding of generation."""
    x_BKCP = jnp.transpose(x_BPKC, (0, 2, 3, 1))
    x_BKCT = jnp.pad(x_BKCP, ((0, 0), (0, 0), (0, 0), (0, num_slots - x_BPKC.shape[1])))
    return constrain(x_BKCT, cache_dims(axes, x_BKCT.shape[1]), axes=axes, mode="decode")


def write_slots(
    cache: jax.Array, x_B1KC: jax.Array, slots_B: jax.Array, layer: jax.Array | None, axes: PartitionAxis
) -> jax.Array:
    """`cache` with the keys or values of one token of each row; `layer` is the index in a stack, else None."""
    rows_B, dims = jnp.arange(len(slots_B), dtype=jnp.int32), cache_dims(axes, cache.shape[-3])
    at = (rows_B, slice(None), slice(None), slots_B)
    if layer is not None:
        at, dims = (layer.astype(jnp.int32), *at), ("layers", *dims)
    x_BKC = x_B1KC[:, 0].astype(cache.dtype)
    cache = cache.at[at].set(x_BKC, mode="promise_in_bounds", indices_are_sorted=True, unique_indices=True)
    return constrain(cache, dims, axes=axes, mode="decode")


def read_slots(cache: jax.Array, layer: jax.Array | None) -> jax.Array:
    """The keys or values (B, T, K, C) of one layer."""
    # Without the barrier XLA repeats the write inside the products, which copies the cache.
    cache = jax.lax.optimization_barrier(cache)
    return jnp.transpose(cache if layer is None else cache[layer], (0, 3, 1, 2))


def row_multiple(axes: PartitionAxis, mesh: Mesh | AbstractMesh | None) -> int:
    """The number of rows of a batch must be a multiple of this, so that prefill and decode can split it on `mesh`."""
    sizes = {} if mesh is None else mesh.shape
    return math.lcm(*(num_parts(axes, sizes, "batch", "experts", mode=mode) for mode in ("prefill", "decode")))


def slot_multiple(axes: PartitionAxis, mesh: Mesh | AbstractMesh | None) -> int:
    """Likewise the number of slots of the prompt, and of all slots."""
    sizes = {} if mesh is None else mesh.shape
    of_prompt = num_parts(axes, sizes, "sequence", mode="prefill")
    return math.lcm(of_prompt, num_parts(axes, sizes, "key_sequence", mode="decode"))


def bucket_slots(length: int, unit: int) -> int:
    """P, the slots of prompts of at most this length: a power of two, or the next multiple of `unit`."""
    return round_up(max(_SMALLEST_BUCKET, 1 << (length - 1).bit_length()), unit)


def cache_shape(
    axes: PartitionAxis,
    mesh: Mesh | AbstractMesh | None,
    lengths: Sequence[int],
    *,
    max_tokens: int,
    batch_size: int,
    cache_length: int | None = None,
) -> tuple[int, int]:
    """B and T of the cache for batches of at most `batch_size` prompts of these lengths.

    `cache_length` is the number of tokens of a prompt and its continuation; default: as many as the longest needs.
    """
    rows = round_up(min(batch_size, len(lengths)), row_multiple(axes, mesh))
    unit = slot_multiple(axes, mesh)
    if cache_length is None:
        prompt = bucket_slots(max(lengths, default=1), unit)
    else:
        prompt = round_up(cache_length - max_tokens, unit)
    return rows, round_up(prompt + max_tokens, unit)


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
