"""A compiled program: its computations with their instructions in the order in which they run, and how often each runs.

It is read from the text of the optimized program, because XLA's own analyses do not report collectives, count the body
of a loop once, and report the sum of the memory but not its arrays. The text has all of these and, in its tables of
stack frames, the methods that created them.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flax_mesh.errors import ShardingError
from flax_mesh.text import shown

_BITS = {"pred": 8, "token": 0, "opaque": 0, "s4": 4, "u4": 4, "s2": 2, "u2": 2}  # other names contain the bits: bf16
OP_NAME = r'op_name="((?:[^"\\]|\\.)*)"'

_LINE = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)")
_INDEX = re.compile(r"/\*index=\d+\*/")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<= ]*)\](?:\{([^}]*)\})?")
_OPCODE = re.compile(r" ?([\w\-]+)(?=\()")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"\b(body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")
_ESCAPED = re.compile(rb"\\([0-7]{3}|.)")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_ROW = re.compile(r'(\d+) (?:"(.*)"|\{(.*)\})$')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_FRAME = re.compile(r"stack_frame_id=(\d+)")


@dataclass(frozen=True)
class Array:
    text: str  # f32[8,128]
    content: int  # bytes of the elements
    bytes: int  # with the padding that the layout states
    space: int  # 0: the main memory of the device; others: on-chip memory, the host


Shape = Array | tuple["Shape", ...]  # a pytree of Arrays


@dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction. Its parts are read from their texts when they are used."""

    name: str
    opcode: str
    result: str  # the text of its shape
    inputs: str  # operands in parentheses; for a constant its value, for a parameter its number
    text: str  # attributes
    is_root: bool

    def __str__(self) -> str:
        return f"{self.opcode}{self.inputs}{self.text}"

    @cached_property
    def shape(self) -> Shape:
        return read_shape(self.result)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(_NAME.findall(self.inputs))

    @property
    def number(self) -> int | None:
        """The number of a parameter among the arguments of its computation; None for other instructions."""
        return int(self.inputs[1:-1]) if self.opcode == "parameter" else None

    @cached_property
    def called(self) -> Mapping[str, str]:
        """Role -> computation. Roles: `body`, `calls`, ...; the branches of a conditional end in `_computation`."""
        computations = dict(_CALLED.findall(self.text))
        if listed := _BRANCHES.search(self.text):
            names = [name.strip().lstrip("%") for name in listed[1].split(",")]
            computations |= {f"{i}_computation": name for i, name in enumerate(names)}
        return computations

    @property
    def branches(self) -> list[str]:
        return [name for role, name in self.called.items() if role.endswith("_computation")]

    @property
    def source(self) -> str:
        return source_of(self.text)

    @property
    def aliases(self) -> list[tuple[str, int, str]]:
        return aliases_of(self.text.partition("output_to_operand_aliasing={")[2])


def read_instruction(line: str) -> Instruction | None:
    """The instruction of a line; None if the line has none."""
    if not (match := _LINE.match(line)):
        return None
    text = _INDEX.sub("", match[3])
    result, remainder = _split_tuple(text) if text.startswith("(") else text.partition(" ")[::2]
    if not (opcode := _OPCODE.match(remainder)):
        return None
    inputs, attributes = _split_tuple(remainder[opcode.end() :])
    return Instruction(match[2], opcode[1], result, inputs, attributes, bool(match[1]))


def _split_tuple(text: str) -> tuple[str, str]:
    """The balanced parentheses at the start of `text`, and the remaining text."""
    depth = 0
    for bracket in re.finditer(r"[()]", text):
        depth += 1 if bracket[0] == "(" else -1
        if depth == 0:
            return text[: bracket.end()], text[bracket.end() :]
    return text, ""


def source_of(metadata: str) -> str:
    """The operation of the traced function: `jit(step)/while/body/dot_general`; "" if it is unknown.

    The compiler escapes quotes and backslashes, and writes the bytes of letters outside ASCII as octal numbers.
    """
    match = re.search(OP_NAME, metadata)
    if not match or "\\" not in match[1]:
        return match[1] if match else ""
    plain = _ESCAPED.sub(lambda x: bytes([int(x[1], 8)]) if len(x[1]) == 3 else x[1], match[1].encode())
    return plain.decode(errors="replace")


def aliases_of(text: str) -> list[tuple[str, int, str]]:
    """(path in the result, number of the argument, path in the argument) of results that are stored in arguments."""
    return [(out, int(number), path) for out, number, path in _ALIAS.findall(text)]


def read_shape(text: str) -> Shape:
    """`(f32[8,128]{1,0:T(8,128)}, s32[])`: a tuple, or one array."""
    if not text.startswith("("):
        return _read_array(text)
    depth, start, inner = 0, 0, text[1:-1]
    parts: list[str] = []
    for i, letter in enumerate(inner):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(inner[start:i])
            start = i + 1
    return tuple(read_shape(part.strip()) for part in [*parts, inner[start:]] if part.strip())


def _read_array(text: str) -> Array:
    match = _ARRAY.match(text)
    if match is None:
        return Array(text, 0, 0, 0)
    dtype, layout = match[1], match[3] or ""
    dims = [int(dim.replace("<=", "")) for dim in match[2].split(",") if dim.strip()]
    order, _, properties = layout.partition(":")
    space = re.search(r"S\((\d+)\)", properties)
    sizes = [dims[int(i)] for i in order.split(",")] if order else dims[::-1]  # the fastest dim first
    if tile := re.match(r"T\(([\d,]+)\)", properties):
        for i, factor in enumerate(reversed([int(x) for x in tile[1].split(",")])):
            if i == len(sizes):
                sizes.append(1)
            sizes[i] = -(-sizes[i] // factor) * factor
    digits = re.search(r"\d+", dtype)
    bits = _BITS[dtype] if dtype in _BITS else int(digits[0]) if digits else 0
    content, stored = (-(-math.prod(each) * bits // 8) for each in (dims, sizes))
    return Array(f"{dtype}[{match[2]}]", content, stored, int(space[1]) if space else 0)


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
