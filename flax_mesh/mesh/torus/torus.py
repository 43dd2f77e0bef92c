"""The torus of a TPU slice, and the layout of logical axes over its physical axes. Uses numpy only, not JAX.

A TPU slice is a cuboid of chips connected by ICI links along x, y and z. If the two ends of a line of chips are
connected too, the line is a ring: the axis *wraps*. An **assignment** is a matrix `[physical axis][logical axis]` of
factors. The product of a row is the size of that physical axis, the product of a column the size of that logical axis.
For example fsdp:2,tp:8 on a slice of 4x4 chips (the drawing is in `assign.py`):

              fsdp  tp
        x 4 [   1    4 ]
        y 4 [   2    2 ]
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from flax_mesh.hardware import chip_of

Assignment = tuple[tuple[int, ...], ...]  # [physical axis][logical axis]

_V2_POD_SIDE = 16  # chips per side of a pod of v2, which `hardware.CHIPS` lacks
# If a chip is more than one device, the physical axes are x, y, core (v2, v3: flat slices) or x, y, z, core.
_FLAT_KINDS = ("TPU v2", "TPU v3")
_CORE_KINDS = ("TPU7x", "TPU7", "TPU8i")
_EITHER_KINDS = ("TPU v5p",)  # one device per chip with megacore, otherwise two


class DeviceLike(Protocol):
    """The attributes that every `jax.Device` has. TPUs also have `coords`, a core on their chip and a slice index."""

    @property
    def id(self) -> int: ...

    @property
    def platform(self) -> str: ...

    @property
    def device_kind(self) -> str: ...

    @property
    def process_index(self) -> int: ...


@dataclass(frozen=True)
class Torus:
    """The physical axes of one slice: their names, their sizes, and which of them wrap."""

    kind: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    wraps: tuple[bool, ...]

    def __str__(self) -> str:
        sides = "x".join(map(str, self.shape))
        rings = [axis for axis, wrap in zip(self.axes, self.wraps, strict=True) if wrap]
        return f"{self.kind} {sides} ({', '.join(self.axes)}), wrapping along {', '.join(rings) or 'none'}"


def slice_of(device: DeviceLike) -> int | None:
    """The index of the slice of a device; None if it has none."""
    return getattr(device, "slice_index", None)


def wraps_around(kind: str, shape: Sequence[int]) -> tuple[bool, ...]:
    """Which physical axes are rings, by device kind. An axis of 2 or less never is: both directions are one link.

    v4, v5p and 7x: every chip axis, if all three are multiples of 4 (the slice consists of complete cubes).
    v5e, v6e and v2: an axis of 16, v3: an axis of 32 (the side of the pod). Other kinds, and the cores of a chip: none.
    Sources: cloud.google.com/tpu/docs/v5p ("4x4x4 and larger slices have full 3D torus"),
    jax-ml.github.io/scaling-book/tpus (wraparound on an axis of 16, or of a multiple of 4 on v4p and v5p).
    """
    chip = chip_of(kind)
    if chip is None or not chip.pod:
        return tuple(kind == "TPU v2" and size == _V2_POD_SIDE for size in shape)
    rings = chip.wraps(shape[:3])
    return rings + (False,) * (len(shape) - len(rings))


def physical_mesh(devices: Sequence[DeviceLike]) -> tuple[np.ndarray, Torus]:
    """The devices of one slice as an array indexed by coordinates, and the torus that they form.

    The cuboid may start at any coordinates. Raises a ValueError that lists all offending devices for holes, two devices
    with the same coordinates, missing coordinates, several device kinds, and second cores on a kind that has one device
    per chip.
    """
    kind = devices[0].device_kind
    kinds = sorted({device.device_kind for device in devices})
    if len(kinds) > 1:
        raise ValueError(f"Devices of one slice must be of one kind; got {', '.join(kinds)}. Pass devices of one kind.")
    coords: list[tuple[int, ...]] = [tuple(getattr(device, "coords", None) or ()) for device in devices]
    without = [device.id for device, place in zip(devices, coords, strict=True) if len(place) != 3]
    if without:
        raise ValueError(f"{kind} devices need coords (x, y, z); these ids have none: {_few(without)}.")
    cores: list[int] = [getattr(device, "core_on_chip", 0) or 0 for device in devices]
    second = [device.id for device, core in zip(devices, cores, strict=True) if core]
    if second and kind not in _FLAT_KINDS + _CORE_KINDS + _EITHER_KINDS:
        raise ValueError(
            f"A mesh of {kind} requires one device per chip, but these ids are a second core: {_few(second)}. "
            "Run with megacore, which makes each chip one device."
        )
    axes, points = ("x", "y", "z"), coords
    if kind in _FLAT_KINDS:
        axes, points = ("x", "y", "core"), [(x, y, core) for (x, y, _), core in zip(coords, cores, strict=True)]
    elif len({*cores}) > 1 or kind in _CORE_KINDS:
        axes, points = (*axes, "core"), [(*place, core) for place, core in zip(coords, cores, strict=True)]
    grid = _fill_cuboid(devices, np.array(points), kind, axes)
    return grid, Torus(kind, axes, grid.shape, wraps_around(kind, grid.shape))


def known_assignment(shape: Sequence[int], mesh_shape: Sequence[int], *, allow_split: bool) -> Assignment:
    """The assignment of `jax.experimental.mesh_utils`: a greedy choice, busiest logical axis (the last) first.

    Raises NotImplementedError if the greedy choice of complete physical axes fails and `allow_split` is False.
    """
    try:
        return _assign_complete_axes(shape, mesh_shape)
    except NotImplementedError:
        if not allow_split:
            raise
    return _assign_split_axes(shape, mesh_shape)


def factorings(size: int, limits: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every tuple of factors with product `size` whose i-th entry divides `limits[i]`.

    >>> list(factorings(4, (2, 4)))
    [(1, 4), (2, 2)]
    """
    if not limits:
        if size == 1:
            yield ()
        return
    for factor in range(1, math.gcd(size, limits[0]) + 1):
        if limits[0] % factor == 0 and size % factor == 0:
            for others in factorings(size // factor, limits[1:]):
                yield (factor, *others)


def arrange(physical: np.ndarray, assignment: Assignment) -> np.ndarray:
    """The devices in mesh order.

    If several logical axes share a physical axis, the later one varies faster, so that its neighbors are directly
    linked. Within a logical axis the physical axes keep their order. `jax.experimental.mesh_utils` does the same.
    """
    matrix = np.array(assignment)
    num_physical, num_logical = matrix.shape
    order = [p * num_logical + a for a in range(num_logical) for p in range(num_physical)]
    mesh_shape: list[int] = matrix.prod(axis=0).tolist()
    return physical.reshape(matrix.reshape(-1)).transpose(order).reshape(mesh_shape)


def mean_hops(points: np.ndarray, torus: Torus) -> tuple[float, ...]:
    """Mean ICI hops between ring neighbors (including last to first) along each mesh axis; 0 for an axis of 1.

    `points` contains physical coordinates and has shape mesh_shape + (number of physical axes,). The two cores of a
    chip are one hop apart. The result depends only on the finished mesh, so it applies to any method of creating one.
    """
    hops: list[float] = []
    for axis in range(points.ndim - 1):
        distance = np.abs(np.roll(points, -1, axis=axis) - points)
        distance = np.where(torus.wraps, np.minimum(distance, np.array(torus.shape) - distance), distance)
        hops.append(float(distance.sum(axis=-1).mean()))
    return tuple(hops)


def _fill_cuboid(devices: Sequence[DeviceLike], points: np.ndarray, kind: str, axes: tuple[str, ...]) -> np.ndarray:
    origin = points.min(axis=0)
    places = [tuple(place) for place in (points - origin).tolist()]
    grid = np.full(tuple(points.max(axis=0) - origin + 1), None, dtype=object)
    for device, place in zip(devices, places, strict=True):
        grid[place] = device
    taken = Counter(places)
    shared = [_add(place, origin) for place, count in taken.items() if count > 1]
    if shared:
        raise ValueError(
            f"Two {kind} devices have the same coordinates ({', '.join(axes)}): {_few(shared)}. "
            "They belong to different slices: pass num_slices, or devices= of one slice."
        )
    holes = [_add(place, origin) for place in np.ndindex(grid.shape) if place not in taken]
    if holes:
        raise ValueError(
            f"{len(devices)} {kind} devices do not fill their bounding box {'x'.join(map(str, grid.shape))}: there is "
            f"a hole at ({', '.join(axes)}) = {_few(holes)}. Pass devices= that fill it completely."
        )
    return grid


def _add(place: Sequence[int], origin: np.ndarray) -> tuple[int, ...]:
    return tuple(int(a + b) for a, b in zip(place, origin, strict=True))


def _assign_complete_axes(shape: Sequence[int], mesh_shape: Sequence[int]) -> Assignment:
    """Each logical axis takes the most complete physical axes that multiply to its size, ties in axis order."""
    left = dict(enumerate(shape))
    columns: list[tuple[int, ...]] = [()] * len(mesh_shape)
    for logical in reversed(range(len(mesh_shape))):
        size = mesh_shape[logical]
        candidates = (
            chosen
            for count in range(len(left), 0, -1)
            for chosen in itertools.combinations(left, count)
            if math.prod(left[axis] for axis in chosen) == size
        )
        columns[logical] = next(candidates, ())
        if not columns[logical] and size > 1:
            raise NotImplementedError(
                f"Logical axis {logical} of size {size} must be a product of complete physical axes, but the "
                f"remaining axes of {'x'.join(map(str, shape))} have sizes {list(left.values())}. Mesh shape "
                f"{tuple(mesh_shape)}. "
                "Pass allow_split_physical_axes=True, or use sizes that are products of complete physical axes."
            )
        left = {axis: extent for axis, extent in left.items() if axis not in columns[logical]}
    return tuple(tuple(shape[p] if p in column else 1 for column in columns) for p in range(len(shape)))


def _assign_split_axes(shape: Sequence[int], mesh_shape: Sequence[int]) -> Assignment:
    """As above, but may split axes: prefers complete axes, then axes that busier logical axes already use."""
    used = [1] * len(shape)
    columns: list[tuple[int, ...]] = []

    def preference(factors: tuple[int, ...]) -> tuple[int, int, int, tuple[int, ...]]:
        complete = [factor for factor, size in zip(factors, shape, strict=True) if factor == size]
        shared = math.prod(factor for factor, taken in zip(factors, used, strict=True) if taken > 1)
        return math.prod(complete), sum(factor > 1 for factor in complete), shared, factors

    for size in reversed(mesh_shape):
        limits = [extent // taken for extent, taken in zip(shape, used, strict=True)]
        columns.append(max(factorings(size, limits), key=preference))
        used = [taken * factor for taken, factor in zip(used, columns[-1], strict=True)]
    return tuple(zip(*reversed(columns), strict=True))


def _few(items: Sequence[object], limit: int = 8) -> str:
    return ", ".join(map(str, items[:limit])) + (f" and {len(items) - limit} more" if len(items) > limit else "")
