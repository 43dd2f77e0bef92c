"""Kernels of attention: which of them fit a call, which one `auto` chooses, and splash attention on TPUs.

Shape letters: B batch, S sequence, H query heads, K key-value heads, C head dim.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from flax_mesh.axes import Mode, PartitionAxis, as_tuple
from flax_mesh.hardware import LANES
from flax_mesh.kernels import KERNELS, OF_PLATFORM, Kernel, platform_of, splash_attention, splash_kernel
from flax_mesh.mesh.context import current_mesh
from flax_mesh.text import axes_text, listed

_OLDER_HEAD_DIM = 128  # the most before Hopper GPUs, and the limit of `auto`
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
    if call.platform not in OF_PLATFORM:
        return "xla", f"the devices are {DEVICES.get(call.platform, 'not known')}"
    kernel = OF_PLATFORM[call.platform]
    reasons = misfits(kernel, call)
    if not reasons and kernel == "cudnn" and call.head_dim > _OLDER_HEAD_DIM:
        need = f"a Hopper GPU for a head dim above {_OLDER_HEAD_DIM} (then set it)"
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
    texts = [f"{name} on {DEVICES[platform]}" for platform, name in OF_PLATFORM.items()]
    for index, platform in enumerate(OF_PLATFORM):
        kernel, reason = choose(replace(call, platform=platform))
        if kernel == "xla":
            texts[index] = f"xla on {DEVICES[platform]}, because {reason}"
    return f"attention: {'; '.join(texts)}; xla on others {setting}"


def _cudnn(call: Call) -> list[_Misfit]:
    kernel, other = KERNELS["cudnn"], "use model.attention=xla"
    rows = _of_dtype(kernel, call)
    if call.head_dim % kernel.head_dim_step or call.head_dim > kernel.head_dim_most:
        needs = f"a model.head_dim that is a multiple of {kernel.head_dim_step}, at most {kernel.head_dim_most}"
        rows.append(_Misfit(needs, str(call.head_dim)))
    if call.platform not in ("", "gpu"):
        rows.append(_Misfit("GPUs", call.platform, other))
    if call.split("query_sequence"):
        where = f"sequences split over {call.split_text('query_sequence')}"
        rows.append(_Misfit("complete sequences", where, f"{other}, or another mesh.shape"))
    if call.has_segments:
        rows.append(_Misfit("batches without segment_ids", "some", f"{other} or splash"))
    return rows


def _of_dtype(kernel: Kernel, call: Call) -> list[_Misfit]:
    fits = call.dtype in kernel.dtypes
    return [] if fits else [_Misfit(f"model.dtype {' or '.join(kernel.dtypes)}", call.dtype)]


def _splash(call: Call) -> list[_Misfit]:
    rows, other = _of_dtype(KERNELS["splash"], call), "use model.attention=xla"
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


def split_splash_attention(
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
    band = (window - 1 if window else None, 0)
    if mesh is None or not manual:
        kernel = splash_kernel(size[1], band, size[2], 1, interpret)
        return splash_attention(kernel, q_BSHC, k_BSKC, v_BSKC, *segments)
    resolved = axes.resolve(("batch", "query_sequence", "heads"), mode)
    rows, queries, heads = (tuple(axis for axis in as_tuple(entry) if axis in manual) for entry in resolved)
    rest = tuple(axis for axis in manual if axis not in rows + queries + heads and mesh.shape[axis] > 1)
    if size[0] % _ways(mesh, rows + rest) == 0:
        rows += rest
    kernel = splash_kernel(size[1], band, size[2] // _ways(mesh, heads), _ways(mesh, queries), interpret)
    of_kernel = kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, queries or None)))
    of_queries, of_keys = PartitionSpec(rows, queries, heads), PartitionSpec(rows, None, heads)
    of_segments = (PartitionSpec(rows, queries), PartitionSpec(rows))[: len(segments)]
    return jax.shard_map(
        splash_attention,
        mesh=mesh,
        in_specs=(of_kernel, of_queries, of_keys, of_keys, *of_segments),
        out_specs=of_queries,
        axis_names=set(manual),
        check_vma=False,  # the kernel does not state over which axes its results vary
    )(kernel, q_BSHC, k_BSKC, v_BSKC, *segments)
