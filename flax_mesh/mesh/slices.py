"""Granules: the slices or processes that the slow network (DCN) joins, and the mesh axes that are cut between them."""

import math
import warnings
from collections.abc import Sequence
from typing import Any

from flax_mesh.hardware import DCN_BANDWIDTH, DEFAULT_DCN, DEFAULT_ICI, ICI_BANDWIDTH
from flax_mesh.mesh.device_mesh import group_by_key, in_jax_order
from flax_mesh.mesh.shape import format_mesh_shape, resolve_dims
from flax_mesh.mesh.torus.torus import read_device
from flax_mesh.text import count_text, plural

# Who crosses the slow network: pipelines send one activation, data parallelism one gradient a step; fsdp gathers every
# weight; experts, sequence and tensor parallelism talk inside every layer. Other names stand between, in mesh order.
DCN_FIRST = ("pp", "dp", "fsdp")
DCN_LAST = ("ep", "sp", "tp")


class SlowNetworkWarning(UserWarning):
    """An axis that talks inside every layer crosses the slow network."""


def find_granules(
    devices: Sequence[Any],
    num_slices: int | None = None,
    *,
    source: str = "num_slices",
    dcn_mesh_dims: Sequence[int] | None = None,
    sort: bool = True,
) -> tuple[list[list[Any]], str]:
    """The devices by granule, and what a granule is: "slice" or "process".

    `num_slices` (given by `source`) takes precedence; then the slice indices of the devices. One slice of several
    processes is one granule where a fast network is known to join them: the torus of a TPU, a slice index that GPUs
    share. Elsewhere, or where `dcn_mesh_dims` multiplies to the number of processes, each process is a granule.
    """
    if num_slices is not None and (isinstance(num_slices, bool) or not isinstance(num_slices, int)):
        raise ValueError(f"{source} must be an integer, got {num_slices!r}.")
    slices = [getattr(device, "slice_index", None) for device in devices]
    processes = [device.process_index for device in devices]
    known = None not in slices
    if num_slices is not None and not (known and len(set(slices)) == num_slices):
        return _equal_runs(devices, num_slices, source), "slice"
    if known and len(set(slices)) > 1:
        return group_by_key(devices, slices, sort=sort), "slice"
    num_processes = len(set(processes))
    joined = devices[0].platform == "tpu" or (known and devices[0].platform == "gpu") or num_slices == 1
    asked = _product(dcn_mesh_dims) == num_processes
    if num_processes > 1 and (asked or not joined):
        return group_by_key(devices, processes, sort=sort), "process"
    return [list(devices)], "slice" if joined or known else "process"


def resolve_dcn_dims(
    dims: Sequence[int],
    names: Sequence[str],
    num_granules: int,
    granule: str,
    *,
    dcn_mesh_dims: Sequence[int] | None = None,
    kind: str = "",
) -> tuple[int, ...]:
    """Into how many granules each axis is cut: `dcn_mesh_dims`, checked, or by preference pp, dp, fsdp, others.

    `dims` are the sizes of the whole mesh. Warns with SlowNetworkWarning where only ep, sp or tp were left to take it.
    """
    mesh = format_mesh_shape(names, dims)
    if dcn_mesh_dims is None:
        cuts = _preferred_cuts(dims, names, num_granules)
        slow = [name for name, cut in zip(names, cuts, strict=True) if cut > 1 and name in DCN_LAST]
        if slow:
            _warn_slow(slow, mesh, format_mesh_shape(names, cuts), num_granules, granule, kind)
        return cuts
    unit = plural(granule, 2)
    advice = f"Its sizes say how many {unit} each axis spans; leave dcn_mesh_dims out to have them chosen."
    cuts = resolve_dims(dcn_mesh_dims, names, num_granules, what="dcn_mesh_dims", unit=unit, advice=advice)
    sizes = zip(names, dims, cuts, strict=True)
    wrong = [f"{name} has size {size}, not divisible by {cut}" for name, size, cut in sizes if size % cut]
    if wrong:
        works = format_mesh_shape(names, _preferred_cuts(dims, names, num_granules))
        raise ValueError(
            f"dcn_mesh_dims {format_mesh_shape(names, cuts)} does not divide the mesh {mesh}: {'; '.join(wrong)}. "
            f"What works: {works}."
        )
    return cuts


def _preferred_cuts(dims: Sequence[int], names: Sequence[str], num_granules: int) -> tuple[int, ...]:
    """The greatest common divisor with what is left, in the order of preference. As in `shape.split_between_hosts` this
    finds a cut wherever one exists, and no axis is used that could be spared."""
    rank = {name: i for i, name in enumerate(DCN_FIRST)} | {name: i + 9 for i, name in enumerate(DCN_LAST)}
    left, cuts = num_granules, [1] * len(dims)
    for axis in sorted(range(len(dims)), key=lambda axis: rank.get(names[axis], len(DCN_FIRST))):
        cuts[axis] = math.gcd(left, dims[axis])
        left //= cuts[axis]
    if left > 1:
        raise ValueError(
            f"Mesh {format_mesh_shape(names, dims)} cannot be cut into {num_granules} equal parts: {left} is left "
            f"over. Its sizes must multiply to a multiple of {num_granules}."
        )
    return tuple(cuts)


def _product(dims: Sequence[int] | None) -> int | None:
    return math.prod(dims) if dims is not None and all(isinstance(size, int) for size in dims) else None


def _equal_runs(devices: Sequence[Any], num_slices: int, source: str) -> list[list[Any]]:
    """`num_slices` runs of devices, whole slices and processes each, where the devices do not say it themselves."""
    if num_slices < 1 or len(devices) % num_slices:
        raise ValueError(
            f"{source}={num_slices} must be a positive divisor of the number of devices, {len(devices)}. "
            f"What works: {', '.join(str(n) for n in range(1, len(devices) + 1) if len(devices) % n == 0)}."
        )
    size = len(devices) // num_slices
    ordered = sorted(in_jax_order(devices), key=lambda device: read_device(device).slice or 0)
    runs = [ordered[start : start + size] for start in range(0, len(devices), size)]
    for what in ("slice", "process"):
        owners = [{getattr(read_device(device), what) for device in run} for run in runs]
        several = len(set().union(*owners)) > 1
        cut = sorted({key for i, own in enumerate(owners) for other in owners[:i] for key in own & other}, key=str)
        if several and cut:
            raise ValueError(
                f"{source}={num_slices} makes slices of {size} devices, which cuts {what} {', '.join(map(str, cut))} "
                f"in two. Each slice must hold whole {plural(what, 2)}."
            )
    return runs


def _warn_slow(slow: list[str], mesh: str, cuts: str, num_granules: int, granule: str, kind: str) -> None:
    cost = "a network that is often 10 to 50 times slower than the links inside"
    if kind in ICI_BANDWIDTH:
        ici, dcn = ICI_BANDWIDTH.get(kind, DEFAULT_ICI), DCN_BANDWIDTH.get(kind, DEFAULT_DCN)
        speeds = f"{dcn / 1e9:g} GB/s per chip instead of {ici / 1e9:g} GB/s per link and direction"
        cost = f"{speeds}, {ici / dcn:.0f} times slower or more"
    warnings.warn(
        f"Mesh {mesh} over {count_text(num_granules, granule)} is cut as {cuts}: "
        f"{', '.join(slow)} crosses the slow network inside every layer, at {cost}. Give pp, dp or fsdp a size "
        f"that takes the {num_granules}, or pass dcn_mesh_dims to say that it is meant.",
        SlowNetworkWarning,
        stacklevel=5,  # the call of create_mesh
    )
