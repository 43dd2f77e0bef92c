"""A drawing of a mesh: every device at its position on the torus, colored by its group along the busiest axis."""

from collections.abc import Mapping, Sequence
from colorsys import hls_to_rgb
from functools import partial

import numpy as np
from jax.sharding import Mesh

from flax_mesh.mesh.describe import MeshLayout, device_panels, place_texts, read_layout
from flax_mesh.mesh.shape import format_mesh_shape
from flax_mesh.svg import element, hex_colour, svg_document, svg_text
from flax_mesh.text import listed

CELL, GAP, PANEL_GAP, MARGIN, LINE = 44, 12, 36, 24, 18  # pixels
_PANELS_PER_ROW = 4
MOST_CELLS, MOST_PLANES = 8, 4  # of a corner
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


def draw_corner(places: np.ndarray, names: Sequence[str], sizes: Mapping[str, int]) -> tuple[list[str], int, int]:
    """The first devices along every physical axis, for meshes of any size: SVG elements, width and height.

    `places` is the position of every device in a mesh of these sizes, and `names` are the physical axes. x is
    horizontal, y vertical, and there is one panel per plane of the other axes. The colors are classes of the page:
    ink, dim, link, device, on-device.
    """
    planes = places.reshape(*places.shape[:2], -1)
    most = MOST_CELLS if planes.shape[2] == 1 else MOST_CELLS // 2
    shown = planes[:most, :most, :MOST_PLANES]
    columns, rows, count = shown.shape
    width, height = columns * (CELL + GAP), rows * (CELL + GAP)
    pairs = zip(names, shown.shape, places.shape, strict=False)
    cut = [f"the first {n} of {size} along {name}" for name, n, size in pairs if n < size]
    parts = [svg_text(MARGIN, LINE, "; ".join(cut), size=12, class_="dim")] if cut else []
    groups: dict[tuple[int, ...], int] = {}
    for plane in range(count):
        left, top = MARGIN + plane * (width + 2 * GAP), 3 * LINE
        others = np.unravel_index(plane, places.shape[2:]) if places.ndim > 2 else ()
        title = ", ".join(f"{name} {at}" for name, at in zip(names[2:], others, strict=False))
        parts.append(svg_text(left, top - 8, title or f"{names[0]}, {names[1]}", size=12, class_="ink"))
        index = np.stack(np.unravel_index(shown[:, :, plane], tuple(sizes.values())), axis=-1)
        parts += _cells(index[..., [size > 1 for size in sizes.values()]], left, top, groups)
    return parts, MARGIN + max(count * (width + 2 * GAP), 400), 3 * LINE + height + GAP


def _cells(index: np.ndarray, left: float, top: float, groups: dict[tuple[int, ...], int]) -> list[str]:
    """The devices of one plane, and lines between neighbors along the last mesh axis. index[x, y] is the mesh index.

    `groups` numbers the groups along that axis, in the order in which they are drawn.
    """
    lines: list[str] = []
    boxes: list[str] = []
    columns, rows = index.shape[:2]
    for x, y in np.ndindex(columns, rows):
        place = tuple(index[x, y].tolist())
        px, py = left + x * (CELL + GAP), top + y * (CELL + GAP)
        for dx, dy in ((1, 0), (0, 1)):
            # Devices that differ only along the last mesh axis; with no mesh axis longer than 1, none do.
            if (
                place
                and x + dx < columns
                and y + dy < rows
                and place[:-1] == tuple(index[x + dx, y + dy].tolist())[:-1]
            ):
                start = f"M{px + CELL / 2:g} {py + CELL / 2:g}"
                lines.append(element("path", class_="link", d=f"{start}{f'h{CELL + GAP}' if dx else f'v{CELL + GAP}'}"))
        hue = groups.setdefault(place[:-1], len(groups)) * 0.381966 % 1  # the golden angle, as in draw_mesh_svg
        fill = hex_colour([round(255 * part) for part in hls_to_rgb(hue, 0.82, 0.65)])
        boxes.append(element("rect", class_="device", x=px, y=py, width=CELL, height=CELL, rx=6, fill=fill))
        label = listed(place).replace(" ", "") or "0"
        size = 12 if len(label) < 7 else 9
        boxes.append(svg_text(px + CELL / 2, py + CELL / 2 + 4, label, size=size, anchor="middle", class_="on-device"))
    return [*lines, *boxes]
