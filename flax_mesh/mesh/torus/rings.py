"""Ring orders of small slices: for each device kind, an order of the chips in which consecutive chips share a link.

The handler of a kind takes the devices in the order of `jax.devices()` and the mesh shape. It returns all devices in
ring order, to be reshaped to the mesh shape, or None if the regular torus assignment applies. The orders equal the
orders of `jax.experimental.mesh_utils`, so on a slice of these kinds both create the same mesh. For example _RING_4X4,
with the position of each chip in the ring:

    x -->
     0   1   2   3  |
    15   6   5   4  y        chip 5 of the slice (row 1, column 1) has position 6
    14   7   8   9  |        the last chip of the ring, position 15, is linked to the first
    13  12  11  10  v
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from flax_mesh.mesh.torus.torus import DeviceLike, physical_mesh, read_device

_RingHandler = Callable[[Sequence[DeviceLike], tuple[int, ...]], Sequence[DeviceLike] | None]

# Indices into the devices sorted by (z, y, x), or in the order of `jax.devices()`, that form a ring of direct links.
_RING_2X2 = (0, 1, 3, 2)
_RING_4X2 = (0, 1, 2, 3, 7, 6, 5, 4)  # along one row of four, back along the other; JAX uses it for 2x4 too
_RING_4X4 = (0, 1, 2, 3, 7, 6, 5, 9, 10, 11, 15, 14, 13, 12, 8, 4)
_RING_2X2X2 = (0, 1, 3, 2, 6, 7, 5, 4)  # a Gray code: one coordinate changes per step
_RING_TRAY = (0, 1, 2, 3, 6, 7, 4, 5)  # eight cores on four chips; the two cores of a chip are consecutive
_Z_MAJOR_2X2X2 = (0, 4, 2, 6, 1, 5, 3, 7)  # v5e slices of 2x2x2, JAX's order: not a ring; z varies fastest


def _tray(devices: Sequence[DeviceLike], mesh_shape: tuple[int, ...]) -> Sequence[DeviceLike]:
    """v2 and v3: a tray of eight cores is a ring. Larger slices use it only if the last axis is 8."""
    if len(devices) != 8 and (not mesh_shape or mesh_shape[-1] != 8):
        return devices
    return [devices[start + index] for start in range(0, len(devices), 8) for index in _RING_TRAY]


def _square(devices: Sequence[DeviceLike], mesh_shape: tuple[int, ...]) -> Sequence[DeviceLike] | None:
    """v4 lite and 8i: four chips form a ring."""
    return [devices[index] for index in _RING_2X2] if len(devices) == 4 else None


def _lite(devices: Sequence[DeviceLike], mesh_shape: tuple[int, ...]) -> Sequence[DeviceLike] | None:
    """v5e and v6e: 2x2, eight chips, and 4x4 if one mesh axis contains all 16 chips."""
    extent = _extent(devices)
    if len(devices) == 4 and extent == (2, 2, 1):
        return _reorder(devices, _RING_2X2)
    if len(devices) == 8:
        return _reorder(devices, _Z_MAJOR_2X2X2 if extent == (2, 2, 2) else _RING_4X2)
    if len(devices) == 16 and extent == (4, 4, 1) and max(mesh_shape) == 16:
        return _reorder(devices, _RING_4X4)
    return None


def _cube(devices: Sequence[DeviceLike], mesh_shape: tuple[int, ...]) -> Sequence[DeviceLike] | None:
    """v5p: 2x2x2 chips form a ring."""
    return _reorder(devices, _RING_2X2X2) if len(devices) == 8 and _extent(devices) == (2, 2, 2) else None


def _columns(devices: Sequence[DeviceLike], mesh_shape: tuple[int, ...]) -> Sequence[DeviceLike] | None:
    """7x: up to four layers of 2x2 chips with two cores each. Every layer is a ring; layers are concatenated."""
    if len(devices) % 8 or len(devices) > 32 or max(physical_mesh(devices)[1].shape[:2]) > 2:
        return None
    return [devices[start + index] for start in range(0, len(devices), 8) for index in _RING_TRAY]


RING_HANDLERS: Mapping[str, _RingHandler] = {
    "TPU v2": _tray,
    "TPU v3": _tray,
    "TPU v4 lite": _square,
    "TPU v5 lite": _lite,
    "TPU v5p": _cube,
    "TPU v6 lite": _lite,
    "TPU7x": _columns,
    "TPU7": _columns,
    "TPU8i": _square,
}


def ring_order(devices: Sequence[DeviceLike], mesh_shape: tuple[int, ...]) -> Sequence[DeviceLike] | None:
    """The devices in the ring order of their kind, or None if the kind has none for this slice and mesh shape."""
    handler = RING_HANDLERS.get(devices[-1].device_kind)
    return None if handler is None else handler(devices, mesh_shape)


def _extent(devices: Sequence[DeviceLike]) -> tuple[int, ...]:
    """Size of the bounding box of the devices; devices without coordinates count as being at the origin."""
    points = np.array([read_device(device).coords or (0, 0, 0) for device in devices])
    return tuple(int(size) for size in points.max(axis=0) - points.min(axis=0) + 1)


def _reorder(devices: Sequence[DeviceLike], order: Sequence[int]) -> Sequence[DeviceLike]:
    by_coords = sorted(devices, key=lambda device: tuple(reversed(read_device(device).coords or ())))
    return [by_coords[index] for index in order]
