"""The instructions of a compiled program in the order in which they run, from the text of its HLO.

XLA reports the sum of a program's memory and no array of it. The text has the shapes with their layouts, and, in its
tables of stack frames, the methods that made them.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from flax_mesh.sharding.report.hlo import BITS, Line, count_executions, read_computations, split_tuple

ARRAY = re.compile(r"([a-z]\w*)\[([\d,<= ]*)\](?:\{([^}]*)\})?")
OPCODE = re.compile(r" ?([\w\-]+)\(")
NAME = re.compile(r"%([\w.\-]+)")
CALLED = re.compile(r"\b(body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
SOURCE = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
FRAME = re.compile(r"stack_frame_id=(\d+)")
ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")
CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
INDEX = re.compile(r"/\*index=\d+\*/")
TABLE = re.compile(r'(\d+) (?:"(.*)"|\{(.*)\})$')


class Array(NamedTuple):
    text: str  # f32[8,128]
    bytes: int  # with the padding that its layout states
    space: int  # 0: the main memory of the device; others: on-chip memory, the host


Shape = Array | tuple["Shape", ...]


class Instruction(NamedTuple):
    name: str
    opcode: str
    shape: Shape
    operands: tuple[str, ...]
    text: str  # operands and attributes
    is_root: bool

    @property
    def called(self) -> Mapping[str, str]:
        """Role, such as "body" -> computation."""
        return dict(CALLED.findall(self.text))

    @property
    def branches(self) -> list[str]:
        if found := BRANCHES.search(self.text):
            return [name.strip().lstrip("%") for name in found[1].split(",")]
        return [name for role, name in CALLED.findall(self.text) if role.endswith("_computation")]

    @property
    def source(self) -> str:
        found = SOURCE.search(self.text)
        return found[1].replace("\\'", "'") if found else ""

    @property
    def cycles(self) -> int:
        """What the compiler for TPUs expects; 0 if it states nothing."""
        found = CYCLES.search(self.text)
        return int(found[1]) if found else 0


@dataclass(frozen=True, eq=False, repr=False)
class Scheduled:
    """A program: its computations, and which results are stored in arguments."""

    entry: str
    lines: Mapping[str, list[Line]]
    head: str  # the first line of the text
    tables: Mapping[str, Mapping[int, str]]

    @cached_property
    def executions(self) -> Mapping[str, tuple[int, bool]]:
        """Computation -> (executions per step, whether that number is exact)."""
        return count_executions(dict(self.lines), self.entry)

    @cached_property
    def computations(self) -> Mapping[str, list[Instruction]]:
        return {name: [instruction(line) for line in lines] for name, lines in self.lines.items()}

    @cached_property
    def inside(self) -> frozenset[str]:
        """Computations that are parts of one instruction: of a fusion, or of a reduction."""
        return frozenset(
            name
            for one in self.instructions()
            if one.opcode not in ("while", "call", "conditional", "async-start")
            for name in one.called.values()
        )

    def instructions(self) -> Iterator[Instruction]:
        for found in self.computations.values():
            yield from found

    @property
    def aliases(self) -> dict[int, int]:
        """Result -> argument in whose memory it is stored."""
        part = self.head.partition("input_output_alias={")[2].partition("entry_computation_layout")[0]
        return {int(out or 0): int(number) for out, number, _ in ALIAS.findall(part)}

    def place(self, text: str) -> str:
        """Where the code that made an instruction is: `Decoder/DecoderLayer/Attention (decoder.py:187)`; "" if unknown.

        The path has the classes whose methods were running, outermost first.
        """
        found = FRAME.search(text)
        at, classes, line = int(found[1]) if found else 0, [], ""
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
            at = fields["parent_frame_id"] - 1  # the table counts parents from 1, and 1 is no frame
        return f"{'/'.join(classes)} ({line})" if classes else ""


def scheduled(text: str) -> Scheduled:
    """Read the text of a compiled program, `compiled.as_text()`."""
    lines, entry = read_computations(text)
    tables: dict[str, dict[int, str]] = {"FileNames": {}, "FunctionNames": {}, "FileLocations": {}, "StackFrames": {}}
    current: dict[int, str] | None = None
    for line in text.splitlines():
        if line in tables:
            current = tables[line]
        elif current is not None and (row := TABLE.match(line)):
            current[int(row[1])] = row[2] if row[2] is not None else row[3]
        elif line.strip():
            current = None
        if line.startswith("ENTRY "):
            break
    return Scheduled(entry, lines, text.partition("\n")[0], tables)


def _fields(text: str) -> dict[str, int]:
    return {name: int(value) for name, _, value in (part.partition("=") for part in text.split())}


def instruction(line: Line) -> Instruction:
    text = INDEX.sub("", line.text)
    shape, rest = split_tuple(text) if text.startswith("(") else text.split(" ", 1)
    opcode = OPCODE.match(rest)
    if opcode is None:
        raise ValueError(f"this line of a program has no operation: {text[:200]}")
    operands, attributes = split_tuple(rest[opcode.end() - 1 :])
    if opcode[1] == "parameter":
        attributes = operands + attributes
    return Instruction(line.name, opcode[1], read_shape(shape), tuple(NAME.findall(operands)), attributes, line.is_root)


def read_shape(text: str) -> Shape:
    """`(f32[8,128]{1,0:T(8,128)}, s32[])`: a tuple, or one array."""
    if not text.startswith("("):
        return _array(text)
    parts, depth, start, inner = [], 0, 0, text[1:-1]
    for i, letter in enumerate(inner):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(inner[start:i])
            start = i + 1
    return tuple(read_shape(part.strip()) for part in [*parts, inner[start:]] if part.strip())


def _array(text: str) -> Array:
    match = ARRAY.match(text)
    if match is None:
        return Array(text, 0, 0)
    dtype, layout = match[1], match[3] or ""
    dims = [int(dim.replace("<=", "")) for dim in match[2].split(",") if dim.strip()]
    order, _, more = layout.partition(":")
    space = re.search(r"S\((\d+)\)", more)
    sizes = [dims[int(i)] for i in order.split(",")] if order else dims[::-1]  # the fastest dim first
    if tile := re.match(r"T\(([\d,]+)\)", more):
        for i, factor in enumerate(reversed([int(x) for x in tile[1].split(",")])):
            if i == len(sizes):
                sizes.append(1)
            sizes[i] = -(-sizes[i] // factor) * factor
    digits = re.search(r"\d+", dtype)
    bits = BITS[dtype] if dtype in BITS else int(digits[0]) if digits else 0
    return Array(f"{dtype}[{match[2]}]", -(-math.prod(sizes) * bits // 8), int(space[1]) if space else 0)
