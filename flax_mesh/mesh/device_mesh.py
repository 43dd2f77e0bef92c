"""Arrays of devices in mesh order: for one slice, and for several slices or processes."""

import math
from collections.abc import Hashable, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.experimental import mesh_utils

from flax_mesh.fields import require_types
from flax_mesh.mesh.shape import integers
from flax_mesh.mesh.torus.assign import choose_assignment
from flax_mesh.mesh.torus.torus import DeviceLike, arrange, physical_mesh, slice_of


def _all_devices() -> list[DeviceLike]:
    # JAX does not state the type of a device.
    return cast("list[DeviceLike]", jax.devices())  # pyright: ignore[reportUnknownMemberType]


def create_device_mesh(
    mesh_shape: Sequence[int],
    devices: Sequence[DeviceLike] | None = None,
    *,
    contiguous_submeshes: bool = False,
    allow_split_physical_axes: bool = False,
) -> np.ndarray:
    """The devices of one slice as an array of shape `mesh_shape`, whose axes are ordered by increasing traffic.

    TPUs are laid out along the physical axes of their torus (`torus.choose_assignment`), or in the ring order of their
    kind; other devices keep JAX's order. The order of `devices` does not matter. With `contiguous_submeshes` the
    devices of every process form a contiguous block, which only a few slices and shapes allow.

    Raises:
        ValueError: `mesh_shape` is not a sequence of positive integers, the number of devices does not match, the
            devices do not form a cuboid, or contiguous sub-meshes are not known for this slice and shape.
        NotImplementedError: A physical axis would have to be split, and `allow_split_physical_axes` is False.

    Example:
        >>> jax.sharding.Mesh(fm.create_device_mesh((2, 4)), ("dp", "fsdp")).shape["fsdp"]
        4
    """
    require_types(create_device_mesh, devices=devices)
    devices = _all_devices() if devices is None else list(devices)
    shape = integers(mesh_shape, "mesh_shape", least=1)
    if not devices or math.prod(shape) != len(devices):
        raise ValueError(
            f"The number of devices {len(devices)} must equal the product {math.prod(shape)} of mesh shape {shape}."
        )
    devices = in_jax_order(devices)
    handler = mesh_utils.device_kind_handler_dict.get(devices[-1].device_kind)  # JAX's ring orders of small slices
    if handler is not None and shape:
        if devices[-1].device_kind not in ("TPU v2", "TPU v3"):  # their handler accepts any devices
            physical_mesh(devices)  # raises a ValueError for devices that form no cuboid
        if (ring := handler(shape, devices)) is not None:
            return ring
    if devices[0].platform != "tpu":
        return _as_array(devices).reshape(shape)
    physical, torus = physical_mesh(devices)
    if contiguous_submeshes:
        flags = {"contiguous_submeshes": True, "allow_split_physical_axes": allow_split_physical_axes}
        return mesh_utils.create_device_mesh(shape, devices, **flags)
    return arrange(physical, choose_assignment(torus, shape, allow_split=allow_split_physical_axes))


def create_hybrid_device_mesh(
    mesh_shape: Sequence[int],
    dcn_mesh_shape: Sequence[int],
    devices: Sequence[DeviceLike] | None = None,
    *,
    process_is_granule: bool = False,
    should_sort_granules_by_key: bool = True,
    allow_split_physical_axes: bool = False,
) -> np.ndarray:
    """The devices of several slices as an array of shape `mesh_shape * dcn_mesh_shape` (elementwise).

    Slices (or processes, with `process_is_granule`) form the outer mesh `dcn_mesh_shape` over the slow network. The
    devices of each slice form the inner mesh `mesh_shape`, with equal coordinates at equal positions in all slices.
    Slices are ordered by their index, or by their first device if `should_sort_granules_by_key` is False.

    Raises:
        ValueError: Devices have no slice index, the number of slices is not the product of `dcn_mesh_shape`, slices
            differ in size, or any error of `create_device_mesh`.

    Example:
        >>> fm.create_hybrid_device_mesh((1, 8), (1, 1), process_is_granule=True).shape  # one process
        (1, 8)
    """
    require_types(create_hybrid_device_mesh, devices=devices)
    devices = _all_devices() if devices is None else list(devices)
    keys = [device.process_index if process_is_granule else slice_of(device) for device in devices]
    if None in keys:
        without = [device.id for device, key in zip(devices, keys, strict=True) if key is None]
        raise ValueError(
            f"{len(without)} of {len(devices)} devices have no slice_index (the first is id {without[0]}). "
            "Pass process_is_granule=True to make each process a granule."
        )
    granules = group_by_key(devices, keys, sort=should_sort_granules_by_key)
    return hybrid_mesh_of(granules, mesh_shape, dcn_mesh_shape, allow_split_physical_axes=allow_split_physical_axes)


def hybrid_mesh_of(
    granules: Sequence[Sequence[DeviceLike]],
    mesh_shape: Sequence[int],
    dcn_mesh_shape: Sequence[int],
    *,
    allow_split_physical_axes: bool,
) -> np.ndarray:
    """As `create_hybrid_device_mesh`, for devices that are already grouped into granules."""
    inner = integers(mesh_shape, "mesh_shape", least=1)
    outer = integers(dcn_mesh_shape, "dcn_mesh_shape", least=1)
    if len(inner) != len(outer):
        raise ValueError(f"mesh_shape {inner} and dcn_mesh_shape {outer} must have one size for each mesh axis.")
    if math.prod(outer) != len(granules):
        raise ValueError(
            f"dcn_mesh_shape {outer} multiplies to {math.prod(outer)}, but the devices form {len(granules)} granules "
            "(slices or processes). The two must be equal."
        )
    uneven = {i: len(granule) for i, granule in enumerate(granules) if len(granule) != math.prod(inner)}
    if uneven:
        raise ValueError(
            f"mesh_shape {inner} requires {math.prod(inner)} devices in each granule (slice or process); "
            f"found {', '.join(f'{count} in granule {i}' for i, count in uneven.items())}."
        )
    blocks = [
        create_device_mesh(inner, granule, allow_split_physical_axes=allow_split_physical_axes) for granule in granules
    ]
    stacked = np.stack(blocks).reshape(outer + inner)
    interleaved = [axis for i in range(len(outer)) for axis in (i, len(outer) + i)]
    return stacked.transpose(interleaved).reshape([slow * fast for slow, fast in zip(outer, inner, strict=True)])


def in_jax_order(devices: Sequence[DeviceLike]) -> list[DeviceLike]:
    """Sorted by process, then id, as in `jax.devices()`; GPUs by id only, because XLA numbers them by topology."""
    return sorted(devices, key=lambda d: (0 if d.platform == "gpu" else d.process_index, d.id))


def group_by_key(devices: Sequence[DeviceLike], keys: Sequence[Hashable], *, sort: bool) -> list[list[DeviceLike]]:
    """The devices of each key; groups are ordered by key, or by first device if `sort` is False."""
    groups: dict[Any, list[DeviceLike]] = {}
    for device, key in zip(devices, keys, strict=True):
        groups.setdefault(key, []).append(device)
    return [groups[key] for key in (sorted(groups) if sort else groups)]


def _as_array(devices: Sequence[DeviceLike]) -> np.ndarray:
    """A one-dimensional object array. `np.array` would try to iterate over the devices."""
    return np.fromiter(devices, object, len(devices))
