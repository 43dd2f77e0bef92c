"""The layout of a mesh: physical axes, rings or lines, axes over the slow network. Computed from its devices only."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from flax_mesh.mesh.shape import format_mesh_shape
from flax_mesh.mesh.slices import find_granules
from flax_mesh.mesh.torus.assign import (
    DEFAULT_BYTES,
    assignment_cost,
    axis_phases,
    gather_seconds,
    is_better,
    strides_of,
)
from flax_mesh.mesh.torus.torus import Assignment, Torus, arrange, known_assignment, mean_hops, physical_mesh
from flax_mesh.text import plural, table_text

_PICTURE_LIMIT = 64  # the text draws all planes of slices with at most this many devices


@dataclass(frozen=True)
class MeshLayout:
    """The layout of the devices of a mesh: `splits` granules along each axis, each with devices like `block`.

    `torus`, `points` (coordinates of the block, [..., physical axis]) and `hops` are None if the devices do not form a
    torus, and `why_no_torus` is the reason. `assignment` is None for ring orders and for all other orders that do not
    follow from an assignment.
    """

    granule: str
    splits: tuple[int, ...]
    block: np.ndarray
    torus: Torus | None = None
    points: np.ndarray | None = None
    hops: tuple[float, ...] | None = None
    assignment: Assignment | None = None
    why_no_torus: str = ""


def read_layout(mesh: Mesh) -> MeshLayout:
    devices = np.asarray(mesh.devices)
    granule, splits = _granules(devices)
    block = devices[tuple(slice(size // split) for size, split in zip(devices.shape, splits, strict=True))]
    flat = list(block.flat)
    if flat[0].platform != "tpu":
        why = f"{flat[0].platform} devices do not form a torus, so all links are treated as equal"
        return MeshLayout(granule, splits, block, why_no_torus=why)
    try:
        physical, torus = physical_mesh(flat)
    except ValueError as error:
        return MeshLayout(granule, splits, block, why_no_torus=str(error))
    coords = {id(device): index for index, device in np.ndenumerate(physical)}
    points = np.array([coords[id(device)] for device in flat]).reshape(*block.shape, len(torus.shape))
    assignment = _assignment_of(points, torus)
    if assignment is not None and not np.array_equal(arrange(physical, assignment), block):
        assignment = None
    return MeshLayout(granule, splits, block, torus, points, mean_hops(points, torus), assignment)


def describe_mesh(mesh: Mesh | AbstractMesh) -> str:
    """Text for a terminal: the placement of each mesh axis (ring or line, slices), how it was chosen, and a drawing.

    The column hops is the mean number of ICI hops between ring neighbors; the columns gather and GB/s are the predicted
    time and rate of a gather of 64 MiB along the axis (`gather_seconds`). For an AbstractMesh, which has no devices,
    the text is only its shape and axis types.

    Example:
        >>> from flax_mesh.mesh import describe_mesh
        >>> print(describe_mesh(jax.sharding.AbstractMesh((2, 4), ("fsdp", "tp"))))
        mesh fsdp:2,tp:4, 8 devices, axis types ...
        an abstract mesh has no devices, and so no layout
    """
    types = sorted({str(kind).removeprefix("AxisType.").lower() for kind in mesh.axis_types})
    sizes = tuple(mesh.shape.values())
    head = f"mesh {format_mesh_shape(mesh.axis_names, sizes)}, {mesh.size} devices, axis types {', '.join(types)}"
    if isinstance(mesh, AbstractMesh):
        return f"{head}\nan abstract mesh has no devices, and so no layout"
    layout = read_layout(mesh)
    lines = [head, _summary(mesh, layout), "", _axes_table(mesh, layout)]
    if layout.torus is not None:
        lines += ["", _assignment_text(layout, mesh.axis_names)]
    return "\n".join([*lines, "", *_drawing(mesh, layout)])


def place_texts(layout: MeshLayout) -> list[str]:
    """The placement of each mesh axis: `2 slices over DCN, x 4 ring, y 2 of 4`; "-" for an axis of one device."""
    texts: list[str] = []
    for axis, split in enumerate(layout.splits):
        parts = [f"{split} {plural(layout.granule, split)} over DCN"] if split > 1 else []
        if layout.assignment is not None and layout.torus is not None:
            parts += _factor_texts(layout.torus, layout.assignment, axis)
        elif layout.block.shape[axis] > 1:
            parts.append(f"{layout.block.shape[axis]} {'in ring order' if layout.torus else 'devices'}")
        texts.append(", ".join(parts) or "-")
    return texts


def _granules(devices: np.ndarray) -> tuple[str, tuple[int, ...]]:
    """The kind of granule, and how many granules each axis spans: 1 + the number of changes along the axis."""
    groups, granule = find_granules(list(devices.flat))
    number = {device: i for i, group in enumerate(groups) for device in group}
    grid = np.array([number[device] for device in devices.flat]).reshape(devices.shape)
    splits: list[int] = []
    for axis, size in enumerate(devices.shape):
        line = np.moveaxis(grid, axis, 0).reshape(size, -1)
        splits.append(1 + int(sum((line[i] != line[i - 1]).any() for i in range(1, size))))
    even = all(size % split == 0 for size, split in zip(devices.shape, splits, strict=True))
    return granule, tuple(splits) if even else devices.shape


def _assignment_of(points: np.ndarray, torus: Torus) -> Assignment | None:
    """The number of distinct coordinates along each mesh axis, if these factors multiply to both shapes."""
    columns: list[list[int]] = []
    for axis, size in enumerate(points.shape[:-1]):
        line = np.moveaxis(points, axis, 0).reshape(size, -1, len(torus.shape))[:, 0]
        columns.append([len(set(line[:, p].tolist())) for p in range(len(torus.shape))])
    matrix = np.array(columns).T
    fits = (matrix.prod(axis=1) == torus.shape).all() and (matrix.prod(axis=0) == points.shape[:-1]).all()
    return tuple(tuple(int(factor) for factor in row) for row in matrix) if fits else None


def _factor_texts(torus: Torus, assignment: Assignment, axis: int) -> list[str]:
    texts: list[str] = []
    for p, row in enumerate(assignment):
        factor, stride = row[axis], strides_of(assignment)[p][axis]
        if factor == 1:
            continue
        if factor < torus.shape[p]:
            every = f" (stride {stride})" if stride > 1 else ""
            texts.append(f"{torus.axes[p]} {factor} of {torus.shape[p]}{every}")
        elif torus.axes[p] == "core" or factor == 2:
            texts.append(f"{torus.axes[p]} {factor}")
        else:
            texts.append(f"{torus.axes[p]} {factor} {'ring' if torus.wraps[p] else 'line'}")
    return texts


def _axes_table(mesh: Mesh, layout: MeshLayout) -> str:
    """One row per axis; empty columns are omitted."""
    heads = ("axis", "size", "placement", "hops", "gather 64 MiB", "GB/s")
    rows: list[tuple[str, ...]] = []
    for axis, (name, place) in enumerate(zip(mesh.axis_names, place_texts(layout), strict=True)):
        size = mesh.devices.shape[axis]
        hops = "" if layout.hops is None or layout.block.shape[axis] == 1 else f"{layout.hops[axis]:.3g}"
        seconds = _seconds(layout, axis)
        time = f"{seconds * 1e3:.3g} ms" if seconds else ""
        rate = f"{DEFAULT_BYTES * (size - 1) / size / seconds / 1e9:.3g}" if seconds else ""
        rows.append((name, str(size), place, hops, time, rate))
    filled = [any(column) for column in zip(*rows, strict=True)]
    return table_text(list(compress(heads, filled)), [list(compress(row, filled)) for row in rows])


def _seconds(layout: MeshLayout, axis: int) -> float:
    if layout.torus is None or layout.assignment is None:
        return 0.0
    factors = [row[axis] for row in layout.assignment]
    strides = [row[axis] for row in strides_of(layout.assignment)]
    return gather_seconds(axis_phases(layout.torus, factors, strides, layout.splits[axis]))


def _summary(mesh: Mesh, layout: MeshLayout) -> str:
    num_granules = int(np.prod(layout.splits))
    if layout.torus is not None:
        processes = len({device.process_index for device in mesh.devices.flat})
        hosts = f"{processes} {plural('process', processes)}"
        return f"{num_granules} {plural('slice', num_granules)} of {layout.torus}; {hosts}"
    granules = f"{num_granules} {plural(layout.granule, num_granules)}"
    return f"{granules} with {layout.block.size} devices{' each' if num_granules > 1 else ''}; {layout.why_no_torus}"


def _assignment_text(layout: MeshLayout, names: Sequence[str]) -> str:
    if layout.torus is None or layout.assignment is None:
        return (
            "order: the ring order of this device kind, as in JAX, or an order that does not follow from an assignment"
        )
    shape, ours = layout.block.shape, assignment_cost(layout.torus, layout.assignment)
    jax_assignments: list[Assignment] = []
    for allow_split in (False, True):
        try:
            jax_assignments.append(known_assignment(layout.torus.shape, shape, allow_split=allow_split))
        except NotImplementedError:
            continue
    if layout.assignment in jax_assignments:
        return "assignment: the same as JAX's"
    theirs = assignment_cost(layout.torus, jax_assignments[-1])
    pairs = zip(names, ours, theirs, strict=True)
    changes = [
        f"{name} gathers {old.seconds / new.seconds:.2f} times as fast, hops {new.hops:.3g} instead of {old.hops:.3g}"
        for name, new, old in pairs
        if new.seconds and not np.allclose((new.seconds, new.hops), (old.seconds, old.hops))
    ]
    word = "better than JAX's" if is_better(ours, theirs) else "not JAX's"
    return f"assignment: {word}: {'; '.join(changes) or 'of equal cost'}"


def _drawing(mesh: Mesh, layout: MeshLayout) -> list[str]:
    """The mesh indices at the position of each device: planes of y (down) and x (across), or one table."""
    shown = [axis for axis, size in enumerate(mesh.devices.shape) if size > 1] or [0]
    title = f"({', '.join(mesh.axis_names[axis] for axis in shown)})"
    label = {device: ",".join(str(index[axis]) for axis in shown) for index, device in np.ndenumerate(mesh.devices)}
    lines: list[str] = []
    panels = device_panels(mesh, layout)
    first = [panel for panel in panels if panel[0] == panels[0][0]]
    planes = first if layout.block.size <= _PICTURE_LIMIT else first[:1]
    for granule, plane, grid in planes:
        lines.append(f"{title} at {plane or granule}")
        cells = [["" if device is None else label[device] for device in row] for row in grid]
        width = max(len(cell) for row in cells for cell in row)
        lines += ["  " + "  ".join(cell.ljust(width) for cell in row).rstrip() for row in cells]
    if len(planes) < len(panels):
        lines.append(f"and {len(panels) - len(planes)} more planes; draw_mesh_svg draws all of them")
    return lines


def device_panels(mesh: Mesh, layout: MeshLayout) -> list[tuple[str, str, list[list[object]]]]:
    """(granule, plane, rows of devices) for every plane of every granule: rows run along y, columns along x.

    Without a torus each granule is one plane: the last axis longer than 1 is horizontal, the axes before it vertical.
    """
    panels: list[tuple[str, str, list[list[object]]]] = []
    inner = layout.block.shape
    for index in np.ndindex(*layout.splits):
        part = mesh.devices[tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, inner, strict=True))]
        number = int(np.ravel_multi_index(index, layout.splits))
        granule = f"{layout.granule} {number}"
        if layout.torus is None:
            columns = next((size for size in reversed(inner) if size > 1), 1)
            panels.append((granule, "", part.reshape(-1, columns).tolist()))
            continue
        physical, torus = physical_mesh(list(part.flat))
        for others in np.ndindex(*physical.shape[2:]):
            plane = physical[(slice(None), slice(None), *others)]
            name = ", ".join(f"{axis} {at}" for axis, at in zip(torus.axes[2:], others, strict=True))
            panels.append((granule, name, plane.T.tolist()))
    return panels
