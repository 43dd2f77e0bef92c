"""Kernels of attention: which of them fit a call, which one `auto` chooses, and splash attention on TPUs.

Shape letters: B batch, S sequence, H query heads, K key-value heads, C head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from flax_mesh.axes import Mode, PartitionAxis, as_tuple
from flax_mesh.hardware import LANES
from flax_mesh.mesh.context import current_mesh
from flax_mesh.text import axes_text, listed
from flax_mesh.tree import PyTree

_CUDNN_HEAD_DIM = 256  # the most since Hopper; 128 before, the limit of `auto`
BLOCK = 512  # the largest that is used: its scores in float32 are 1 MiB of the chip's vector memory
RESIDUALS = "attention"  # the name, for `models.settings.remat`, of the residuals of splash attention
_BEST = {"tpu": "splash", "gpu": "cudnn"}  # platform -> the kernel of `auto`
_INTERPRETED = ("splash", "cpu")
DEVICES = {"tpu": "TPUs", "gpu": "GPUs", "cpu": "CPUs"}


@dataclass(frozen=True)
class Call:
    """The properties that decide which kernels can compute an attention. Unknown: `platform` "", a length None."""

    dtype: str
    head_dim: int
    axes: PartitionAxis
    mesh: Mesh | AbstractMesh | None = None
    platform: str = ""
    queries: int | None = None
    keys: int | None = None
    has_segments: bool = False
    mode: Mode = "train"
    scores: tuple[str, ...] = ()  # settings that change the scores, which a kernel does not store

    def split(self, logical: str) -> tuple[str, ...]:
        """The mesh axes that split a dim into more than one part."""
        sizes = {} if self.mesh is None else self.mesh.shape
        return tuple(axis for axis in self.axes.mesh_axes(logical, self.mode) if sizes.get(axis, 1) > 1)

    def split_text(self, *logical: str) -> str:
        assert self.mesh is not None
        return axes_text(self.mesh.shape, dict.fromkeys(axis for name in logical for axis in self.split(name)))


class _Misfit(NamedTuple):
    needs: str
    got: str
    repair: str = ""

    def __str__(self) -> str:
        return f"needs {self.needs}, got {self.got}"


def misfits(kernel: str, call: Call) -> list[_Misfit]:
    """Why a kernel cannot compute a call. Unknown properties fit."""
    if kernel == "xla":
        return []
    needs = "scores without caps and sinks"
    general = [_Misfit(needs, f"model.{name}", "use model.attention=xla") for name in call.scores]
    return general + {"cudnn": _cudnn, "splash": _splash}[kernel](call)


def problem_lines(kernel: str, call: Call) -> list[str]:
    """`misfits` as lines of an error."""
    rows = misfits(kernel, call)
    return [f"model.attention={kernel} {misfit}" + (f"; {misfit.repair}" if misfit.repair else "") for misfit in rows]


def choose(call: Call) -> tuple[str, str]:
    """(kernel, reason): the kernel of `model.attention=auto`."""
    if call.platform not in _BEST:
        return "xla", f"the devices are {DEVICES.get(call.platform, 'not known')}"
    kernel = _BEST[call.platform]
    reasons = misfits(kernel, call)
    if not reasons and kernel == "cudnn" and call.head_dim > _CUDNN_HEAD_DIM // 2:
        need = f"a Hopper GPU for a head dim above {_CUDNN_HEAD_DIM // 2} (then set it)"
        reasons = [_Misfit(need, str(call.head_dim))]
    if reasons:
        return "xla", f"{kernel} {reasons[0]}"
    return kernel, f"the devices are {DEVICES[call.platform]}"


def choice_text(attention: str, call: Call) -> str:
    """The kernel of `model.attention` and the reason, for a line of a run's output; "" if there is nothing to say."""
    if attention == "xla":
        return ""
    setting = f"(model.attention={attention})"
    if attention != "auto":
        interpreted = ", interpreted on CPUs: slow, for tests" if (attention, call.platform) == _INTERPRETED else ""
        return f"attention: {attention} {setting}{interpreted}"
    if call.platform:
        kernel, reason = choose(call)
        but = ", xla for batches with segment_ids" if kernel == "cudnn" else ""
        return f"attention: {kernel}{but}, because {reason} {setting}"
    texts = [f"{name} on {DEVICES[platform]}" for platform, name in _BEST.items()]
    for index, platform in enumerate(_BEST):
        kernel, reason = choose(replace(call, platform=platform))
        if kernel == "xla":
            texts[index] = f"xla on {DEVICES[platform]}, because {reason}"
    return f"attention: {'; '.join(texts)}; xla on others {setting}"


def platform_of(mesh: Mesh | AbstractMesh | None) -> str:
    """The platform of a mesh, "" if it has no devices; without a mesh, the platform of JAX's default devices."""
    if mesh is None:
        return jax.default_backend()
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0].platform
    return "" if mesh.abstract_device is None else mesh.abstract_device.platform


def _cudnn(call: Call) -> list[_Misfit]:
    rows, other = [], "use model.attention=xla"
    if call.dtype == "float32":
        rows.append(_Misfit("model.dtype bfloat16 or float16", call.dtype))
    if call.head_dim % 8 or call.head_dim > _CUDNN_HEAD_DIM:
        needs = f"a model.head_dim that is a multiple of 8, at most {_CUDNN_HEAD_DIM}"
        rows.append(_Misfit(needs, str(call.head_dim)))
    if call.platform not in ("", "gpu"):
        rows.append(_Misfit("GPUs", call.platform, other))
    if call.split("query_sequence"):
        where = f"sequences split over {call.split_text('query_sequence')}"
        rows.append(_Misfit("complete sequences", where, f"{other}, or another mesh.shape"))
    if call.has_segments:
        rows.append(_Misfit("batches without segment_ids", "some", f"{other} or splash"))
    return rows


def _splash(call: Call) -> list[_Misfit]:
    rows, other = [], "use model.attention=xla"
    if call.dtype == "float16":
        rows.append(_Misfit("model.dtype bfloat16 or float32", call.dtype))
    if call.platform not in ("", "tpu", "cpu"):
        rows.append(_Misfit("TPUs, or CPUs for tests", call.platform, other))
    if call.split("head_dim"):
        rows.append(_Misfit("head dims that are not split", call.split_text("head_dim"), other))
    if call.split("kv_heads") not in ((), call.split("heads")):  # replicated heads are copied (`cache.num_copies`)
        where = f"heads {listed(call.split('heads')) or 'none'} and kv_heads {listed(call.split('kv_heads')) or 'none'}"
        rows.append(_Misfit("heads and kv_heads split over the same mesh axes", where, other))
    if call.queries is not None and call.queries != (call.keys or call.queries):
        rows.append(_Misfit("as many queries as keys", f"{call.queries} and {call.keys}", other))
    elif call.queries is not None:
        parts = 1 if call.mesh is None else _ways(call.mesh, call.split("query_sequence"))
        if call.queries % (LANES * parts):
            over = f" ({LANES} * {call.split_text('query_sequence')})" if parts > 1 else ""
            needs = f"a sequence length that is a multiple of {LANES * parts}{over}"
            rows.append(_Misfit(needs, str(call.queries), f"{other}, or such a sequence length"))
    return rows


def _ways(mesh: Mesh | AbstractMesh, axes: tuple[str, ...]) -> int:
    return int(np.prod([mesh.shape[axis] for axis in axes], dtype=int))


# Splash attention


def splash_attention(
    q_BSHC: jax.Array,
    k_BSKC: jax.Array,
    v_BSKC: jax.Array,
    segment_ids_BS: jax.Array | None,
    *,
    window: int,
    axes: PartitionAxis,
    mode: Mode,
    scale: float | None = None,
) -> jax.Array:
    """Causal attention by JAX's Pallas kernel for TPUs, on every device for its rows, heads and queries.

    Every device has all keys of its rows and heads. On CPUs the kernel is interpreted. XLA cannot split a kernel, so
    all axes of the mesh are manual in it; axes that split neither rows nor heads nor queries split the rows as well if
    they can, so that their devices do not compute the same.
    """
    mesh = current_mesh()
    interpret, size = platform_of(mesh) == "cpu", q_BSHC.shape
    q_BSHC = q_BSHC * jnp.asarray(size[-1] ** -0.5 if scale is None else scale, q_BSHC.dtype)
    segments = () if segment_ids_BS is None else (segment_ids_BS.astype(jnp.int32),) * 2
    types = {} if mesh is None else dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    # Those that are not Manual already, in a shard_map around the model.
    manual = tuple(axis for axis, kind in types.items() if kind != AxisType.Manual)
    if mesh is None or not manual:
        return _attend_on_device(_kernel(size[1], window, size[2], 1, interpret), q_BSHC, k_BSKC, v_BSKC, *segments)
    resolved = axes.resolve(("batch", "query_sequence", "heads"), mode)
    rows, queries, heads = (tuple(axis for axis in as_tuple(entry) if axis in manual) for entry in resolved)
    rest = tuple(axis for axis in manual if axis not in rows + queries + heads and mesh.shape[axis] > 1)
    if size[0] % _ways(mesh, rows + rest) == 0:
        rows += rest
    kernel = _kernel(size[1], window, size[2] // _ways(mesh, heads), _ways(mesh, queries), interpret)
    of_kernel = kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, queries or None)))
    of_queries, of_keys = PartitionSpec(rows, queries, heads), PartitionSpec(rows, None, heads)
    of_segments = (PartitionSpec(rows, queries), PartitionSpec(rows))[: len(segments)]
    return jax.shard_map(
        _attend_on_device,
        mesh=mesh,
        in_specs=(of_kernel, of_queries, of_keys, of_keys, *of_segments),
        out_specs=of_queries,
        axis_names=set(manual),
        check_vma=False,  # the kernel does not state over which axes its results vary
    )(kernel, q_BSHC, k_BSKC, v_BSKC, *segments)


def _attend_on_device(kernel: PyTree, q_BSHC: jax.Array, k_BSKC: jax.Array, v_BSKC: jax.Array, *segments) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    heads_first = [jnp.swapaxes(x, 1, 2) for x in (q_BSHC, k_BSKC, v_BSKC)]
    of_rows = [SegmentIds(*segments)] if segments else []
    return jnp.swapaxes(jax.vmap(kernel)(*heads_first, *of_rows), 1, 2)


@lru_cache(maxsize=32)
def _kernel(length: int, window: int, heads: int, parts: int, interpret: bool) -> PyTree:
    """The kernel of one row: a pytree of NumPy arrays that say which blocks of keys each block of queries reads.

    Cached, because finding them takes seconds for long sequences, and every layer has the same ones.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    shape = (length, length)
    if window:
        mask = masks.LocalMask(shape, (window - 1, 0), 0, shard_count=parts)
    else:
        mask = masks.CausalMask(shape, 0, shard_count=parts)
    block = max(size for size in range(LANES, BLOCK + 1, LANES) if (length // parts) % size == 0)
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
        )
    return jax.tree.map(np.asarray, kernel)
