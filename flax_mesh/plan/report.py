"""A plan as text and as plain data."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from flax_mesh.plan.results import CATEGORIES, Memory, Part, Time, Traffic
from flax_mesh.plan.topology import Topology
from flax_mesh.sharding.rules import Finding
from flax_mesh.text import (
    Table,
    at_most,
    bytes_text,
    count_text,
    folded,
    grouped,
    listed,
    mesh_text,
    plain_data,
)


class Unit(NamedTuple):
    name: str
    size: float
    least: float  # the largest value of a table in this unit is at least that


FLOPS = (Unit("PFLOP", 1e15, 1e17), Unit("TFLOP", 1e12, 1e11), Unit("GFLOP", 1e9, 1e8), Unit("MFLOP", 1e6, 0))
BYTES = (Unit("TiB", 2**40, 2**47), Unit("GiB", 2**30, 2**27), Unit("MiB", 2**20, 2**17), Unit("KiB", 2**10, 0))
TIMES = (Unit("s", 1, 100), Unit("ms", 1e-3, 1e-4), Unit("µs", 1e-6, 0))
WIDTH = 80  # columns
MOST_ROWS = 12  # of a table
SMALL = 4 * 2**20  # bytes of a peak below which XLA's buffers of a few KiB decide, which a plan does not count
VERDICTS: dict[bool | None, str] = {True: "fits", False: "does not fit", None: "unknown whether it fits"}


# --- text ---


def number(value: float) -> str:
    """`1,234`, `12.3`, `0.012`: three significant digits, all digits of an integer part, at most three decimals."""
    if value == 0 or value >= 99.95:
        return f"{value:,.0f}"
    if value >= 0.9995:
        return f"{value:#.3g}"
    return f"{value:.3f}" if value >= 0.0005 else "<0.001"


def time_text(seconds: float) -> str:
    """`4.35 s`, `12.3 ms`, `150 µs`."""
    unit = TIMES[0] if seconds >= 0.9995 else unit_of([seconds], TIMES)  # seconds from one second on
    return f"{number(seconds / unit.size)} {unit.name}"


def unit_of(values: Iterable[float], units: Sequence[Unit]) -> Unit:
    """The largest unit that is not too large for the largest value."""
    largest = max(values, default=0.0)
    return next(unit for unit in units if largest >= unit.least)


def of_capacity(used: int, capacity: int | None) -> str:
    """`61.2 of 95.0 GiB`, `512 MiB of 95.0 GiB`, or only the used bytes if the capacity is unknown."""
    if capacity is None:
        return bytes_text(used)
    (amount, unit), total = bytes_text(used).split(), bytes_text(capacity)
    return f"{amount} of {total}" if total.endswith(f" {unit}") else f"{amount} {unit} of {total}"


def peak_text(memory: Memory, capacity: int | None) -> str:
    """The peak, or only that it is small."""
    if not _is_small(memory):
        return of_capacity(memory.peak, capacity)
    return "at most a few MiB" + ("" if capacity is None else f" of {bytes_text(capacity)}")


def _is_small(memory: Memory) -> bool:
    return memory.peak < SMALL and memory.fits is not False


def folded_lines(lines: Iterable[str], width: int) -> str:
    return "\n".join(folded(line, width, "  ") for line in lines)


def hardware_line(topology: Topology, mesh: Mapping[str, int]) -> str:
    return f"{topology.text}: {count_text(topology.num_devices, 'device')}, mesh {mesh_text(mesh)}"


def memory_line(memory: Memory) -> str:
    text = f"{VERDICTS[memory.fits]}: {peak_text(memory, memory.capacity)} per device"
    if memory.fits is False:
        text += f", {bytes_text(memory.missing)} too much"
    if memory.reserve:
        text += f" (without a reserve of {bytes_text(memory.reserve)})"
    return text


def time_line(time: Time, num_devices: int) -> str:
    texts = [f"step {time_text(time.seconds)}", *rates(time)]
    if time.tokens_per_s is not None:
        texts.insert(2, f"{number(time.tokens_per_s / num_devices)} tok/s per device")
    if time.bubble:
        texts.append(f"bubble {time.bubble:.1%}")
    return ", ".join(texts)


def rates(time: Time) -> list[str]:
    """Tokens per second and MFU, as far as they are known."""
    tokens = [] if time.tokens_per_s is None else [f"{time.tokens_per_s:,.0f} tok/s"]
    return [*tokens, *([] if time.mfu is None else [f"mfu {time.mfu:.1%}"])]


def memory_text(memory: Memory, width: int) -> str:
    table = [] if _is_small(memory) else [memory_table(memory).to_text()]
    return "\n".join([*table, folded_lines(memory_notes(memory), width)])


def memory_notes(memory: Memory) -> list[str]:
    """Where the peak is: its moment, and its group of a pipeline."""
    notes = [f"state and batch, the arguments of the step, are {bytes_text(memory.arguments)}"]
    if memory.host:
        notes.append(f"{bytes_text(memory.host)} of the optimizer per device are in the memory of the host")
    if memory.timeline:
        moment = max(memory.timeline, key=lambda moment: moment.total)
        notes.append(f"the peak is during {moment.label}")
    if len(memory.groups) > 1:
        fullest = max(range(len(memory.groups)), key=memory.groups.__getitem__)
        peaks = [bytes_text(size) for size in memory.groups]
        if len(peaks) > MOST_ROWS:
            peaks = [*peaks[: MOST_ROWS - 2], "...", peaks[-1]]
        notes.append(f"group {fullest} of the pipeline is the fullest; peaks of all groups: {listed(peaks)}")
    return notes


def findings_text(findings: Sequence[Finding], width: int) -> str:
    lines = at_most([folded(f"- {finding}", width, "  ") for finding in findings])
    return "\n".join([count_text(len(findings), "finding") + ":", *lines]) if findings else "no findings"


def forecast_line(memory: Memory, time: Time | None) -> str:
    """The plan in one line. Without `time` only the bytes, for devices whose speed and capacity are not known."""
    if time is None:
        return f"forecast: {peak_text(memory, None)} per device"
    texts = [f"forecast: {peak_text(memory, memory.capacity)} per device"]
    if memory.fits is False:
        texts.append("which does not fit")
    return ", ".join([*texts, f"{time_text(time.seconds)} per step", *rates(time)])


def measured_line(memory: Memory, time: Time, device_bytes: int | None, seconds: float | None) -> list[str]:
    """The measurements, as far as they are known, with the forecast and its error; [] if nothing is known."""
    texts = []
    if device_bytes:
        error = f"{memory.peak / device_bytes - 1:+.1%}"
        texts.append(f"{bytes_text(device_bytes)} per device (forecast {bytes_text(memory.peak)}, {error})")
    if seconds:
        error = f"{time.seconds / seconds - 1:+.1%}"
        texts.append(f"{time_text(seconds)} per step (forecast {time_text(time.seconds)}, {error})")
    return [f"measured: {', '.join(texts)}"] if texts else []


def compiled_line(memory: Memory, arguments: int, temporaries: int) -> str:
    """XLA's sizes of the compiled step, in bytes of one device, beside the forecast.

    The state includes its arrays in the memory of the host.
    """
    sizes = f"{bytes_text(arguments)} of state and batch and {bytes_text(temporaries)} of temporaries"
    if _is_small(memory):
        return f"compiled step: {sizes} per device, by XLA"
    state = memory.arguments + memory.host
    forecast = f"forecast {bytes_text(state)} and {bytes_text(memory.peak - memory.arguments)}"
    return f"compiled step: {sizes} per device, by XLA ({forecast})"


# --- tables ---


def memory_table(memory: Memory) -> Table:
    shares = [(name, memory.at_peak.get(name, 0)) for name in CATEGORIES]
    used = [*((name, size) for name, size in shares if size), ("total", memory.peak)]
    unit = unit_of([memory.peak], BYTES)
    rows = [[name, f"{size / unit.size:,.2f}", f"{size / (memory.peak or 1):.1%}"] for name, size in used]
    heads = ["memory at the peak", unit.name, "share"]
    return Table(heads, rows, right=heads[1:])


def part_table(parts: Sequence[Part]) -> Table:
    """One row for all parts that differ only in a number of their names. Of more rows, those with the most time."""
    flops, size = unit_of([part.flops for part in parts], FLOPS), unit_of([part.hbm_bytes for part in parts], BYTES)
    time = unit_of([part.seconds for part in parts], TIMES)
    units = ["compute", "memory", "network", *["host"] * any(part.host_seconds for part in parts)]
    heads = ["part", "times", flops.name, f"HBM {size.name}", *units, time.name, "limit"]
    groups = group_parts(parts)
    rows = []
    for name, part in groups:
        seconds = [*(getattr(part, f"{unit}_seconds") for unit in units), part.seconds]
        amounts = [part.flops / flops.size, part.hbm_bytes / size.size, *(value / time.size for value in seconds)]
        rows.append([name, f"{part.times:,}", *map(number, amounts), part.limit])
    if len(rows) > MOST_ROWS:
        ranked = sorted(range(len(rows)), key=lambda i: groups[i][1].times * groups[i][1].seconds, reverse=True)
        kept = [rows[i] for i in sorted(ranked[: MOST_ROWS - 1])]
        rows = [*kept, [f"and {len(rows) - len(kept):,} more", *[""] * (len(heads) - 1)]]
    caption = "time of each part: one execution on one device"
    return Table(heads, rows, caption, right=heads[1:-1], wrap=heads[:1])


def group_parts(parts: Sequence[Part]) -> list[tuple[str, Part]]:
    """(name, first part) of equal parts whose names differ only in their first number: `stages 1-6 F`.

    Parts are equal if three significant digits are. The groups are in the order of the first part of each.
    """
    groups = grouped(parts, lambda part: (re.sub(r"\d+", "#", part.name, count=1), *(f"{x:.3g}" for x in part[1:])))
    return [(_names_text([part.name for part in group]), group[0]) for group in groups.values()]


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


def traffic_table(traffic: Sequence[Traffic]) -> Table:
    size = unit_of([max(item.operand_bytes, item.ici_bytes, item.dcn_bytes) for item in traffic], BYTES)
    time = unit_of([item.seconds for item in traffic], TIMES)
    heads = ["axes", "kind", "times", f"operand {size.name}", f"ICI {size.name}", f"DCN {size.name}", time.name]
    rows = []
    for item in traffic:
        amounts = [number(count / size.size) for count in (item.operand_bytes, item.ici_bytes, item.dcn_bytes)]
        rows.append([listed(item.axes), item.kind, f"{item.times:,}", *amounts, number(item.seconds / time.size)])
    if len(rows) > MOST_ROWS:
        rest = number(sum(item.seconds for item in traffic[MOST_ROWS - 1 :]) / time.size)
        rows[MOST_ROWS - 1 :] = [[f"and {len(rows) - MOST_ROWS + 1:,} more", *[""] * (len(heads) - 2), rest]]
    return Table(heads, rows, "traffic of one device per step", right=heads[2:], wrap=heads[:2])


# --- plain data ---


def topology_dict(topology: Topology) -> dict[str, object]:
    return {
        "text": topology.text,
        "chip": topology.chip.name,
        "num_devices": topology.num_devices,
        "num_slices": topology.num_slices,
        "slice_shape": list(topology.slice_shape),
    }


def memory_dict(memory: Memory) -> dict[str, object]:
    names = ("capacity", "reserve", "arguments", "host", "peak", "at_peak", "groups", "timeline")
    return {name: plain_data(getattr(memory, name)) for name in names}


def time_dict(time: Time, num_devices: int) -> dict[str, object]:
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
