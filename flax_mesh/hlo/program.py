"""A compiled program: its computations with their instructions in the order in which they run, and how often each runs.

It is read from the text of the optimized program, because XLA's own analyses do not report collectives, count the body
of a loop once, and report the sum of the memory but not its arrays. The text has all of these and, in its tables of
stack frames, the methods that created them.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flax_mesh.errors import ShardingError
from flax_mesh.hlo.instructions import Instruction, aliases_of, read_instruction
from flax_mesh.text import shown

_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_ROW = re.compile(r'(\d+) (?:"(.*)"|\{(.*)\})$')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_FRAME = re.compile(r"stack_frame_id=(\d+)")


@dataclass(frozen=True, eq=False, repr=False)
class HloProgram:
    """A compiled program."""

    entry: str  # name of the entry computation
    computations: Mapping[str, list[Instruction]]
    head: str  # the first line of the text
    tables: Mapping[str, Mapping[int, str]]

    @cached_property
    def executions(self) -> Mapping[str, tuple[int, bool]]:
        """Computation -> (executions per step, whether they are exact). Each branch of a conditional counts once."""
        calls = {name: list(self._calls(instructions)) for name, instructions in self.computations.items()}
        counts: dict[str, tuple[int, bool]] = dict.fromkeys(self.computations, (0, True))

        def run(name: str, times: int, known: bool) -> None:
            count, certain = counts[name]
            counts[name] = count + times, certain and known
            for callee, trips in calls[name]:
                if callee in counts:
                    run(callee, times * (trips or 1), known and trips is not None)

        run(self.entry, 1, True)
        return counts

    def _calls(self, instructions: Iterable[Instruction]) -> Iterator[tuple[str, int | None]]:
        """(computation, times) of every call; None for the body of a loop whose trip count is not known."""
        for instruction in instructions:
            for role, name in instruction.called.items():
                # The condition of a loop counts once: it contains no collectives.
                yield name, self._trip_count(instruction) if role == "body" else 1

    def _trip_count(self, loop: Instruction) -> int | None:
        """The trip count that the compiler wrote. Programs for TPUs lack it: n of the condition `i < n` instead."""
        if trips := _TRIPS.search(loop.text):
            return int(trips[1])
        condition = self.computations.get(loop.called.get("condition", ""), [])
        limits = [x.inputs[1:-1] for x in condition if x.opcode == "constant" and x.result.startswith("s32[]")]
        compared = any(x.opcode == "compare" and "direction=LT" in x.text for x in condition)
        return int(limits[0]) if len(limits) == 1 and limits[0].isdecimal() and compared else None

    def instructions(self) -> Iterator[Instruction]:
        for instructions in self.computations.values():
            yield from instructions

    @property
    def aliases(self) -> dict[int, int]:
        """Maps each result that reuses the memory of an argument to this argument."""
        part = self.head.partition("input_output_alias={")[2].partition("entry_computation_layout")[0]
        return {int(out or 0): number for out, number, _ in aliases_of(part)}

    def place(self, text: str) -> str:
        """The code that created an instruction: `Decoder/DecoderLayer/Attention (decoder.py:187)`; "" if unknown.

        The path has the classes whose methods were running, outermost first.
        """
        frame = _FRAME.search(text)
        at, line = int(frame[1]) if frame else 0, ""
        classes: list[str] = []
        while fields := _fields(self.tables["StackFrames"].get(at, "")):
            location = _fields(self.tables["FileLocations"].get(fields["file_location_id"], ""))
            function = self.tables["FunctionNames"].get(location.get("function_name_id", 0), "")
            path = self.tables["FileNames"].get(location.get("file_name_id", 0), "")
            owner = function.split(".")[0]
            if "." in function and owner[:1].isupper():
                if not line:
                    line = f"{path.rsplit('/', 1)[-1]}:{location['line']}"
                if classes[:1] != [owner]:
                    classes.insert(0, owner)
            at = fields["parent_frame_id"] - 1  # the table counts parents from 1, and 1 means that there is none
        return f"{'/'.join(classes)} ({line})" if classes else ""


def read_hlo(compiled: Any) -> HloProgram:
    """Reads a compiled program: a `jax.stages.Compiled`, or its `as_text()`."""
    if not isinstance(compiled, str) and not hasattr(compiled, "as_text"):
        raise TypeError(f"compiled must be a compiled program or its text, got {shown(compiled)}.")
    text: str = compiled if isinstance(compiled, str) else compiled.as_text()
    computations: dict[str, list[Instruction]] = {}
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    entry, instructions, rows = "", [], {}
    for line in text.splitlines():
        if line[:1] in ("", " ", "}"):
            if instruction := read_instruction(line):
                instructions.append(instruction)
        elif header := _HEADER.match(line):
            instructions = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif line in tables:
            rows = tables[line]
        elif row := _ROW.match(line):
            rows[int(row[1])] = row[2] if row[2] is not None else row[3]
    if not entry:
        raise ShardingError(
            "the text must be an optimized HLO program, but it has no ENTRY computation. Pass "
            "jax.jit(f).lower(...).compile().as_text()."
        )
    return HloProgram(entry, computations, text.partition("\n")[0], tables)


def _fields(text: str) -> dict[str, int]:
    return {name: int(value) for name, _, value in (part.partition("=") for part in text.split())}
