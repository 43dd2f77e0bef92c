"""Kernels of attention: which calls each of them computes, and the calls; for the decoder and for traced programs.

Shape letters: B batch, S sequence, H query heads, K key-value heads, C head dim.
"""

# JAX has no types for its devices.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from flax_mesh.hardware import LANES
from flax_mesh.tree import PyTree

BLOCK = 512  # the largest that is used: its scores in float32 are 1 MiB of the chip's vector memory
RESIDUALS = "attention"  # the name, for policies of `jax.checkpoint`, of what the backward pass of an attention reads
# The key at position k of a query at position q: q - left <= k <= q + right; None: no limit.
Band: TypeAlias = tuple[int | None, int | None]
EVERY: Band = (None, None)


class Kernel(NamedTuple):
    """What a kernel can compute."""

    title: str
    platform: str
    dtypes: tuple[str, ...]
    probabilities: str  # their dtype in the product with the values, "" for the dtype of the values
    head_dim_step: int = 1
    head_dim_most: int = 2**31
    length_step: int = 1  # of sequences, on every device
    has_cap: bool = False
    has_segments: bool = False
    has_padding: bool = False  # of any keys; else of those after a length, without a window
    has_sinks: bool = False
    has_right_window: bool = False
    splits_queries: bool = False  # over devices


KERNELS = {
    "splash": Kernel(
        "splash attention",
        "tpu",
        ("bfloat16", "float32"),
        "float32",
        length_step=LANES,
        has_cap=True,
        has_segments=True,
        has_padding=True,
        has_sinks=True,
        has_right_window=True,
        splits_queries=True,
    ),
    # A head dim above 128 needs a Hopper GPU, for which JAX asks when a call is traced.
    "cudnn": Kernel("cuDNN", "gpu", ("bfloat16", "float16"), "", head_dim_step=8, head_dim_most=256),
}
OF_PLATFORM = {kernel.platform: name for name, kernel in KERNELS.items()}  # the kernel of `auto`


class Need(NamedTuple):
    """The properties of an attention that decide which kernels compute it."""

    dtypes: tuple[str, ...]  # of queries, keys and values
    queries: int
    keys: int
    head_dims: tuple[int, int]  # of keys and of values
    band: Band
    cap: float
    has_segments: bool
    parts: int  # devices that the queries are split over
    is_padded: bool = False  # some keys of a row are left out
    has_sink: bool = False


def _count(limit: int | None) -> str:
    return "all" if limit is None else str(limit)


def misfit(name: str, need: Need) -> str:
    """The first reason why a kernel cannot compute an attention, "" if it can."""
    kernel, width = KERNELS[name], need.head_dims[0]
    (left, right), length = need.band, kernel.length_step * need.parts
    rows = {
        f"{' or '.join(kernel.dtypes)}, got {', '.join(dict.fromkeys(need.dtypes))}": len({*need.dtypes}) == 1
        and need.dtypes[0] in kernel.dtypes,
        f"keys and values of one head dim, got {width} and {need.head_dims[1]}": width == need.head_dims[1],
        f"a head dim that is a multiple of {kernel.head_dim_step}, at most {kernel.head_dim_most}, got {width}": (
            width % kernel.head_dim_step == 0 and width <= kernel.head_dim_most
        ),
        "scores without a soft cap": kernel.has_cap or not need.cap,
        "attention within documents to be in blocks": kernel.has_segments or not need.has_segments,
        "padding without a window": kernel.has_padding or not need.is_padded or need.band in (EVERY, (None, 0)),
        "scores without a sink": kernel.has_sinks or not need.has_sink,
        f"a causal window, got {_count(left)} keys before and {_count(right)} after a query": (
            need.band == EVERY or right == 0 or kernel.has_right_window
        ),
        f"as many queries as keys, got {need.queries} and {need.keys}": need.queries == need.keys
        or (need.band == EVERY and kernel.length_step == 1),
        f"sequences that are not split, got {need.parts} parts": kernel.splits_queries or need.parts == 1,
        # JAX's splash attention fails without a block that its mask cuts through.
        f"queries on one device to attend to every key, got {need.parts} parts": need.parts == 1 or need.band != EVERY,
        f"a length that is a multiple of {length}, got {need.queries}": need.queries % length == 0,
    }
    return next((f"{kernel.title} needs {text}" for text, fits in rows.items() if not fits), "")


def platform_of(mesh: Mesh | AbstractMesh | None) -> str:
    """The platform of a mesh, "" if it has no devices; without a mesh, the platform of JAX's default devices."""
    if mesh is None:
        return jax.default_backend()
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0].platform
    return "" if mesh.abstract_device is None else mesh.abstract_device.platform


def gpu_problem() -> str:
    """Why cuDNN cannot compute attention on the GPUs here, "" if it can or if there are none. JAX does not ask."""
    device = jax.local_devices()[0]
    capability = str(getattr(device, "compute_capability", "8.0"))
    if tuple(map(int, capability.split("."))) >= (8, 0):
        return ""
    return f"cuDNN needs a GPU of compute capability 8.0 (Ampere), got {capability}"


def cudnn_attention(
    q_BSHC: jax.Array,
    k_BSKC: jax.Array,
    v_BSKC: jax.Array,
    lengths_B: jax.Array | None,
    *,
    band: Band,
    scale: float,
    is_reference: bool,
) -> jax.Array:
    """Attention to the first keys of each row by cuDNN, or by XLA's implementation of the same function."""
    left, right = band
    return jax.nn.dot_product_attention(
        q_BSHC,
        k_BSKC,
        v_BSKC,
        scale=scale,
        key_value_seq_lengths=lengths_B,
        is_causal=right == 0,
        local_window_size=None if left is None else (left, 0),
        implementation="xla" if is_reference else "cudnn",
    )


def splash_attention(
    kernel: PyTree,
    q_BSHC: jax.Array,
    k_BSKC: jax.Array,
    v_BSKC: jax.Array,
    *segments: jax.Array,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Attention of scaled queries by a `splash_kernel`, on one device."""
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    heads_first = [jnp.swapaxes(x, 1, 2) for x in (q_BSHC, k_BSKC, v_BSKC)]
    of_rows = SegmentIds(*segments) if segments else None
    attend: Callable[..., jax.Array] = jax.vmap(kernel, (0, 0, 0, 0, None))
    return jnp.swapaxes(attend(*heads_first, of_rows, sinks_H), 1, 2)


def sees_keys(keys_BS: jax.Array, positions: jax.Array, band: Band) -> jax.Array:
    """(..., queries): whether any of the keys (..., S) within the `band` around the position of a query is left."""
    length = keys_BS.shape[-1]
    before, after = (length if limit is None else limit for limit in band)
    count = jnp.cumsum(keys_BS, -1, jnp.int32)
    count = jnp.concatenate([jnp.zeros_like(count[..., :1]), count], -1)  # (..., S + 1): of the keys before each
    last, first = (jnp.clip(x, 0, length) for x in (positions + after + 1, positions - before))
    return count[..., last] > count[..., first]


def splash_block(length: int) -> int:
    """The length of blocks of consecutive queries, and of keys."""
    return max(size for size in range(LANES, BLOCK + 1, LANES) if length % size == 0)


def rows_of(length: int, chunks: tuple[int, ...]) -> np.ndarray:
    """(devices, rows): the positions that two of the equal `chunks` of a sequence have, for each device."""
    rows = np.arange(length, dtype=np.int32).reshape(len(chunks), -1)[[*chunks]]
    return rows.reshape(len(chunks) // 2, -1)


@lru_cache(maxsize=64)
def splash_kernel(
    length: int,
    band: Band,
    heads: int,
    parts: int,
    interpret: bool,
    cap: float = 0.0,
    chunks: tuple[int, ...] = (),
) -> PyTree:
    """The kernel for `heads` of one device and one of `parts` of the queries, with the blocks that its mask leaves.

    `chunks` are those of the queries that the parts consist of, if they are not in order, of the same number for each.
    Cached, because finding them takes seconds for long sequences, and every layer has the same ones.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    shape = (length, length)
    if band == EVERY:
        mask = masks.FullMask(shape)
    elif band == (None, 0):
        mask = masks.CausalMask(shape, 0, shard_count=parts)
    else:
        mask = masks.LocalMask(shape, band, 0, shard_count=parts)
    if chunks and not isinstance(mask, masks.FullMask):
        mask.q_sequence = rows_of(length, chunks).reshape(-1)
    block = splash_block(length // (len(chunks) or parts))
    names = ("block_q", "block_kv", "block_kv_compute")
    names += ("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute", "block_q_dq", "block_kv_dq")
    make: Callable[..., PyTree] = library.make_splash_mha
    with jax.ensure_compile_time_eval():
        kernel = make(
            masks.MultiHeadMask([mask] * heads),
            head_shards=1,  # all heads have the same mask
            q_seq_shards=parts,
            block_sizes=library.BlockSizes(**dict.fromkeys(names, block)),
            residual_checkpoint_name=RESIDUALS,
            interpret=interpret,
            attn_logits_soft_cap=cap or None,
        )
    return jax.tree.map(np.asarray, kernel)
