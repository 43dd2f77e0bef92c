"""A step as four small types: arrays with their shardings, operations, blocks and the program."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

Spec = tuple[tuple[str, ...], ...]  # per dim: the mesh axes that split it

TRANSFERS = frozenset({"to_device", "to_host"})  # between the memory of the host and of the device
COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "collective_permute", "collective_broadcast")
PHASES = ("forward", "backward", "update")


@dataclass(eq=False, slots=True, repr=False)
class Array:
    """A value of the program. `local` is the shape of the part that one device stores."""

    shape: tuple[int, ...]
    bits: int  # per element
    kind: str  # "f", "i" or "c": float, integer or bool, complex
    spec: Spec
    local: tuple[int, ...]
    producer: "Operation | None" = None
    on_host: bool = False  # an argument, or a copy that is returned, in the memory of the host

    @property
    def size(self) -> int:
        """Elements on one device."""
        return math.prod(self.local)

    @property
    def bytes(self) -> int:
        """Bytes on one device: none in the memory of the host."""
        return 0 if self.on_host else self.stored_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes of the part of one device, wherever it is stored."""
        return -(-self.size * self.bits // 8)

    @property
    def axes(self) -> frozenset[str]:
        return frozenset(axis for dim in self.spec for axis in dim)


@dataclass(eq=False, slots=True, repr=False)
class Operation:
    """One operation, by its name in StableHLO, such as "dot_general". `times` is the trip count of a loop."""

    kind: str
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    attributes: Mapping[str, str]
    source: str  # of the traced function, such as "jit(step)/jvp(Decoder)/while/body/dot_general"
    bodies: tuple["Block", ...] = ()
    times: float = 1
    times_known: bool = True
    phase: str = "update"  # forward, backward or update

    def dims(self, name: str) -> tuple[int, ...]:
        """The numbers of an attribute such as `dimensions = array<i64: 0, 2>`."""
        return _numbers(self.attributes.get(name, ""))


@dataclass(eq=False, slots=True, repr=False)
class Block:
    """A list of operations with arguments and results: the program itself, or the body of a loop or a conditional."""

    arguments: tuple[Array, ...]
    operations: list[Operation] = field(default_factory=list)
    results: tuple[Array, ...] = ()

    def walk(self) -> Iterator[Operation]:
        """Every operation, also those inside of loops."""
        for operation in self.operations:
            yield operation
            for body in operation.bodies:
                yield from body.walk()


@dataclass(frozen=True, eq=False, repr=False)
class Program:
    """A step: its block, the sizes of the mesh axes, and the arguments whose memory a result takes over."""

    block: Block
    axis_sizes: Mapping[str, int]
    donated: Mapping[int, int]  # argument -> result
    platform: str
    excess_precision: bool = True  # XLA may store a value with more bits than the program rounds it to

    def group_size(self, axes: Sequence[str]) -> int:
        return math.prod(axis_size(axis, self.axis_sizes) for axis in axes)


def axis_size(axis: str, sizes: Mapping[str, int]) -> int:
    """The size of an axis, or of a part of one, which is written `tp:(1)2`."""
    name, _, part = axis.partition(":")
    return int(part.rpartition(")")[2]) if part else sizes[name]


@lru_cache(4096)
def _numbers(text: str) -> tuple[int, ...]:
    before, _, after = text.partition(":")  # `array<i64: 0, 2>`, `array<i64>`, `3 : i64`
    return tuple(map(int, re.findall(r"-?\d+", after if before.startswith("array") else before)))


def local_shape(shape: Sequence[int], spec: Spec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(
        -(-size // math.prod(axis_size(axis, sizes) for axis in axes)) if axes else size
        for size, axes in zip(shape, spec, strict=True)
    )
