"""SVG helpers shared by the drawings of meshes and schedules. Standard library only."""

import math
from collections.abc import Iterable, Sequence
from html import escape


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
