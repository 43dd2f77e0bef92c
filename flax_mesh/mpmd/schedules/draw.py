"""A simulated schedule as an SVG document, optionally below the measured timeline."""

from collections import Counter
from collections.abc import Iterable, Sequence

from flax_mesh.fields import check_types
from flax_mesh.html import element, hex_colour, svg_document, svg_text, ticks
from flax_mesh.mpmd.schedules.schedule import Action, Schedule
from flax_mesh.mpmd.schedules.simulate import Costs, Simulation, StageCost, simulate
from flax_mesh.mpmd.schedules.text import heading, summary, time_text

Event = tuple[int, Action, float, float]  # group, action, start, end

BAR, CURVE, GAP, LINE, MARGIN = 24, 14, 10, 18, 20  # heights of the parts of a row, in pixels
NAME_WIDTH, SIDE_WIDTH = 64, 132
SAMPLE, LETTER, TITLE_LETTER = 19, 6.3, 7.3  # widths: a sample and a letter of the legend, a letter of a title
_W_INSET = 5
LEAST_BOX, LEAST_WIDTH, MOST_WIDTH = 17, 560, 2400
# Distinguishable with every kind of colour vision, in both shades (tests/mpmd/schedules/test_draw.py). W is also lower.
_COLOURS = {"F": (51, 34, 136), "B": (230, 159, 0), "W": (0, 158, 115)}
KINDS = {"F": "forward", "B": "backward", "W": "weight gradients"}
LIGHTER, LIGHTEST = 0.45, 0.7  # share of white that every further stage of a group adds, and the maximum of the sum
IDLE: dict[str, str] = {"fill": "white", "stroke": "#bbb", "stroke_width": "0.6"}
CURVE_COLOUR, INK = "#9a9a9a", "#222"


@check_types
def draw_schedule_svg(schedule: Schedule, costs: Costs = StageCost()) -> str:  # noqa: B008  an immutable default
    """The simulated schedule as SVG: per group a bar along time, with the number of stored activations below it.

    The number in a box is the microbatch, the colour is the kind of action, and the shade is the stage within the
    group. W is lower than F and B. White is idle time. On the right are the busy fraction and the peak activations.

    Example:
        >>> from flax_mesh.mpmd.schedules import draw_schedule_svg, make_schedule
        >>> draw_schedule_svg(make_schedule("1f1b", num_groups=4, num_microbatches=8))[:4]
        '<svg'
    """
    result = simulate(schedule, costs)
    return _document([_simulated(schedule, costs, result)], schedule)


def draw_timeline_svg(schedule: Schedule, measured: Iterable[Event], costs: Costs, unit: str = "") -> str:
    """A measured timeline above the same schedule simulated with `costs`, on one time scale.

    `measured` has (group, action, start, end) of every action, in the unit of `costs`; `unit` is the printed name of
    this unit. Time starts at the first action.

    Example:
        >>> from flax_mesh.mpmd.schedules import StageCost, draw_timeline_svg, make_schedule, simulate
        >>> schedule = make_schedule("1f1b", num_groups=2, num_microbatches=2)
        >>> times = simulate(schedule).times  # in place of measured ones
        >>> measured = [(action.stage, action, start, end) for action, (start, end) in times.items()]
        >>> draw_timeline_svg(schedule, measured, StageCost(), "ms")[:4]
        '<svg'
    """
    measured = sorted(measured, key=lambda event: event[2])
    if not measured:
        raise ValueError("measured has no events to draw")
    origin = measured[0][2]
    events = [(group, action, start - origin, end - origin) for group, action, start, end in measured]
    result = simulate(schedule, costs)
    span = max(end for *_, end in events)
    busy = sum(end - start for _, _, start, end in events)
    bubble = 1 - busy / (schedule.num_groups * span) if span else 0.0
    average = busy / span if span else 0.0
    text = f"measured: {time_text(span, unit)}, bubble {bubble:.1%}, {average:.2f} groups busy on average"
    return _document([(text, events), _simulated(schedule, costs, result, unit)], schedule, unit)


_Panel = tuple[str, list[Event]]


def _simulated(schedule: Schedule, costs: Costs, result: Simulation, unit: str = "") -> _Panel:
    return f"{heading(schedule, costs)}: {summary(result, unit)}", events_of(schedule, result)


def events_of(schedule: Schedule, result: Simulation) -> list[Event]:
    """The simulated actions as events."""
    return [(schedule.stage_to_group[action.stage], action, *times) for action, times in result.times.items()]


def _document(panels: Sequence[_Panel], schedule: Schedule, unit: str = "") -> str:
    span = max((end for _, events in panels for *_, end in events), default=0.0)
    # Actions that take almost no time, such as the empty B of a first stage, do not set the scale.
    lengths = [end - start for _, events in panels for *_, start, end in events]
    shortest = min((length for length in lengths if length > span / 500), default=1.0)
    wide = min(max(span * LEAST_BOX / shortest, LEAST_WIDTH), MOST_WIDTH) if span else LEAST_WIDTH
    scale = wide / span if span else 1.0
    height = schedule.num_groups * (BAR + CURVE + GAP)
    body: list[str] = []
    top = MARGIN
    for title, events in panels:
        body.append(_text(MARGIN, top + 4, title, size=14))
        body += _panel(events, schedule, top + LINE, scale, wide)
        top += LINE + height
        body += _axis(top, scale, span, unit)
        top += 2 * LINE
    title = max(len(title) for title, _ in panels)
    width = round(2 * MARGIN + max(NAME_WIDTH + wide + SIDE_WIDTH, TITLE_LETTER * title))
    legend, height = _legend(schedule, top, width - MARGIN)
    style = f"text{{font-family:Helvetica,Arial,sans-serif}}.n{{font-size:10px;text-anchor:middle}}{_styles(schedule)}"
    return svg_document(width, top + height + MARGIN, [*body, *legend], style)


def _panel(events: Sequence[Event], schedule: Schedule, top: float, scale: float, wide: float) -> list[str]:
    """The bars of all groups, each with its name, busy fraction and stored activations."""
    span = max((end for *_, end in events), default=0.0)
    events_of: list[list[Event]] = [[] for _ in range(schedule.num_groups)]
    for event in events:
        events_of[event[0]].append(event)
    shades = _shades(schedule.stage_to_group)
    curves = [_stored(of_group, schedule.splits_backward) for of_group in events_of]
    peaks = [max(count for _, count in curve) for curve in curves]
    body: list[str] = []
    for group, (of_group, curve, peak) in enumerate(zip(events_of, curves, peaks, strict=True)):
        upper = top + group * (BAR + CURVE + GAP)
        left = MARGIN + NAME_WIDTH
        busy = sum(end - start for _, _, start, end in of_group)
        body.append(_text(MARGIN, upper + 16, f"group {group}", size=12))
        body.append(element("rect", x=left, y=upper, width=f"{wide:g}", height=BAR, **IDLE))
        body += [_box(event, shades[event[1].stage], left, upper, scale) for event in of_group]
        body.append(_curve(curve, left, upper + BAR + CURVE, scale, max(peaks), span))
        side = left + wide + 10
        body.append(_text(side, upper + 11, f"busy {busy / span if span else 1:.1%}", size=12))
        body.append(_text(side, upper + BAR + CURVE - 2, f"peak {peak} activations", size=12))
    return body


def _box(event: Event, shade: int, left: float, upper: float, scale: float) -> str:
    _, action, start, end = event
    x, width = left + start * scale, (end - start) * scale
    inset = _W_INSET if action.kind == "W" else 0
    kind, length = f"{action.kind}{shade}", f"{max(width - 0.8, 0.4):.1f}"
    box = element("rect", class_=kind, x=f"{x:.1f}", y=upper + inset, width=length, height=BAR - inset)
    label = str(action.microbatch)
    if width < 6 * len(label):
        return box
    return box + element("text", label, class_=f"n t{kind}", x=f"{x + width / 2 - 0.4:.1f}", y=upper + 17)


def _stored(events: Iterable[Event], splits_backward: bool) -> list[tuple[float, int]]:
    """(time, number of activations from then on) of one group: stored when F starts, released when B or W ends."""
    release = "W" if splits_backward else "B"
    changes = [(start, 1) for _, action, start, _ in events if action.kind == "F"]
    changes += [(end, -1) for _, action, _, end in events if action.kind == release]
    count, curve = 0, [(0.0, 0)]
    if all(change > 0 for _, change in changes):
        return curve  # forward only: nothing is stored
    for time, change in sorted(changes):  # at equal times releases come first
        count += change
        curve.append((time, count))
    return curve


def _curve(curve: Sequence[tuple[float, int]], left: float, base: float, scale: float, peak: int, span: float) -> str:
    points: list[str] = []
    height = 0.0
    for time, count in curve:
        x, before, height = left + time * scale, height, (CURVE - 3) * count / max(peak, 1)
        points += [f"{x:.1f},{base - before:.1f}", f"{x:.1f},{base - height:.1f}"]
    end = left + span * scale
    points += [f"{end:.1f},{base - height:.1f}", f"{end:.1f},{base}", f"{left},{base}"]
    return element("polygon", points=" ".join(points), fill=CURVE_COLOUR)


def _axis(y: float, scale: float, span: float, unit: str) -> list[str]:
    left = MARGIN + NAME_WIDTH
    lines = [
        _mark(f"M{left} {y}h{span * scale:.1f}"),
        _text(MARGIN, y + 14, f"time, {unit}" if unit else "time", size=11),
    ]
    for mark in ticks(span, 12):
        x = left + mark * scale
        lines.append(_mark(f"M{x:.1f} {y}v4"))
        lines.append(_text(x, y + 15, f"{mark:.6g}", size=11, anchor="middle"))
    return lines


def _legend(schedule: Schedule, y: float, right: float) -> tuple[list[str], float]:
    """The elements of the legend and its height; entries that would end right of `right` start a new line."""
    shades = 1 + max(_shades(schedule.stage_to_group))
    of_group = f" (stage 1{' to' if shades > 2 else ','} {shades} of its group)" if shades > 1 else ""
    texts = dict(KINDS) | ({"B": "input gradients"} if schedule.splits_backward else {})
    entries: list[tuple[list[dict[str, str]], float, str]] = []  # looks and height of the samples, label
    for kind in KINDS:
        if any(action.kind == kind for row in schedule.rows for action in row):
            height = 18 - (_W_INSET if kind == "W" else 0)
            looks: list[dict[str, str]] = [{"class_": f"{kind}{shade}"} for shade in range(shades)]
            entries.append((looks, height, f"{kind}: {texts[kind]}{of_group}"))
    entries.append(([IDLE], 18, "idle"))
    entries.append(([{"fill": CURVE_COLOUR}], 9, "stored activations"))
    entries.append(([], 0, "number: microbatch"))
    parts: list[str] = []
    x, top = float(MARGIN), y
    for looks, height, label in entries:
        width = SAMPLE * len(looks) + 2 + LETTER * len(label)
        if x > MARGIN and x + width > right:
            x, top = float(MARGIN), top + LINE + 6
        for look in looks:
            parts.append(element("rect", x=f"{x:.1f}", y=top + 18 - height, width=16, **look, height=height))
            x += SAMPLE
        parts.append(_text(x + 2, top + 13, label, size=12))
        x += 18 + LETTER * len(label)
    return parts, top - y + LINE


def _shades(stage_to_group: Sequence[int]) -> list[int]:
    """The number of every stage among the stages of its group."""
    counts: Counter[int] = Counter()
    shades: list[int] = []
    for group in stage_to_group:
        shades.append(counts[group])
        counts[group] += 1
    return shades


def _styles(schedule: Schedule) -> str:
    rules: list[str] = []
    for (kind, chunk), fill in fills(1 + max(_shades(schedule.stage_to_group))).items():
        light = sum(weight * part for weight, part in zip((0.299, 0.587, 0.114), fill, strict=True))
        rules.append(f".{kind}{chunk}{{fill:{hex_colour(fill)}}}")
        rules.append(f".t{kind}{chunk}{{fill:{INK if light > 110 else 'white'}}}")
    return "".join(rules)


def fills(stages_per_group: int) -> dict[tuple[str, int], tuple[int, ...]]:
    """{(kind, number of the stage within its group): (red, green, blue)}."""
    step = min(LIGHTER, LIGHTEST / max(stages_per_group - 1, 1))
    return {
        (kind, chunk): tuple(round(part + (255 - part) * (chunk * step)) for part in colour)
        for kind, colour in _COLOURS.items()
        for chunk in range(stages_per_group)
    }


def _text(x: float, y: float, content: str, *, size: int, anchor: str = "start") -> str:
    return svg_text(f"{x:.1f}", y, content, size=size, anchor=anchor, fill=INK)


def _mark(path: str) -> str:
    return element("path", d=path, stroke="#888")
