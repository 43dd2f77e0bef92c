"""A drawing of a mesh: every device at its position on the torus, colored by its group along the busiest axis."""

from colorsys import hls_to_rgb
from functools import partial

import numpy as np
from jax.sharding import Mesh

from flax_mesh.html import element, hex_colour, svg_document, svg_text
from flax_mesh.mesh.describe import MeshLayout, device_panels, place_texts, read_layout
from flax_mesh.mesh.shape import format_mesh_shape

CELL, GAP, PANEL_GAP, MARGIN, LINE = 44, 12, 36, 24, 18  # pixels
_PANELS_PER_ROW = 4
_Spots = dict[object, tuple[int, ...]]  # device -> panel, column and row there, left and upper edge
_text = partial(svg_text, font_family="Helvetica, Arial, sans-serif")


def draw_mesh_svg(mesh: Mesh) -> str:
    """The mesh as an SVG document.

    There is one panel per plane of each slice (x is horizontal, y vertical), or one per slice or process if the devices
    do not form a torus. Each device is labeled with its index along the mesh axes longer than 1. Devices that differ
    only along the busiest axis (the last one longer than 1) have the same color, and lines connect neighbors along it.
    A stub at the edge of a panel is the wraparound link of a ring.

    Example:
        >>> from flax_mesh.mesh import draw_mesh_svg
        >>> draw_mesh_svg(fm.create_mesh((2, 4), ("fsdp", "tp")))[:4]
        '<svg'
    """
    layout = read_layout(mesh)
    panels = device_panels(mesh, layout)
    rows, columns = len(panels[0][2]), len(panels[0][2][0])
    width = columns * (CELL + GAP) - GAP
    height = rows * (CELL + GAP) - GAP
    per_row = min(_PANELS_PER_ROW, len(panels))
    texts = _legend(mesh, layout)
    top = MARGIN + LINE * (len(texts) + 1)
    body: list[str] = []
    spots: _Spots = {}
    for number, (granule, plane, grid) in enumerate(panels):
        left = MARGIN + (number % per_row) * (width + PANEL_GAP)
        upper = top + (number // per_row) * (height + PANEL_GAP + LINE)
        title = f"{granule}, {plane}" if plane else granule
        body.append(_text(left, upper, title, size=12))
        for y, row in enumerate(grid):
            for x, device in enumerate(row):
                spots[device] = (number, x, y, left + x * (CELL + GAP), upper + 8 + y * (CELL + GAP))
    body += _links(mesh, layout, spots, columns, rows)
    body += [_device(mesh, index, device, spots) for index, device in np.ndenumerate(mesh.devices)]
    body += [_text(MARGIN, MARGIN + LINE * i, text, size=13 if i == 0 else 12) for i, text in enumerate(texts)]
    total_width = max(2 * MARGIN + per_row * (width + PANEL_GAP) - PANEL_GAP, 2 * MARGIN + 7 * max(map(len, texts)))
    total_height = top + -(-len(panels) // per_row) * (height + PANEL_GAP + LINE)
    return svg_document(total_width, total_height, body)


def _busiest(mesh: Mesh) -> int:
    return next((axis for axis in reversed(range(mesh.devices.ndim)) if mesh.devices.shape[axis] > 1), 0)


def _legend(mesh: Mesh, layout: MeshLayout) -> list[str]:
    where = str(layout.torus) if layout.torus is not None else f"{mesh.devices.flat[0].platform}, no torus"
    places = [f"{name}: {text}" for name, text in zip(mesh.axis_names, place_texts(layout), strict=True) if text != "-"]
    title = f"{format_mesh_shape(mesh.axis_names, mesh.devices.shape)} on {where}"
    return [title, *places, f"colour and lines: groups along {mesh.axis_names[_busiest(mesh)]}"]


def _device(mesh: Mesh, index: tuple[int, ...], device: object, spots: _Spots) -> str:
    busiest = _busiest(mesh)
    group = 0
    for axis, (i, size) in enumerate(zip(index, mesh.devices.shape, strict=True)):
        group = group if axis == busiest else group * size + i
    hue = group * 0.381966 % 1  # the golden angle: consecutive groups get clearly different colors
    fill = hex_colour([round(255 * part) for part in hls_to_rgb(hue, 0.82, 0.65)])
    _, _, _, left, upper = spots[device]
    label = ",".join(str(i) for i, size in zip(index, mesh.devices.shape, strict=True) if size > 1) or "0"
    box = element("rect", x=left, y=upper, width=CELL, height=CELL, rx=6, fill=fill, stroke="#444")
    return box + _text(left + CELL / 2, upper + CELL / 2 + 4, label, size=11, anchor="middle")


def _links(mesh: Mesh, layout: MeshLayout, spots: _Spots, columns: int, rows: int) -> list[str]:
    """Lines between neighbors along the busiest axis in the same panel; stubs for links that wrap around."""
    lines: list[str] = []
    devices = np.moveaxis(mesh.devices, _busiest(mesh), -1)
    size = devices.shape[-1]
    for group in devices.reshape(-1, size):
        for i in range(size if size > 2 else size - 1):
            start, end = spots[group[i]], spots[group[(i + 1) % size]]
            if start[0] != end[0]:
                continue
            step = (end[1] - start[1], end[2] - start[2])
            if layout.torus is None or abs(step[0]) + abs(step[1]) == 1:
                if layout.torus is not None or i + 1 < size:
                    lines.append(_stroke(*(at + CELL / 2 for at in (*start[3:], *end[3:]))))
            elif _wraps(layout, step, (columns, rows)):
                sign = (np.sign(step[0]), np.sign(step[1]))
                lines += [_stub(start, -sign[0], -sign[1]), _stub(end, sign[0], sign[1])]
    return lines


def _wraps(layout: MeshLayout, step: tuple[int, int], extent: tuple[int, int]) -> bool:
    assert layout.torus is not None
    along = [axis for axis in (0, 1) if step[axis]]
    return len(along) == 1 and layout.torus.wraps[along[0]] and abs(step[along[0]]) == extent[along[0]] - 1


def _stub(spot: tuple[int, ...], dx: int, dy: int) -> str:
    x, y = spot[3] + CELL / 2, spot[4] + CELL / 2
    reach = CELL / 2 + 10
    return _stroke(x, y, x + dx * reach, y + dy * reach)


def _stroke(x1: float, y1: float, x2: float, y2: float) -> str:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke="#444", stroke_width=3)
