"""The compiler's report of a program: memory, arrays and collectives."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from flax_mesh.text import grouped


class LiveArray(NamedTuple):
    """Arrays of one shape, made by the same code, that are alive at the peak."""

    bytes: int  # of all of them
    count: int
    array: str  # "f32[4,128]" on one device
    operation: str  # of the traced function, or the path of an argument
    place: str  # classes whose methods made it, and the line: "Decoder/Attention (decoder.py:187)"; "" if unknown


class Sent(NamedTuple):
    """All collectives of one kind over the same axes, on one device."""

    kind: str
    axes: tuple[str, ...]
    times: int  # per execution of the program
    operand_bytes: float  # that the device passes to them


def summed(sends: Iterable[Sent], times: int = 1) -> list[Sent]:
    """The sums per kind and axes of a program that runs so often."""
    groups = grouped(sends, lambda each: (each.kind, each.axes))
    return [
        Sent(*key, times * sum(x.times for x in group), times * math.fsum(x.operand_bytes for x in group))
        for key, group in groups.items()
    ]


class CompiledProgram(NamedTuple):
    """One program: the step, or F, B or W of equal stages of a pipeline."""

    name: str
    times: int  # executions per step, on the device that runs it most
    arguments: int  # bytes
    peak: int  # bytes, arguments included, as XLA states it
    walked: int  # bytes at the peak that the walk over the program finds
    live: tuple[LiveArray, ...]  # at that peak, the largest first
    sent: tuple[Sent, ...]


def program_of(fields: Mapping[str, Any]) -> CompiledProgram:
    """From the data of `json.loads`."""
    live = tuple(LiveArray(**each) for each in fields["live"])
    return CompiledProgram(**{**fields, "live": live, "sent": sent_of(fields["sent"])})


def sent_of(rows: Sequence[Mapping[str, Any]]) -> tuple[Sent, ...]:
    return tuple(Sent(**{**row, "axes": tuple(row["axes"])}) for row in rows)
