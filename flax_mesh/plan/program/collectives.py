"""The collectives that follow from the shardings of operands and results.

Shardy decides how every value is split; XLA then inserts the collectives. This module follows XLA's choices, not
Shardy's pass, which chooses otherwise:

- a value that is needed with fewer axes on a dim is gathered over them; more axes on a dim cost nothing (a slice);
- axes that move from one dim to another are an all-to-all, other changes of order a permute;
- a sum over a split dim (a matrix product, a reduction, a scatter, the lookup in a split table) is an all-reduce of the
  result, or a reduce-scatter if the result is split over the same axes.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from flax_mesh.hlo.collectives import axes_of
from flax_mesh.plan.program.program import COLLECTIVES, Array, Block, Operation, Program, Spec, axis_size
from flax_mesh.plan.program.rules import sharding_needs


class Exchange(NamedTuple):
    """One collective. `operand_bytes` are the bytes that one device passes to it, per execution."""

    kind: str
    axes: tuple[str, ...]  # mesh axes of several devices, in the order of the mesh
    operand_bytes: int
    operation: Operation  # that needs it
    times: int  # executions per step
    array: Array | None = None  # the operand that is exchanged; None: the result of the operation
    wanted: Spec = ()  # the spec that it is exchanged to
    result_bytes: int = 0  # on one device

    @property
    def payload_bytes(self) -> int:
        """As `hlo.collectives` defines it."""
        return self.result_bytes if self.kind == "all-gather" else self.operand_bytes


Found = tuple[str, tuple[str, ...], int]  # kind, axes, operand bytes


def find_exchanges(program: Program) -> list[Exchange]:
    """All collectives of a program, in the order of its operations."""
    return list(_in_block(program.block, program, 1))


def _in_block(block: Block, program: Program, times: int) -> Iterator[Exchange]:
    """A value that is needed twice with the same sharding is exchanged once; sums of partial sums are reduced once."""
    seen: set[tuple[int, Spec]] = set()
    partial = _Partial(block, program, in_loop=block is not program.block)
    for operation in block.operations:
        for (kind, axes, size), array, spec in _of_operation(operation, program, seen, partial):
            names = {axis.partition(":")[0] for axis in axes}
            count = math.prod(axis_size(axis, program.axis_sizes) for axis in axes)
            if size and count > 1:
                moved = array or operation.outputs[0]
                if program.platform == "cpu" and (moved.kind, moved.bits) == ("f", 16):
                    size *= 2  # sent in float32
                ordered = tuple(name for name, devices in program.axis_sizes.items() if name in names and devices > 1)
                result = size * count if kind == "all-gather" else size // count if kind == "reduce-scatter" else size
                yield Exchange(kind, ordered, size, operation, times, array, spec, result)
        for body in operation.bodies:
            yield from _in_block(body, program, math.ceil(times * operation.times))


def _of_operation(
    operation: Operation, program: Program, seen: set[tuple[int, Spec]], partial: "_Partial"
) -> Iterator[tuple[Found, Array | None, Spec]]:
    if operation.kind in COLLECTIVES:  # written by the user, in a shard_map
        size = sum(array.bytes for array in operation.inputs)
        yield (operation.kind.replace("_", "-"), _axes_of_groups(operation, program.axis_sizes), size), None, ()
        return
    needed, over = sharding_needs(operation)
    for array, spec in zip(operation.inputs, needed, strict=False):
        if spec is not None and spec != array.spec and (id(array), spec) not in seen:
            seen.add((id(array), spec))
            bits = min(array.bits, operation.outputs[0].bits if operation.kind == "convert" else array.bits)
            for kind, axes, size in reshard(array, spec, program.axis_sizes):
                # A value that is cast to a narrower type is cast first.
                yield (kind, axes, size if program.platform == "cpu" else size * bits // array.bits), array, spec
    for exchange in partial.reduce(operation, tuple(over)):
        yield exchange, None, ()


def _axes_of_groups(operation: Operation, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the devices of the first group differ."""
    text = operation.attributes.get("replica_groups") or operation.attributes.get("source_target_pairs", "")
    if "dense" not in text and '"' in text:  # names of axes
        return tuple(name for name in sizes if f'"{name}"' in text)
    ids = [int(number) for number in re.findall(r"\d+", text.partition(" : ")[0])]
    return axes_of(np.array([ids], int), sizes)


class _Partial:
    """Sums over split dims. XLA adds partial sums before it reduces them, except on CPUs."""

    def __init__(self, block: Block, program: Program, in_loop: bool):
        self.in_loop = in_loop
        self.sizes, self.cpu = program.axis_sizes, program.platform == "cpu"
        self.pending: dict[int, tuple[str, ...]] = {}
        self.uses: dict[int, list[Operation]] = {}
        for operation in block.operations:
            for array in operation.inputs:
                self.uses.setdefault(id(array), []).append(operation)
        self.results = set(map(id, block.results))
        self.sums: set[int] = set()  # the ids of additions of partial sums
        for operation in block.operations:  # producers first: a chain of additions is as long as the model is deep
            if self._adds_partial(operation):
                self.sums.add(id(operation))

    def reduce(self, operation: Operation, over: tuple[str, ...]) -> Iterator[Found]:
        waiting = [self.pending[id(array)] for array in operation.inputs if id(array) in self.pending]
        if waiting and len(waiting) == len(operation.inputs) and len(set(waiting)) == 1 and not over:
            over = waiting[0]
        if not over or not operation.outputs:
            return
        out = operation.outputs[0]
        if not self.cpu and self._summed(out):
            self.pending[id(out)] = over
            return
        scattered = tuple(axis for axis in over if axis in out.axes)
        rest = tuple(axis for axis in over if axis not in out.axes)
        size = sum(output.bytes for output in operation.outputs)
        if (bits := self._narrowed(out)) < out.bits:
            size = size * bits // out.bits
        if scattered:
            whole = size * math.prod(axis_size(axis, self.sizes) for axis in scattered)
            yield "reduce-scatter", scattered, whole
        if rest:
            yield "all-reduce", rest, size

    def _narrowed(self, array: Array) -> int:
        """Bits per element of a sum. If its only use is a cast, accelerators reduce it in the type of the cast.

        In loops XLA overlaps such sums with their products, and adds them in the wider type.
        """
        if self.cpu or self.in_loop:
            return array.bits
        uses = self.uses.get(id(array), [])
        while len(uses) == 1 and uses[0].kind in ("convert", "transpose", "reshape", "reshard"):
            (out,) = uses[0].outputs
            if out.bits < array.bits:
                return out.bits
            uses = self.uses.get(id(out), [])
        return array.bits

    def _summed(self, array: Array) -> bool:
        """Whether the only use of a value is an addition to another value that is a sum over a split dim."""
        uses = self.uses.get(id(array), [])
        if len(uses) != 1 or uses[0].kind != "add" or id(array) in self.results:
            return False
        return all(x.producer is not None and self._is_partial(x.producer) for x in uses[0].inputs)

    def _is_partial(self, operation: Operation) -> bool:
        if operation.kind == "add":
            return id(operation) in self.sums
        return operation.kind == "dot_general" and bool(sharding_needs(operation).partial)

    def _adds_partial(self, operation: Operation) -> bool:
        return operation.kind == "add" and all(
            x.producer is not None and len(self.uses.get(id(x), [])) == 1 and self._is_partial(x.producer)
            for x in operation.inputs
        )


def reshard(array: Array, wanted: Spec, sizes: Mapping[str, int]) -> Iterator[Found]:
    """The collectives that change the sharding of a value to `wanted`."""
    if array.spec == wanted or not array.shape:
        return
    had = {axis: dim for dim, axes in enumerate(array.spec) for axis in axes}
    wants = {axis: dim for dim, axes in enumerate(wanted) for axis in axes}
    moved = tuple(axis for axis, dim in had.items() if axis in wants and wants[axis] != dim)
    lost = tuple(axis for axis in had if axis not in wants)
    new = math.prod(axis_size(axis, sizes) for axis in wants if axis not in had)  # sliced first
    size = -(-array.bytes // new)
    if moved:
        yield "all-to-all", moved, size
    if lost:
        yield "all-gather", lost, size
    if (
        not moved
        and not lost
        and any(set(a) <= set(b) and a != b[: len(a)] for a, b in zip(array.spec, wanted, strict=True))
    ):
        yield "collective-permute", tuple(had), size
