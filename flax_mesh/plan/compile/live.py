"""The arrays that are alive while a compiled program runs, and the ones alive at its peak.

The schedule is walked once, loops included: a body is walked one time, since its arrays are the same in every trip.
Arrays share memory as in XLA:

- get-tuple-element, bitcast, tuple and the `-done` of an asynchronous operation store nothing;
- the state of a loop is stored once: its operand, the parameter of its body and the result of its body are one array;
- a result that the header assigns to a donated argument is stored there, as are operands that an instruction names;
- an elementwise operation may write its result over an operand of the same size that is not needed afterwards.

The text contains neither the fragmentation of the heap nor the temporary memory inside an instruction, so neither is
counted.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax

from flax_mesh.hlo.program import Array, HloProgram, Instruction, Shape
from flax_mesh.text import grouped

COUNTED = (0, 1)  # memory spaces: main memory, on-chip memory of a TPU
SAME = ("bitcast", "opt-barrier", "copy-done", "optimization-barrier")
# Operations that only move values, and arithmetic of indices. The result of a fusion of these operations counts as a
# weight if its operands are arguments of the program.
MOVES = re.compile(
    "bitcast|bitcast-convert|convert|copy|copy-start|dynamic-slice|parameter|reshape|slice|transpose|constant|iota|"
    "broadcast|compare|select|add|subtract|multiply|clamp"
)
ELEMENTWISE = re.compile(
    "add|subtract|multiply|divide|maximum|minimum|select|negate|exponential|tanh|convert|compare|and|or|not|xor|power|"
    "rsqrt|sqrt|log|abs|clamp|dynamic-update-slice|scatter"
)
COLLECTIVE = re.compile(r"all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute")


@dataclass(eq=False)
class Buffer:
    array: Array
    maker: Instruction | None  # None: an argument of the program
    start: int
    end: int
    number: int = -1  # number of an argument
    moved: bool = False  # whether it is an argument, or only moved or cast from one
    origin: "Buffer | None" = None  # the first operand of the maker
    home: "Buffer | None" = None  # the buffer whose memory it uses

    @property
    def base(self) -> "Buffer":
        buffer = self
        while buffer.home is not None:
            buffer = buffer.home
        return buffer


Value = Any  # a Buffer, or a tuple of Values


class Walk(NamedTuple):
    """`at_peak`: the arrays at the moment of the most bytes, the largest first. `weights`: the names of collectives
    whose operands are arguments, or moved from arguments."""

    peak: int
    at_peak: list[Buffer]
    weights: frozenset[str]


def walk(program: HloProgram) -> Walk:
    """Walk a program. Main and on-chip memory are counted, as in XLA's peak, and the memory of the host is not."""
    walker = _Walker(program)
    walker.run()
    buffers = [b for b in walker.buffers if b.home is None and b.array.bytes and b.array.space in COUNTED]
    changes = sorted(change for b in buffers for change in ((b.start, b.array.bytes), (b.end + 1, -b.array.bytes)))
    peak = now = moment = 0
    for i, (clock, change) in enumerate(changes):
        now += change
        last = i + 1 == len(changes) or changes[i + 1][0] != clock
        if last and now > peak:
            peak, moment = now, clock
    alive = [b for b in buffers if b.start <= moment <= b.end]
    return Walk(peak, sorted(alive, key=lambda b: -b.array.bytes), frozenset(walker.weights))


@dataclass(eq=False)
class _Walker:
    program: HloProgram
    clock: int = 0
    buffers: list[Buffer] = field(default_factory=list)
    uses: list[tuple[Instruction, list[Buffer], list[Buffer]]] = field(default_factory=list)
    weights: set[str] = field(default_factory=set)

    def run(self) -> None:
        arguments: dict[int, Buffer] = {}
        root = self.computation(self.program.entry, arguments)
        for at, buffer in enumerate(jax.tree.leaves(root)):
            buffer.end = self.clock
            target = arguments.get(self.program.aliases.get(at, -1))
            if target is not None:
                self.store(buffer, target)
        for buffer in arguments.values():
            buffer.end = self.clock
        self.write_over_operands()

    def store(self, buffer: Buffer, target: Buffer) -> None:
        """`buffer` uses the memory of `target`."""
        if buffer.home is None and buffer.number < 0 and target.base is not buffer:
            buffer.home = target
            target.base.end = max(target.base.end, buffer.end)

    def computation(self, name: str, arguments: Any) -> Value:
        """The root of a computation. `arguments` are Values, or for the entry a dict that this method fills."""
        env: dict[str, Value] = {}
        root: Value = ()
        for instruction in self.program.computations[name]:
            self.clock += 1
            if (number := instruction.number) is not None:
                if isinstance(arguments, dict):
                    arguments[number] = self.new(instruction.shape, None, number)
                value = arguments[number]
            else:
                value = self.instruction(instruction, [env[name] for name in instruction.operands if name in env])
            env[instruction.name] = value
            if instruction.is_root:
                root = value
        return root

    def new(self, shape: Shape, maker: Instruction | None, number: int = -1) -> Value:
        at = 0 if maker is None else self.clock
        buffers = jax.tree.map(lambda array: Buffer(array, maker, at, at, number, moved=maker is None), shape)
        self.buffers += jax.tree.leaves(buffers)
        return buffers

    def instruction(self, instruction: Instruction, operands: list[Value]) -> Value:
        kind = instruction.opcode
        if kind == "tuple":
            return tuple(operands)
        if kind == "get-tuple-element":
            index = re.search(r"index=(\d+)", instruction.text)
            return operands[0][int(index[1])] if index else operands[0]
        if kind == "constant":
            # The program contains its constants, so they take no other memory.
            shape = jax.tree.map(lambda array: replace(array, bytes=0), instruction.shape)
            return self.new(shape, instruction)
        if kind in SAME or kind.endswith("-done"):
            self.use(operands)
            return _done(kind, operands[0])
        if kind == "while":
            return self.loop(instruction, operands[0])
        if kind == "call":
            result = self.computation(instruction.called["to_apply"], operands)
            self.use(operands)
            return result
        if kind == "conditional":
            return self.branches(instruction, operands)
        return self.compute(instruction, operands)

    def use(self, values: list[Value]) -> None:
        for buffer in jax.tree.leaves(values):
            buffer.end = buffer.base.end = self.clock

    def loop(self, instruction: Instruction, carried: Value) -> Value:
        self.use([carried])
        self.run_into(instruction.called["body"], carried, carried)
        self.use([carried])
        return carried

    def branches(self, instruction: Instruction, operands: list[Value]) -> Value:
        result = self.new(instruction.shape, instruction)
        for name, operand in zip(instruction.branches, operands[1:], strict=False):
            self.run_into(name, operand, result)
        self.use([*operands, result])
        return result

    def run_into(self, name: str, argument: Value, result: Value) -> None:
        """Walk a computation; the parts of its root that it computes are stored in `result`."""
        first = self.clock
        root = self.computation(name, [argument])
        for inner, outer in zip(jax.tree.leaves(root), jax.tree.leaves(result), strict=True):
            if inner.start > first:
                self.store(inner, outer)

    def compute(self, instruction: Instruction, operands: list[Value]) -> Value:
        """Any other instruction: it writes a new array, unless its text names an operand to write to."""
        self.use(operands)
        inputs, result = jax.tree.leaves(operands), self.new(instruction.shape, instruction)
        flat = jax.tree.leaves(result)
        for buffer in flat:
            buffer.origin = inputs[0] if inputs else None
        if instruction.opcode.endswith("-start"):
            self.asynchronous(instruction, inputs, flat)
        for out, number, path in instruction.aliases:
            target = jax.tree.leaves(_part(operands[number], path))
            for inner, outer in zip(jax.tree.leaves(_part(result, out)), target, strict=True):
                self.store(inner, outer)
        self.follow_weights(instruction, inputs, flat)
        self.uses.append((instruction, flat, inputs))
        return result

    def asynchronous(self, instruction: Instruction, inputs: list[Buffer], outputs: list[Buffer]) -> None:
        """The tuple of an asynchronous operation contains its operands too; a copy has its result first."""
        free = list(inputs)
        for buffer in outputs[1:] if instruction.opcode == "copy-start" else outputs:
            same = next((x for x in free if x.array == buffer.array), None)
            if same is not None and instruction.opcode != "all-reduce-start":
                free.remove(same)
                self.store(buffer, same)

    def follow_weights(self, instruction: Instruction, inputs: list[Buffer], outputs: list[Buffer]) -> None:
        """Record which outputs are moved arguments of the program, and which collectives have such operands."""
        large = [buffer for buffer in inputs if buffer.array.bytes > 4096] or inputs
        inner = self.program.computations.get(instruction.called.get("calls", ""), [])
        if COLLECTIVE.match(instruction.opcode) and all(buffer.moved for buffer in large):
            self.weights.add(instruction.name)
        for each in inner:
            if COLLECTIVE.match(each.opcode) and any(buffer.moved for buffer in large):
                self.weights.add(each.name)
        only_moves = all(MOVES.fullmatch(each.opcode) for each in inner or [instruction])
        for buffer in outputs:
            buffer.moved = only_moves and bool(large) and all(x.moved for x in large)

    def write_over_operands(self) -> None:
        """Let elementwise instructions, in program order, write over an operand that is not needed afterwards."""
        for instruction, outputs, inputs in self.uses:
            if len(outputs) != 1 or not self.is_elementwise(instruction):
                continue
            (buffer,) = outputs
            for operand in inputs:
                base = operand.base
                same = base.array.bytes == buffer.array.bytes and base.array.space == buffer.array.space
                if same and base.number < 0 and base.end == buffer.start > base.start and buffer.home is None:
                    self.store(buffer, operand)
                    break

    def is_elementwise(self, instruction: Instruction) -> bool:
        return bool(ELEMENTWISE.fullmatch(instruction.opcode)) or (
            instruction.opcode == "fusion" and "kind=kLoop" in instruction.text
        )


def _done(kind: str, value: Value) -> Value:
    """The result within the tuple of the `-start`. It follows the operands, but a copy has its result first, and the
    tuple of an all-reduce has only results."""
    if (kind in SAME and kind != "copy-done") or not isinstance(value, tuple) or kind == "all-reduce-done":
        return value
    if kind in ("send-done", "recv-done"):  # (array, context, token), without the context
        return (value[0], value[-1]) if kind == "recv-done" else value[-1]
    return value[0 if kind == "copy-done" else min(1, len(value) - 1)]


def _part(value: Value, path: str) -> Value:
    for index in filter(None, (part.strip() for part in path.split(","))):
        value = value[int(index)] if isinstance(value, tuple) else value
    return value


def largest(buffers: Sequence[Buffer], most: int) -> list[tuple[list[Buffer], int]]:
    """(arrays of equal shape from the same code, sum of their bytes), the largest sum first."""

    def made_by(buffer: Buffer) -> str:
        return f"{buffer.number}" if buffer.maker is None else f"{buffer.maker.source} {buffer.maker.opcode}"

    groups = grouped(buffers, lambda buffer: (buffer.array.text, made_by(buffer)))
    sizes = [(group, sum(buffer.array.bytes for buffer in group)) for group in groups.values()]
    return sorted(sizes, key=lambda item: -item[1])[:most]
