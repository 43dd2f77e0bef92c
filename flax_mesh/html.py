"""HTML pages without external resources (style sheet, sections, tables, tiles, findings), and SVG drawings in them."""

import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from flax_mesh.text import Table, count_text

STYLE = Path(__file__).with_name("page.css")


def html_page(template: Path, **parts: str) -> str:
    """The template with `parts` in place of %name%, and the style sheet of all pages in place of %style%."""
    parts["style"] = STYLE.read_text(encoding="utf-8")
    page = template.read_text(encoding="utf-8")
    return re.sub("%([a-z]+)%", lambda match: parts[match[1]], page)  # in one pass, since a title may contain "%data%"


def html_frame(page: str) -> str:
    """A page as a frame inside another page, such as a notebook, without effect on the styles of that page."""
    return f'<iframe srcdoc="{escape(page)}" style="width: 100%; height: 30em; border: 0"></iframe>'


def html_section(title: str, *contents: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n" + "\n".join(contents) + "</section>"


def html_table(table: Table) -> str:
    """A table below its caption."""
    looks = [' class="number"' if head in table.right else "" for head in table.heads]

    def row_text(tag: str, cells: Sequence[str]) -> str:
        parts = (f"<{tag}{look}>{escape(cell)}</{tag}>" for look, cell in zip(looks, cells, strict=True))
        return f"<tr>{''.join(parts)}</tr>"

    caption = f'<p class="note">{escape(table.caption)}</p>\n' if table.caption else ""
    head, body = row_text("th", table.heads), "".join(row_text("td", row) for row in table.rows)
    return f'{caption}<div class="wide"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'


def html_tiles(tiles: Sequence[tuple[str, str]]) -> str:
    """Pairs (label, value) as boxes."""
    return "".join(f"<li><b>{escape(value)}</b><span>{escape(label)}</span></li>" for label, value in tiles)


def html_findings(findings: Sequence[object]) -> str:
    if not findings:
        return '<p class="clean">No findings.</p>'
    items = "".join(f"<li>{escape(str(finding))}</li>" for finding in findings)
    title = count_text(len(findings), "finding")
    return f'<section class="findings"><h2>{title}</h2><ul>{items}</ul></section>'


def svg_document(width: float, height: float, parts: Iterable[str], style: str = "") -> str:
    """An SVG document with one of `parts` per line on a white background; `style` is CSS."""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    root = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    styles = [f"<style>{style}</style>"] if style else []
    return "\n".join([root, *styles, element("rect", width="100%", height="100%", fill="white"), *parts, "</svg>\n"])


def element(tag: str, content: str | None = None, **attributes: object) -> str:
    """`<tag name="value"/>`, or with `content` as its text. `stroke_width` becomes stroke-width, `class_` class."""
    names = (f' {name.rstrip("_").replace("_", "-")}="{value}"' for name, value in attributes.items())
    head = f"<{tag}{''.join(names)}"
    return f"{head}/>" if content is None else f"{head}>{escape(content)}</{tag}>"


def svg_text(x: object, y: object, content: str, *, size: int, anchor: str = "start", **attributes: object) -> str:
    """A text element; x is its start, middle or end, according to `anchor`, and y is its baseline."""
    return element("text", content, x=x, y=y, font_size=size, text_anchor=anchor, **attributes)


def hex_colour(parts: Sequence[int]) -> str:
    """`#rrggbb` from red, green and blue in 0..255."""
    return "#" + "".join(f"{part:02x}" for part in parts)


def ticks(most: float, intervals: int) -> list[float]:
    """The multiples from 0 to `most` of 1, 2 or 5 times a power of ten, with at most this number of intervals."""
    least = most / intervals or 1.0
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * part for part in (1, 2, 5, 10) if power * part >= least)
    return [step * i for i in range(int(most / step + 1e-9) + 1)]
