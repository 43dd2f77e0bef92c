"""A plan as one HTML file without external resources or scripts: tables, and drawings in SVG."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

import numpy as np

from flax_mesh.hardware import Chip
from flax_mesh.mesh.describe import MeshLayout, place_texts
from flax_mesh.mesh.torus.torus import arrange
from flax_mesh.mpmd.schedules.draw import draw_simulation_svg
from flax_mesh.plan import report
from flax_mesh.plan.draw import draw_corner, draw_memory, draw_roofline, draw_traffic
from flax_mesh.plan.results import Memory, Time, Traffic
from flax_mesh.plan.topology import Topology, placement, torus_of
from flax_mesh.sharding.report.html import html_findings, html_table, html_tiles
from flax_mesh.text import count_text, listed

TEMPLATE = Path(__file__).with_name("page.html")
MOST_ACTIONS = 900


def page(
    title: str,
    head: str,
    summary: str,
    *,
    tiles: Sequence[tuple[str, str]],
    findings: Sequence[str],
    sections: Sequence[str],
) -> str:
    parts = {
        "title": escape(title),
        "head": escape(head),
        "summary": escape(summary),
        "tiles": html_tiles(tiles),
        "findings": html_findings(findings),
        "sections": "\n".join(filter(None, sections)),
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    return re.sub("%([a-z]+)%", lambda match: parts[match[1]], text)  # in one pass, since a title may contain "%head%"


def section(title: str, *contents: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n" + "\n".join(contents) + "</section>"


def paragraph(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def memory_section(memory: Memory) -> str:
    heads, rows = report.memory_table(memory)
    table = html_table(heads, rows, right=heads[1:])
    notes = [paragraph(note) for note in report.memory_notes(memory)]
    chart = [draw_memory(memory)] if memory.timeline else []
    return section("Memory of one device over a step", *chart, table, *notes)


def time_section(time: Time, chip: Chip) -> str:
    if not time.parts:
        return ""
    heads, rows = report.part_table(time.parts)
    table = html_table(heads, rows, right=heads[1:-1])
    return section("Time of the parts", draw_roofline(time.parts, chip), paragraph(report.PARTS_CAPTION), table)


def schedule_section(time: Time) -> str:
    if time.schedule is None or time.simulation is None:
        return ""
    svg = draw_simulation_svg(time.schedule, time.simulation, "s", most=MOST_ACTIONS)
    return section("Schedule of the pipeline", f'<div class="paper">{svg}</div>')


def traffic_section(traffic: Sequence[Traffic]) -> str:
    if not traffic:
        return section("Traffic", paragraph("The step has no collectives."))
    heads, rows = report.traffic_table(traffic)
    table = html_table(heads, rows, right=heads[2:])
    return section("Traffic by mesh axis", draw_traffic(traffic), paragraph(report.TRAFFIC_CAPTION), table)


def mesh_section(topology: Topology, mesh: Mapping[str, int]) -> str:
    """The placement of the mesh axes, and a corner of one slice or domain: the others repeat it."""
    splits, assignment = placement(topology, tuple(mesh.items()))
    inner = tuple(size // split for size, split in zip(mesh.values(), splits, strict=True))
    torus = None if assignment is None else replace(torus_of(topology), kind=topology.chip.name)
    granule = "slice" if topology.chip.torus else {"gpu": "NVLink domain", "cpu": "host"}[topology.chip.platform]
    layout = MeshLayout(granule, splits, np.broadcast_to(0, inner), torus, assignment=assignment)
    placed = zip(mesh, mesh.values(), place_texts(layout), strict=True)
    heads = ("axis", "size", "placement")
    table = html_table(heads, [[name, f"{size:,}", text] for name, size, text in placed if size > 1], right=("size",))
    if torus is None or assignment is None:
        columns = next((size for size in reversed(inner) if size > 1), 1)
        places, names = np.arange(math.prod(inner)).reshape(-1, columns).T, ("across", "down")
    else:  # the position in the mesh of every device of the torus
        ordered = arrange(np.arange(math.prod(torus.shape)).reshape(torus.shape), assignment)
        places, names = np.argsort(ordered, axis=None).reshape(torus.shape), torus.axes
    size = topology.num_devices // topology.num_domains
    note = (
        f"{count_text(topology.num_domains, granule)} of {torus or count_text(size, 'device')}. A box is a device with "
        f"its indices along {listed(name for name, n in zip(mesh, inner, strict=True) if n > 1) or 'no axis'}; lines "
        "connect neighbors along the last of these axes, and colors are the groups along it."
    )
    drawing = draw_corner(places, names, dict(zip(mesh, inner, strict=True)))
    return section("Mesh on the devices", drawing, paragraph(note), table)
