"""Granules: the slices or processes that the slow network (DCN) connects, and how mesh axes are split over them."""

import math
import warnings
from collections.abc import Sequence
from typing import cast

from flax_mesh.hardware import chip_of
from flax_mesh.mesh.device_mesh import group_by_key, in_jax_order
from flax_mesh.mesh.shape import format_mesh_shape, resolve_dims
from flax_mesh.mesh.torus.torus import DeviceLike, slice_of
from flax_mesh.text import count_text, plural

# Axes to split over DCN, least traffic first: pipelines transfer one activation per microbatch, data parallelism one
# gradient per step, fsdp gathers every weight; expert, sequence and tensor parallelism communicate inside every layer.
# Axes with other names come between the two lists, in mesh order.
_DCN_FIRST = ("pp", "dp", "fsdp")
_DCN_LAST = ("ep", "sp", "tp")


class SlowNetworkWarning(UserWarning):
    """An axis that communicates inside every layer is split over the slow network."""


def find_granules(
    devices: Sequence[DeviceLike],
    num_slices: int | None = None,
    *,
    source: str = "num_slices",
    dcn_mesh_dims: Sequence[int] | None = None,
    sort: bool = True,
) -> tuple[list[list[DeviceLike]], str]:
    """The devices of each granule, and the kind of granule: "slice" or "process".

    `num_slices` (set by `source`) takes precedence over the slice indices of the devices. A slice of several processes
    is one granule if a fast network is known to connect them: the torus of a TPU, or a slice index shared by GPUs.
    Otherwise, or if the product of `dcn_mesh_dims` is the number of processes, each process is a granule.
    """
    slices = [slice_of(device) for device in devices]
    processes = [device.process_index for device in devices]
    has_slices = None not in slices
    if num_slices is not None and not (has_slices and len(set(slices)) == num_slices):
        return _equal_runs(devices, num_slices, source), "slice"
    if has_slices and len(set(slices)) > 1:
        return group_by_key(devices, slices, sort=sort), "slice"
    num_processes = len(set(processes))
    connected = devices[0].platform == "tpu" or (has_slices and devices[0].platform == "gpu") or num_slices == 1
    by_process = _product(dcn_mesh_dims) == num_processes
    if num_processes > 1 and (by_process or not connected):
        return group_by_key(devices, processes, sort=sort), "process"
    return [list(devices)], "slice" if connected or has_slices else "process"


def resolve_dcn_dims(
    dims: Sequence[int],
    names: Sequence[str],
    num_granules: int,
    granule: str,
    *,
    dcn_mesh_dims: Sequence[int] | None = None,
    kind: str = "",
) -> tuple[int, ...]:
    """The number of granules that each axis spans: `dcn_mesh_dims`, validated, or chosen in the order of _DCN_FIRST.

    `dims` are the sizes of the entire mesh. Warns with SlowNetworkWarning if ep, sp or tp had to be split.
    """
    mesh = format_mesh_shape(names, dims)
    if dcn_mesh_dims is None:
        splits = preferred_splits(dims, names, num_granules)
        slow = [name for name, split in zip(names, splits, strict=True) if split > 1 and name in _DCN_LAST]
        if slow:
            _warn_slow(slow, mesh, format_mesh_shape(names, splits), num_granules, granule, kind)
        return splits
    unit = plural(granule, 2)
    advice = f"Each size is the number of {unit} that the axis spans; omit dcn_mesh_dims to choose them automatically."
    splits = resolve_dims(dcn_mesh_dims, names, num_granules, what="dcn_mesh_dims", unit=unit, advice=advice)
    sizes = zip(names, dims, splits, strict=True)
    wrong = [f"{name} has size {size}, not divisible by {split}" for name, size, split in sizes if size % split]
    if wrong:
        valid = format_mesh_shape(names, preferred_splits(dims, names, num_granules))
        raise ValueError(
            f"dcn_mesh_dims {format_mesh_shape(names, splits)} must divide the mesh {mesh}, but {'; '.join(wrong)}. "
            f"A valid choice is {valid}."
        )
    return splits


def preferred_splits(dims: Sequence[int], names: Sequence[str], num_granules: int) -> tuple[int, ...]:
    """Takes gcd(remaining granules, size) from each axis in order of preference. As in `shape.split_between_hosts` this
    finds a split whenever one exists, and splits a later axis only if the earlier ones are not sufficient."""
    rank = {name: i for i, name in enumerate(_DCN_FIRST)} | {name: i + 9 for i, name in enumerate(_DCN_LAST)}
    left, splits = num_granules, [1] * len(dims)
    for axis in sorted(range(len(dims)), key=lambda axis: rank.get(names[axis], len(_DCN_FIRST))):
        splits[axis] = math.gcd(left, dims[axis])
        left //= splits[axis]
    if left > 1:
        raise ValueError(
            f"Mesh {format_mesh_shape(names, dims)} cannot be split into {num_granules} equal parts: a factor of "
            f"{left} remains. The product of its sizes must be a multiple of {num_granules}."
        )
    return tuple(splits)


def _product(dims: object) -> int | None:
    sizes = cast("Sequence[object]", dims) if isinstance(dims, Sequence) else (None,)
    integers = [size for size in sizes if isinstance(size, int)]
    return math.prod(integers) if len(integers) == len(sizes) else None


def _equal_runs(devices: Sequence[DeviceLike], num_slices: int, source: str) -> list[list[DeviceLike]]:
    """`num_slices` equal groups of consecutive devices; no group may contain only a part of a slice or process."""
    if num_slices < 1 or len(devices) % num_slices:
        raise ValueError(
            f"{source}={num_slices} must be a positive divisor of the number of devices, {len(devices)}. "
            f"Valid values: {', '.join(str(n) for n in range(1, len(devices) + 1) if len(devices) % n == 0)}."
        )
    size = len(devices) // num_slices
    ordered = sorted(in_jax_order(devices), key=lambda device: slice_of(device) or 0)
    runs = [ordered[start : start + size] for start in range(0, len(devices), size)]
    # If two groups shared a slice, its fast links between them would count as the slow network.
    for kind in ("slice", "process"):
        owners: list[set[int | None]] = [{getattr(device, f"{kind}_index", None) for device in run} for run in runs]
        several = len({key for ids in owners for key in ids}) > 1
        divided = sorted({key for i, ids in enumerate(owners) for other in owners[:i] for key in ids & other}, key=str)
        if several and divided:
            raise ValueError(
                f"{source}={num_slices} makes slices of {size} devices, which splits {kind} "
                f"{', '.join(map(str, divided))}. Each slice must contain complete {plural(kind, 2)}."
            )
    return runs


def _warn_slow(slow: list[str], mesh: str, splits: str, num_granules: int, granule: str, kind: str) -> None:
    cost = f"it is often 10 to 50 times slower than the links inside a {granule}"
    chip = chip_of(kind)
    if chip is not None and chip.pod:
        ici, dcn = chip.reachable_link, chip.network_bandwidth
        speeds = f"{dcn / 1e9:g} GB/s per chip instead of {ici / 1e9:g} GB/s per link and direction"
        cost = f"{speeds}, {ici / dcn:.0f} times slower or more"
    warnings.warn(
        f"Mesh {mesh} over {count_text(num_granules, granule)} is split as {splits}: "
        f"{', '.join(slow)} communicates over the slow network inside every layer: {cost}. Choose pp, dp and fsdp "
        f"so that their product is a multiple of {num_granules}, or pass dcn_mesh_dims to confirm this layout.",
        SlowNetworkWarning,
        stacklevel=6,  # the call of create_mesh
    )
