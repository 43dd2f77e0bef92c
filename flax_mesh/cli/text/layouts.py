"""A search of layouts as text and as plain data: the best layouts, why others are slower, the command of the best."""

import math
import shlex
from collections.abc import Sequence

from flax_mesh.plan.report import WIDTH, number, of_capacity, time_text
from flax_mesh.plan.search.search import SAME, LayoutSearch, Planned
from flax_mesh.text import Table, at_most, bytes_text, count_text, folded, listed

MOST_LAYOUTS, MOST_REASONS = 10, 6
UNITS = {"tok": "tokens", "examples": "examples"}  # as in the rows of metrics
HEADS = ["step", "mfu", "GiB", "settings", "compared with the first"]


def to_text(search: LayoutSearch, command: Sequence[str], width: int = WIDTH) -> str:
    """The best layouts, why others are excluded, and the command that runs the best; `command` are its first words."""
    sections = [_head(search, width), _table(search, width), _excluded(search, width)]
    if search.best is None:
        nearest = search.planned[0].plan.memory
        text = f"No layout fits: the one with the least memory needs {bytes_text(nearest.missing)} more per device, "
        sections.append(folded(f"{text}{of_capacity(nearest.peak, nearest.capacity)}.", width))
    else:
        sections.append(shlex.join([*command, *search.best.overrides]))
    return "\n\n".join(filter(None, sections))


def to_dict(search: LayoutSearch) -> dict[str, object]:
    """The same for `json.dumps`: bytes, seconds, tokens/s."""
    first = search.planned[0]
    return {
        "topology": search.topology.text,
        "num_devices": search.topology.num_devices,
        "axes": list(search.axes),
        "num_layouts": search.num_layouts,
        "fits": first.plan.fits,
        "layouts": [_layout_dict(each, first) for each in search.planned],
        "excluded": dict(search.excluded.most_common()),
    }


def comparison(planned: Planned, first: Planned) -> str:
    """Why a layout is not ranked first; "" for the first layout if it fits."""
    memory = planned.plan.memory
    if planned.plan.fits is False:
        return f"does not fit: {bytes_text(memory.missing)} too much, most are {memory.largest}"
    if planned is first:
        return ""
    ratio = planned.seconds_per_token / first.seconds_per_token
    if ratio < 1 + SAME:
        other = "a larger batch" if planned.tokens > first.tokens else "more memory"
        return f"as fast, with {other}"
    mine, best = _seconds(planned), _seconds(first)
    most = max(mine, key=lambda name: mine[name] - best[name])
    return f"{ratio - 1:.0%} slower: {_cause(planned, most, mine[most], best[most])}"


def _cause(planned: Planned, name: str, mine: float, best: float) -> str:
    times = f" {number(mine / best)} times" if best and mine / best < 100 else ""
    if name == "bubble":
        return f"bubble {planned.plan.time.bubble:.0%}"
    if name == "network" and planned.plan.traffic:
        traffic = planned.plan.traffic[0]
        return f"network{times}, most {traffic.kind} over {listed(traffic.axes)}"
    words = {"memory": f"memory traffic{times}", "host": f"copies from and to the host{times}"}
    return words.get(name, f"{name}{times}")


def _seconds(planned: Planned) -> dict[str, float]:
    """Seconds per token of one device by resource, and of the bubble; they may overlap."""
    time = planned.plan.time
    groups = time.schedule.num_groups if time.schedule else 1
    parts = [(part, part.times / groups / planned.tokens) for part in time.parts]
    units = ("compute", "memory", "network", "host")
    return {
        **{unit: math.fsum(getattr(part, f"{unit}_seconds") * times for part, times in parts) for unit in units},
        "bubble": time.bubble * time.seconds / planned.tokens,
    }


def _head(search: LayoutSearch, width: int) -> str:
    devices, layouts = count_text(search.topology.num_devices, "device"), count_text(search.num_layouts, "layout")
    text = f"{search.topology.text}: {devices}, {layouts} over {listed(search.axes)}; {len(search.planned)} planned"
    return folded(text, width, "  ")


def _table(search: LayoutSearch, width: int) -> str:
    first = search.planned[0]
    rows: list[list[str]] = []
    for planned in search.planned[:MOST_LAYOUTS]:
        mfu = "" if planned.plan.time.mfu is None else f"{planned.plan.time.mfu:.1%}"
        memory = number(planned.plan.memory.peak / 2**30)
        numbers = [f"{1 / planned.seconds_per_token:,.0f}", time_text(planned.plan.time.seconds), mfu, memory]
        words = " ".join(planned.overrides) or "(as in the recipe)"
        rows.append([*numbers, words, comparison(planned, first)])
    heads = [f"{first.unit}/s", *HEADS]
    text = Table(heads, rows, right=heads[:4], wrap=heads[4:]).to_text(width)
    rest = len(search.planned) - MOST_LAYOUTS
    return text if rest <= 0 else f"{text}\nand {count_text(rest, 'more layout')} that were planned; all are in --json"


def _excluded(search: LayoutSearch, width: int) -> str:
    if not search.excluded:
        return ""
    ranked = search.excluded.most_common()
    lines = [folded(f"  {count:,}: {reason}", width, "    ") for reason, count in ranked]
    return "\n".join([f"{count_text(search.excluded.total(), 'layout')} excluded:", *at_most(lines, MOST_REASONS)])


def _layout_dict(planned: Planned, first: Planned) -> dict[str, object]:
    return {
        "settings": dict(planned.settings),
        "fits": planned.plan.fits,
        "peak": planned.plan.memory.peak,
        "capacity": planned.plan.memory.capacity,
        "seconds": planned.plan.time.seconds,
        f"{UNITS[planned.unit]}_per_s": 1 / planned.seconds_per_token,
        "mfu": planned.plan.time.mfu,
        "bubble": planned.plan.time.bubble,
        "comparison": comparison(planned, first),
    }
