"""Devices of a torus, and logical axes laid onto its physical axes. numpy only: real devices and records alike.

A slice of TPUs is a cuboid of chips joined by ICI links along x, y and z. Where both ends of a line of chips are
joined too, the line is a ring: the axis *wraps*. An **assignment** is a matrix `[physical axis][logical axis]` of
factors: the product over a row is the size of that physical axis, the product over a column that of the logical axis.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Assignment = tuple[tuple[int, ...], ...]  # [physical axis][logical axis]

# Chips per side of a pod of these kinds, which wraps only along a side that the slice spans whole.
POD_SIDE = {"TPU v2": 16, "TPU v3": 32, "TPU v5 lite": 16, "TPU v5e": 16, "TPU v6 lite": 16, "TPU v6e": 16}
# Slices of these kinds are built from cubes of 4x4x4 chips joined by optical switches: whole cubes wrap on every side.
CUBE_SIDE = 4
CUBE_KINDS = ("TPU v4", "TPU v5", "TPU v5p", "TPU7x", "TPU7")
# Where a chip is more than one device the physical axes are x, y, core (v2, v3: flat slices) or x, y, z, core.
FLAT_KINDS = ("TPU v2", "TPU v3")
CORE_KINDS = ("TPU7x", "TPU7", "TPU8i")
EITHER_KINDS = ("TPU v5p",)  # one device per chip with megacore, else two


class Device(NamedTuple):
    """What a mesh needs to know of a device. `coords` are chips along (x, y, z), `core` the device within its chip."""

    id: int
    platform: str
    kind: str
    process: int
    coords: tuple[int, ...] | None = None
    core: int = 0
    slice: int | None = None


@dataclass(frozen=True)
class Torus:
    """The physical axes of one slice: their names, sizes, and which of them wrap."""

    kind: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    wraps: tuple[bool, ...]

    def __str__(self) -> str:
        sides = "x".join(map(str, self.shape))
        rings = [axis for axis, wrap in zip(self.axes, self.wraps, strict=True) if wrap]
        return f"{self.kind} {sides} ({', '.join(self.axes)}), wrapping along {', '.join(rings) or 'none'}"


def read_device(device: Any) -> Device:
    """The record of a `jax.Device`, or of anything with the same attributes; missing coordinates become None."""
    coords = getattr(device, "coords", None)
    return Device(
        id=device.id,
        platform=device.platform,
        kind=device.device_kind,
        process=device.process_index,
        coords=None if coords is None else tuple(coords),
        core=getattr(device, "core_on_chip", 0) or 0,
        slice=getattr(device, "slice_index", None),
    )


def wraps_around(kind: str, shape: Sequence[int]) -> tuple[bool, ...]:
    """Which physical axes close to rings, by device kind. An axis of 2 or less never does: both ways are one link.

    v4, v5p and 7x: every chip axis, where all three are multiples of 4 (the slice is made of whole cubes).
    v5e and v6e: an axis of 16, v2 16 and v3 32 (the pod's side). Other kinds, and the cores of a chip: none.
    Sources: cloud.google.com/tpu/docs/v5p ("4x4x4 and larger slices have full 3D torus"),
    jax-ml.github.io/scaling-book/tpus (wraparound on an axis of 16, or of a multiple of 4 on v4p and v5p).
    """
    if kind in CUBE_KINDS:
        chips = shape[:3]
        cubes = len(chips) == 3 and all(size % CUBE_SIDE == 0 for size in chips)
        return tuple(cubes and axis < 3 for axis in range(len(shape)))
    side = POD_SIDE.get(kind)
    return tuple(size == side for size in shape)


def physical_mesh(devices: Sequence[Any]) -> tuple[np.ndarray, Torus]:
    """The devices of one slice as an array by coordinate, and the torus they form.

    The cuboid may start anywhere. ValueError, naming all offenders, for a hole, two devices at one place,
    missing coordinates, devices of several kinds, or two cores per chip on a kind that shows one device per chip.
    """
    records = [read_device(device) for device in devices]
    kind = records[0].kind
    kinds = sorted({record.kind for record in records})
    if len(kinds) > 1:
        raise ValueError(f"Devices of one slice must be of one kind; got {', '.join(kinds)}. Pass only one.")
    without = [record.id for record in records if record.coords is None or len(record.coords) != 3]
    if without:
        raise ValueError(f"{kind} devices need coords (x, y, z); these ids have none: {_few(without)}.")
    cores = max(record.core for record in records) - min(record.core for record in records) + 1
    second = [record.id for record in records if record.core != 0]
    if second and kind not in FLAT_KINDS + CORE_KINDS + EITHER_KINDS:
        raise ValueError(
            f"A mesh of {kind} needs one device per chip, but these ids are a second core: {_few(second)}. "
            "Run with megacore, so that a chip is one device."
        )
    axes = ("x", "y", "z")
    points = [record.coords for record in records]
    if kind in FLAT_KINDS:
        axes, points = ("x", "y", "core"), [(*record.coords[:2], record.core) for record in records if record.coords]
    elif cores > 1 or kind in CORE_KINDS:
        axes, points = (*axes, "core"), [(*record.coords, record.core) for record in records if record.coords]
    grid = _fill_cuboid(devices, np.array(points), kind, axes)
    return grid, Torus(kind, axes, grid.shape, wraps_around(kind, grid.shape))


def known_assignment(shape: Sequence[int], mesh_shape: Sequence[int], *, allow_split: bool) -> Assignment:
    """The assignment that `jax.experimental.mesh_utils` makes: busiest logical axis (the last) first, greedily.

    NotImplementedError where its greedy choice of whole axes gets stuck and `allow_split` is False.
    """
    try:
        return _whole_axes(shape, mesh_shape)
    except NotImplementedError:
        if not allow_split:
            raise
    return _split_axes(shape, mesh_shape)


def factorings(size: int, limits: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every tuple of factors with the product `size` whose entries divide `limits`, one by one.

    >>> list(factorings(4, (2, 4)))
    [(1, 4), (2, 2)]
    """
    if not limits:
        if size == 1:
            yield ()
        return
    for factor in range(1, math.gcd(size, limits[0]) + 1):
        if limits[0] % factor == 0 and size % factor == 0:
            for rest in factorings(size // factor, limits[1:]):
                yield (factor, *rest)


def arrange(physical: np.ndarray, assignment: Assignment) -> np.ndarray:
    """Devices in mesh order.

    Within a physical axis the later logical axis is the faster one, so that it keeps direct neighbours; within a
    logical axis the physical axes run in their own order. So jax.experimental.mesh_utils lays them out too.
    """
    matrix = np.array(assignment)
    num_physical, num_logical = matrix.shape
    order = [p * num_logical + a for a in range(num_logical) for p in range(num_physical)]
    return physical.reshape(matrix.reshape(-1)).transpose(order).reshape(matrix.prod(axis=0))


def mean_hops(points: np.ndarray, torus: Torus) -> tuple[float, ...]:
    """Mean ICI hops between ring neighbours (the last and the first too) along each mesh axis; 0 for an axis of 1.

    `points` holds physical coordinates, of shape mesh_shape + (number of physical axes,). The two cores of a chip are
    one hop apart. It looks at the finished mesh alone, so it judges every way of making one.
    """
    hops = []
    for axis in range(points.ndim - 1):
        distance = np.abs(np.roll(points, -1, axis=axis) - points)
        distance = np.where(torus.wraps, np.minimum(distance, np.array(torus.shape) - distance), distance)
        hops.append(float(distance.sum(axis=-1).mean()))
    return tuple(hops)


def _fill_cuboid(devices: Sequence[Any], points: np.ndarray, kind: str, axes: tuple[str, ...]) -> np.ndarray:
    origin = points.min(axis=0)
    places = [tuple(place) for place in (points - origin).tolist()]
    grid = np.full(tuple(points.max(axis=0) - origin + 1), None, dtype=object)
    for device, place in zip(devices, places, strict=True):
        grid[place] = device
    taken = Counter(places)
    shared = [_add(place, origin) for place, count in taken.items() if count > 1]
    if shared:
        raise ValueError(
            f"Two {kind} devices stand at the same ({', '.join(axes)}): {_few(shared)}. "
            "They belong to different slices: pass num_slices, or devices= of one slice."
        )
    holes = [_add(place, origin) for place in np.ndindex(grid.shape) if place not in taken]
    if holes:
        raise ValueError(
            f"{len(devices)} {kind} devices do not fill their cuboid {'x'.join(map(str, grid.shape))}: there is a hole "
            f"at ({', '.join(axes)}) = {_few(holes)}. Pass devices= that form a full cuboid."
        )
    return grid


def _add(place: Sequence[int], origin: np.ndarray) -> tuple[int, ...]:
    return tuple(int(a + b) for a, b in zip(place, origin, strict=True))


def _whole_axes(shape: Sequence[int], mesh_shape: Sequence[int]) -> Assignment:
    """Each logical axis takes as many whole physical axes as multiply to its size, the first such set in order."""
    left = dict(enumerate(shape))
    columns: list[tuple[int, ...]] = [()] * len(mesh_shape)
    for logical in reversed(range(len(mesh_shape))):
        size = mesh_shape[logical]
        fits = (
            chosen
            for count in range(len(left), 0, -1)
            for chosen in itertools.combinations(left, count)
            if math.prod(left[axis] for axis in chosen) == size
        )
        columns[logical] = next(fits, ())
        if not columns[logical] and size > 1:
            raise NotImplementedError(
                f"Logical axis {logical} of size {size} is no product of whole physical axes: of "
                f"{'x'.join(map(str, shape))} there remain {list(left.values())}. Mesh shape {tuple(mesh_shape)}. "
                "Pass allow_split_physical_axes=True, or sizes that are products of whole axes."
            )
        left = {axis: extent for axis, extent in left.items() if axis not in columns[logical]}
    return tuple(tuple(shape[p] if p in column else 1 for column in columns) for p in range(len(shape)))


def _split_axes(shape: Sequence[int], mesh_shape: Sequence[int]) -> Assignment:
    """As `_whole_axes`, with parts of axes: whole axes are preferred, then those that busier axes already share."""
    used = [1] * len(shape)
    columns: list[tuple[int, ...]] = []

    def preference(factors: tuple[int, ...]) -> tuple[int, int, int, tuple[int, ...]]:
        whole = [factor for factor, size in zip(factors, shape, strict=True) if factor == size]
        shared = math.prod(factor for factor, taken in zip(factors, used, strict=True) if taken > 1)
        return math.prod(whole), sum(factor > 1 for factor in whole), shared, factors

    for size in reversed(mesh_shape):
        limits = [extent // taken for extent, taken in zip(shape, used, strict=True)]
        columns.append(max(factorings(size, limits), key=preference))
        used = [taken * factor for taken, factor in zip(used, columns[-1], strict=True)]
    return tuple(zip(*reversed(columns), strict=True))


def _few(items: Sequence[Any], limit: int = 8) -> str:
    return ", ".join(map(str, items[:limit])) + (f" and {len(items) - limit} more" if len(items) > limit else "")
