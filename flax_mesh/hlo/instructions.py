"""One instruction of a compiled program, from a line of its text: `%sum = f32[8] add(%a, %b), metadata={...}`."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

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
