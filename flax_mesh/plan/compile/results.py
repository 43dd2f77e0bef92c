"""The compiler's report of a program: memory, arrays and collectives."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


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
