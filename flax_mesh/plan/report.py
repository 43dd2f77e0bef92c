"""A plan as text and as plain data."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from flax_mesh.plan.results import CATEGORIES, Memory, Part, Time, Traffic
from flax_mesh.plan.topology import Topology
from flax_mesh.sharding.rules import Finding
from flax_mesh.text import UNLIMITED, at_most, bytes_text, count_text, folded, listed, mesh_text, table_text

GIB, MS, TERA = 2**30, 1e-3, 1e12
WIDTH = 80  # columns
MOST_ROWS = 12  # of a table
MEMORY_HEADS = ("memory at the peak", "GiB", "share")
PART_HEADS = ("part", "times", "TFLOP", "HBM GiB", "compute", "memory", "network", "ms", "limit")
TRAFFIC_HEADS = ("axes", "kind", "times", "operand GiB", "ICI GiB", "DCN GiB", "ms")
PARTS_CAPTION = "time of each part, of one execution on one device in ms"
TRAFFIC_CAPTION = "traffic of one device per step"

# --- text ---


def number(value: float) -> str:
    """`1,234`, `12.3`, `0.0123`: three significant digits, or the integer."""
    if value == 0:
        return "0"
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    text = f"{value:.3g}"
    return text if "e" in text else f"{value:#.3g}".rstrip(".")


def gib(count: float) -> str:
    """The number of GiB of so many bytes."""
    return number(count / GIB)


def time_text(seconds: float) -> str:
    """`4.35 s`, `12.3 ms`."""
    return f"{number(seconds)} s" if seconds >= 0.9995 else f"{number(seconds / MS)} ms"


def of_capacity(used: int, capacity: int | None) -> str:
    """`61.2 of 95.0 GiB`, `512 MiB of 95.0 GiB`, or only what is used if the capacity is unknown."""
    if capacity is None:
        return bytes_text(used)
    (amount, unit), total = bytes_text(used).split(), bytes_text(capacity)
    return f"{amount} of {total}" if total.endswith(f" {unit}") else f"{amount} {unit} of {total}"


def hardware_line(topology: Topology, mesh: Mapping[str, int], width: int = UNLIMITED) -> str:
    return folded(f"{topology.text}: {count_text(topology.num_devices, 'device')}, mesh {mesh_text(mesh)}", width, "  ")


def memory_line(memory: Memory, width: int = UNLIMITED) -> str:
    verdict = {True: "fits", False: "does not fit", None: "unknown whether it fits"}[memory.fits]
    text = f"{verdict}: {of_capacity(memory.peak, memory.capacity)} per device"
    if memory.fits is False and memory.capacity is not None:
        text += f", {bytes_text(memory.peak - memory.capacity)} too much"
    if memory.reserve:
        text += f" (without a reserve of {bytes_text(memory.reserve)})"
    return folded(text, width, "  ")


def time_line(time: Time, num_devices: int, width: int = UNLIMITED) -> str:
    texts = [f"step {time_text(time.seconds)}", *rates(time)]
    if time.tokens_per_s is not None:
        texts.insert(2, f"{number(time.tokens_per_s / num_devices)} tok/s per device")
    if time.bubble:
        texts.append(f"bubble {time.bubble:.1%}")
    return folded(", ".join(texts), width, "  ")


def rates(time: Time) -> list[str]:
    """Tokens per second and MFU, as far as they are known."""
    tokens = [] if time.tokens_per_s is None else [f"{time.tokens_per_s:,.0f} tok/s"]
    return [*tokens, *([] if time.mfu is None else [f"mfu {time.mfu:.1%}"])]


def memory_text(memory: Memory, width: int = UNLIMITED) -> str:
    table = table_text(MEMORY_HEADS, memory_rows(memory), right=MEMORY_HEADS[1:])
    return "\n".join([table, *(folded(note, width, "  ") for note in memory_notes(memory))])


def memory_notes(memory: Memory) -> list[str]:
    """Where the peak is: its moment, and its group of a pipeline."""
    found = [f"state and batch, the arguments of the step, are {bytes_text(memory.arguments)}"]
    if memory.timeline:
        moment = max(memory.timeline, key=lambda moment: moment.total)
        found.append(f"the peak is during {moment.label}")
    if len(memory.groups) > 1:
        fullest = max(range(len(memory.groups)), key=memory.groups.__getitem__)
        peaks = [bytes_text(size) for size in memory.groups]
        if len(peaks) > MOST_ROWS:
            peaks = [*peaks[: MOST_ROWS - 2], "...", peaks[-1]]
        found.append(f"group {fullest} of the pipeline is the fullest; peaks of all groups: {listed(peaks)}")
    return found


def parts_text(parts: Sequence[Part], width: int = UNLIMITED) -> str:
    if not parts:
        return ""
    table = table_text(PART_HEADS, part_rows(parts), width, right=PART_HEADS[1:-1], wrap=PART_HEADS[:1])
    return f"{PARTS_CAPTION}\n{table}"


def traffic_text(traffic: Sequence[Traffic], width: int = UNLIMITED) -> str:
    if not traffic:
        return ""
    table = table_text(TRAFFIC_HEADS, traffic_rows(traffic), width, right=TRAFFIC_HEADS[2:], wrap=TRAFFIC_HEADS[:2])
    return f"{TRAFFIC_CAPTION}\n{table}"


def findings_text(findings: Sequence[Finding], width: int = UNLIMITED) -> str:
    lines = at_most([folded(f"- {finding}", width, "  ") for finding in findings])
    return "\n".join([count_text(len(findings), "finding") + ":", *lines]) if findings else "no findings"


def summary_text(summary: str, width: int = UNLIMITED) -> str:
    return folded(summary, width)


def forecast_line(memory: Memory, time: Time | None) -> str:
    """The plan in one line. Without `time` only the bytes, for devices whose speed and capacity are not known."""
    if time is None:
        return f"forecast: {bytes_text(memory.peak)} per device"
    texts = [f"forecast: {of_capacity(memory.peak, memory.capacity)} per device"]
    if memory.fits is False:
        texts.append("which does not fit")
    return ", ".join([*texts, f"{time_text(time.seconds)} per step", *rates(time)])


def measured_line(memory: Memory, time: Time, device_bytes: int | None, seconds: float | None) -> list[str]:
    """What was measured, as far as it is known, with the forecast and its error; an empty list if nothing is known."""
    texts = []
    if device_bytes:
        error = f"{memory.peak / device_bytes - 1:+.1%}"
        texts.append(f"{bytes_text(device_bytes)} per device (forecast {bytes_text(memory.peak)}, {error})")
    if seconds:
        error = f"{time.seconds / seconds - 1:+.1%}"
        texts.append(f"{time_text(seconds)} per step (forecast {time_text(time.seconds)}, {error})")
    return [f"measured: {', '.join(texts)}"] if texts else []


def tiles(memory: Memory, time: Time, num_devices: int) -> list[tuple[str, str]]:
    """Pairs (label, value): the numbers that are read first."""
    found = [("peak per device", of_capacity(memory.peak, memory.capacity)), ("step", time_text(time.seconds))]
    if time.tokens_per_s is not None:
        found.append(("tokens/s", f"{time.tokens_per_s:,.0f}"))
        found.append(("tokens/s per device", number(time.tokens_per_s / num_devices)))
    if time.mfu is not None:
        found.append(("MFU", f"{time.mfu:.1%}"))
    if time.bubble:
        found.append(("bubble", f"{time.bubble:.1%}"))
    verdict = {True: "yes", False: "no", None: "unknown"}[memory.fits]
    return [("fits", verdict), *found]


# --- rows of the tables, for text and HTML ---


def memory_rows(memory: Memory) -> list[tuple[str, str, str]]:
    shares = [(name, memory.at_peak.get(name, 0)) for name in CATEGORIES]
    used = [*((name, size) for name, size in shares if size), ("total", memory.peak)]
    decimals = 2 if memory.peak >= GIB else 5
    return [(name, f"{size / GIB:,.{decimals}f}", f"{size / (memory.peak or 1):.1%}") for name, size in used]


def part_rows(parts: Sequence[Part]) -> list[list[str]]:
    """One row for all parts that differ only in a number of their names. Of more rows, those with the most time."""
    rows = [(names, part) for names, part in group_parts(parts)]
    kept, rest = rows, []
    if len(rows) > MOST_ROWS:
        ranked = sorted(range(len(rows)), key=lambda i: rows[i][1].times * rows[i][1].seconds, reverse=True)
        chosen = set(ranked[: MOST_ROWS - 1])
        kept = [rows[i] for i in sorted(chosen)]
        rest = [[f"and {len(rows) - len(kept):,} more", *[""] * (len(PART_HEADS) - 1)]]
    return [*([name, *_cells(part)] for name, part in kept), *rest]


def _cells(part: Part) -> list[str]:
    times = (part.compute_seconds, part.memory_seconds, part.network_seconds, part.seconds)
    amounts = [number(part.flops / TERA), gib(part.hbm_bytes), *(number(seconds / MS) for seconds in times)]
    return [f"{part.times:,}", *amounts, part.limit]


def group_parts(parts: Sequence[Part]) -> list[tuple[str, Part]]:
    """(name, first part) of the parts with equal cells whose names differ only in one number: `stages 1-6 F`.

    In the order of the first part of each.
    """
    found: dict[tuple[str, ...], list[Part]] = {}
    for part in parts:
        found.setdefault((re.sub(r"\d+", "#", part.name, count=1), *_cells(part)), []).append(part)
    return [(_names_text([part.name for part in group]), group[0]) for group in found.values()]


def _names_text(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    before, after = re.split(r"\d+", names[0], maxsplit=1)
    numbers = sorted(int(re.findall(r"\d+", name)[0]) for name in names)
    return f"{re.sub('stage $', 'stages ', before)}{ranges(numbers)}{after}"


def ranges(numbers: Iterable[int]) -> str:
    """`0,2-5` of 0, 2, 3, 4, 5."""
    runs = [[i for _, i in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def axes_text(axes: Sequence[str]) -> str:
    """`dp+fsdp`, as in mesh.rules."""
    return "+".join(axes) or "-"


def traffic_rows(traffic: Sequence[Traffic]) -> list[list[str]]:
    rows = [
        [
            axes_text(item.axes),
            item.kind,
            f"{item.times:,}",
            gib(item.operand_bytes),
            gib(item.ici_bytes),
            gib(item.dcn_bytes),
            number(item.seconds / MS),
        ]
        for item in traffic
    ]
    if len(rows) <= MOST_ROWS:
        return rows
    rest = number(sum(item.seconds for item in traffic[MOST_ROWS - 1 :]) / MS)
    return [*rows[: MOST_ROWS - 1], [f"and {len(rows) - MOST_ROWS + 1:,} more", *[""] * (len(TRAFFIC_HEADS) - 2), rest]]


# --- plain data ---


def topology_dict(topology: Topology) -> dict[str, Any]:
    return {
        "text": topology.text,
        "chip": topology.chip.name,
        "num_devices": topology.num_devices,
        "num_slices": topology.num_slices,
        "slice_shape": list(topology.slice_shape),
    }


def memory_dict(memory: Memory) -> dict[str, Any]:
    return {
        "capacity": memory.capacity,
        "reserve": memory.reserve,
        "arguments": memory.arguments,
        "peak": memory.peak,
        "at_peak": dict(memory.at_peak),
        "groups": list(memory.groups),
        "timeline": [{"label": moment.label, "bytes": dict(moment.bytes)} for moment in memory.timeline],
    }


def time_dict(time: Time, num_devices: int) -> dict[str, Any]:
    """`schedule` is the text that `Schedule.parse` reads."""
    return {
        "seconds": time.seconds,
        "tokens_per_s": time.tokens_per_s,
        "tokens_per_s_per_device": None if time.tokens_per_s is None else time.tokens_per_s / num_devices,
        "mfu": time.mfu,
        "flops": time.flops,
        "bubble": time.bubble,
        "parts": [{**part._asdict(), "limit": part.limit} for part in time.parts],
        "schedule": None if time.schedule is None else str(time.schedule),
    }


def traffic_dicts(traffic: Sequence[Traffic]) -> list[dict[str, Any]]:
    return [{**item._asdict(), "axes": list(item.axes)} for item in traffic]
