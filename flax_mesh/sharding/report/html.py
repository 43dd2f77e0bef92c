"""A sharding as one HTML file without external resources, which draws the shards of every array on the mesh.

Arrays and meshes of any rank are drawn by the same function: the last two dims become a grid of cells, the two dims
before them a grid of such grids, and so on. A shard and the devices that store it have the same color.
"""

import json
import re
from collections.abc import Collection, Sequence
from html import escape
from pathlib import Path
from typing import Any

from flax_mesh.text import count_text

TEMPLATE = Path(__file__).with_name("page.html")


def html_page(
    title: str,
    mesh: str,
    tiles: Sequence[tuple[str, str]],
    *,
    findings: Sequence[str] | None,
    traffic: str,
    rules: str,
    data: dict[str, Any],
) -> str:
    """The HTML document. `tiles` are pairs (label, value), `traffic` and `rules` are tables of `html_table`."""
    parts = {
        "title": escape(title),
        "mesh": escape(mesh),
        "tiles": html_tiles(tiles),
        "findings": "" if findings is None else html_findings(findings),
        "traffic": traffic,
        "rules": rules,
        "data": json.dumps(data).replace("<", "\\u003c"),  # a path that contains </script> must not end the element
    }
    page = TEMPLATE.read_text(encoding="utf-8")
    return re.sub("%([a-z]+)%", lambda match: parts[match[1]], page)  # in one pass, since a title may contain "%data%"


def html_tiles(tiles: Sequence[tuple[str, str]]) -> str:
    return "".join(f"<li><b>{escape(value)}</b><span>{escape(label)}</span></li>" for label, value in tiles)


def html_section(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A section with a table, or an empty text if there are no rows."""
    return f"<section><h2>{escape(title)}</h2>{html_table(heads, rows)}</section>" if rows else ""


def html_table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> str:
    """A table; the columns in `right` are right-aligned."""
    looks = [' class="number"' if head in right else "" for head in heads]

    def row_text(tag: str, cells: Sequence[str]) -> str:
        parts = (f"<{tag}{look}>{escape(cell)}</{tag}>" for look, cell in zip(looks, cells, strict=True))
        return f"<tr>{''.join(parts)}</tr>"

    body = "".join(row_text("td", row) for row in rows)
    return f'<div class="wide"><table><thead>{row_text("th", heads)}</thead><tbody>{body}</tbody></table></div>'


def html_findings(findings: Sequence[str]) -> str:
    if not findings:
        return '<p class="clean">No findings.</p>'
    items = "".join(f"<li>{escape(text)}</li>" for text in findings)
    title = count_text(len(findings), "finding")
    return f'<section class="findings"><h2>{title}</h2><ul>{items}</ul></section>'
