"""A plan as one HTML file without external resources or scripts: tables, and a drawing of the memory in SVG."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from flax_mesh.html import html_note, html_section, html_table
from flax_mesh.plan import report
from flax_mesh.plan.results import CATEGORIES, Memory, Time, Traffic
from flax_mesh.svg import element, svg_text, ticks
from flax_mesh.text import bytes_text

TEMPLATE = Path(__file__).with_name("page.html")
WIDTH = 960  # of a drawing, in units of its coordinates
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 18, 34  # margins
MEMORY_HEIGHT, LINE = 340, 18


def memory_section(memory: Memory) -> str:
    notes = [html_note(note) for note in report.memory_notes(memory)]
    chart = [_draw_memory(memory)] if memory.timeline else []
    return html_section("Memory of one device over a step", *chart, html_table(report.memory_table(memory)), *notes)


def time_section(time: Time) -> str:
    return html_section("Time of the parts", html_table(report.part_table(time.parts))) if time.parts else ""


def traffic_section(traffic: Sequence[Traffic]) -> str:
    if not traffic:
        return html_section("Traffic", html_note("The step has no collectives."))
    return html_section("Traffic by mesh axis", html_table(report.traffic_table(traffic)))


# --- drawings as inline SVG; colors are classes of page.html ---


def _draw_memory(memory: Memory) -> str:
    """Stacked bars of the categories, one bar per moment, and the capacity as a line."""
    moments = memory.timeline
    top = max(memory.peak, *(moment.total for moment in moments), 1)
    if memory.capacity is not None and memory.capacity < 4 * top:
        top = max(top, memory.capacity)
    scale_y = _Linear(0, top * 1.06, MEMORY_HEIGHT - BOTTOM, TOP)
    step = (WIDTH - LEFT - RIGHT) / len(moments)
    names = [name for name in CATEGORIES if any(moment.bytes.get(name) for moment in moments)]
    parts = [*_byte_axis(scale_y)]
    lower = [0] * len(moments)
    for name in names:
        upper = [below + moment.bytes.get(name, 0) for below, moment in zip(lower, moments, strict=True)]
        parts.append(
            _area([scale_y(y) for y in lower], [scale_y(y) for y in upper], step, f"c{CATEGORIES.index(name)}")
        )
        lower = upper
    parts += _capacity(memory, scale_y)
    for i, moment in enumerate(moments):
        size = {"x": _text(LEFT + i * step), "y": TOP, "width": _text(step), "height": MEMORY_HEIGHT - TOP - BOTTOM}
        hover = element("rect", class_="hover", **size)
        parts.append(_with_title(hover, f"{moment.label}: {bytes_text(moment.total)}"))
    parts.append(svg_text(LEFT, MEMORY_HEIGHT - 12, "start of the step", size=12, class_="dim"))
    parts.append(svg_text(WIDTH - RIGHT, MEMORY_HEIGHT - 12, "end", size=12, anchor="end", class_="dim"))
    legend, height = _legend([(f"c{CATEGORIES.index(name)}", name) for name in names], MEMORY_HEIGHT)
    return _drawing(height, [*parts, *legend], "memory over time")


def _area(lower: Sequence[float], upper: Sequence[float], step: float, look: str) -> str:
    """The area between two step functions, as one path: thousands of rects would be a large page."""
    over = "".join(f"V{_text(y)}H{_text(LEFT + step * (i + 1))}" for i, y in enumerate(upper))
    under = "".join(f"V{_text(y)}H{_text(LEFT + step * i)}" for i, y in reversed(list(enumerate(lower))))
    return element("path", class_=look, d=f"M{LEFT} {_text(lower[0])}{over}{under}Z")


def _byte_axis(scale: "_Linear") -> list[str]:
    unit = bytes_text(scale.last).split()[1]
    size = 1024 ** ("B", "KiB", "MiB", "GiB", "TiB", "PiB").index(unit)
    parts = []
    for mark in ticks(scale.last / size, 8):
        y = _text(scale(mark * size))
        parts.append(element("path", class_="grid", d=f"M{LEFT} {y}H{WIDTH - RIGHT}"))
        parts.append(svg_text(LEFT - 8, float(y) + 4, f"{mark:g}", size=12, anchor="end", class_="dim"))
    return [*parts, svg_text(4, TOP + 2, unit, size=12, class_="dim")]


def _capacity(memory: Memory, scale: "_Linear") -> list[str]:
    if memory.capacity is None:
        return []
    text = f"capacity {bytes_text(memory.capacity)}"
    if memory.capacity > scale.last:
        return [svg_text(WIDTH - RIGHT, TOP - 4, f"{text} is above this drawing", size=12, anchor="end", class_="over")]
    y = scale(memory.capacity)
    line = element("path", class_="limit", d=f"M{LEFT} {_text(y)}H{WIDTH - RIGHT}")
    return [line, svg_text(WIDTH - RIGHT, _text(y - 5), text, size=12, anchor="end", class_="over")]


def _drawing(height: float, parts: Iterable[str], label: str, width: float = WIDTH) -> str:
    """An inline SVG element, which shrinks with the window. Its colors are classes of the page."""
    size = f'viewBox="0 0 {_text(width)} {_text(height)}" style="max-width:{_text(width)}px"'
    body = "\n".join([element("title", label), *parts])
    return f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing" role="img" {size}>\n{body}\n</svg>'


class _Linear:
    """A linear scale from [first, last] to pixels."""

    def __init__(self, first: float, last: float, start: float, end: float):
        self.first, self.last, self._start = first, last, start
        self._factor = (end - start) / ((last - first) or 1)

    def __call__(self, value: float) -> float:
        return self._start + (value - self.first) * self._factor


def _legend(entries: Sequence[tuple[str, str]], top: float) -> tuple[list[str], float]:
    """(elements, bottom): a box with a class of the page and a name for every entry."""
    parts, x, y = [], float(LEFT), top + 4
    for look, name in entries:
        width = 26 + 7 * len(name)
        if x + width > WIDTH and x > LEFT:
            x, y = float(LEFT), y + LINE + 4
        parts.append(element("rect", class_=look, x=_text(x), y=_text(y), width=14, height=14, rx=2))
        parts.append(svg_text(_text(x + 20), _text(y + 12), name, size=12, class_="ink"))
        x += width + 10
    return parts, y + LINE + 8


def _with_title(shape: str, text: str) -> str:
    """An empty element that shows `text` while the pointer is on it."""
    return f"{shape.removesuffix('/>')}>{element('title', text)}</{shape[1:].split()[0]}>"


def _text(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
