"""The operations of a traced step with the sharding of every value, read from its StableHLO module.

JAX lowers the step for a platform without its devices, Shardy propagates the shardings of the arguments and of the
constraints to all other values (`jax_compat.propagated_module`), and `read_program` copies the result into four small
types. Operations that cannot affect a result, and repeated ones, are left out, as in XLA.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from flax_mesh import jax_compat
from flax_mesh.blockwise.loops import expected_trips

Spec = tuple[tuple[str, ...], ...]  # per dim: the mesh axes that split it

BITS = {"i1": 8, "index": 32, "token": 0}
_TYPE = re.compile(r"tensor<((?:\d+x)*)(?:complex<)?([a-z]+)(\d*)\w*")
_SPEC = re.compile(r"\[((?:\{[^}]*\}(?:p\d+)?(?:, )?)*)\]")
_DIM = re.compile(r"\{([^}]*)\}")
_AXIS = re.compile(r'"([^"]+)"(?::\((\d+)\)(\d+))?')
_NAME = re.compile(r'loc\("([^"]*)"')
_ON_HOST = re.compile(r'mhlo.memory_kind = "(?:un)?pinned_host"')
_PLACEMENT = re.compile(r'_xla_buffer_placement = "(\w+)"')
_NUMBER = re.compile(r"dense<(-?\d+)>")
# Operations that are not read once if they are repeated.
DISTINCT = frozenset({"custom_call", "optimization_barrier", "rng", "rng_bit_generator"})
# Of an operand in the memory of the host, the result is there too.
KEEP_MEMORY = frozenset({"dynamic_update_slice", "dynamic_slice", "slice", "reshape", "broadcast_in_dim", "transpose"})
TRANSFERS = frozenset({"to_device", "to_host"})  # between the memory of the host and of the device
COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "collective_permute", "collective_broadcast")


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

    def walk(self, times: float = 1) -> Iterator[tuple[Operation, float]]:
        """Every operation, also those inside of loops, and how often it runs."""
        for operation in self.operations:
            yield operation, times
            for body in operation.bodies:
                yield from body.walk(times * operation.times)


@dataclass(frozen=True, eq=False, repr=False)
class Program:
    """A step: its block, the sizes of the mesh axes, and the arguments whose memory a result takes over."""

    block: Block
    axis_sizes: Mapping[str, int]
    names: tuple[str, ...]  # of the arguments
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


@lru_cache(65536)
def _parse_type(text: str) -> tuple[tuple[int, ...], int, str]:
    """(shape, bits per element, kind) of a type such as `tensor<16x128xbf16>`."""
    match = _TYPE.match(text)
    if match is None:
        return (), 0, "i"
    dims, name, bits = match.groups()
    width = BITS.get(name + bits) or (16 if name + bits == "bf16" else int(bits or 32))
    complex_ = "complex<" in text
    kind = "c" if complex_ else "f" if name.startswith(("f", "bf")) else "i"
    return tuple(map(int, dims.split("x")[:-1])), width * (1 + complex_), kind


@lru_cache(65536)
def _element_type(text: str) -> str:
    match = _TYPE.match(text)
    return match[2] + match[3] if match else ""


@lru_cache(65536)
def _parse_specs(text: str) -> tuple[Spec, ...]:
    """The specs of a sharding attribute, one per value."""

    def axes(dim: str) -> tuple[str, ...]:
        return tuple(f"{name}:({before}){size}" if size else name for name, before, size in _AXIS.findall(dim))

    return tuple(tuple(map(axes, _DIM.findall(spec))) for spec in _SPEC.findall(text))


class _Reader:
    """Copies a module. Equal operations on equal values are read once, as common subexpressions."""

    def __init__(self, module: Any, axis_sizes: Mapping[str, int], platform: str):
        self.sizes = dict(axis_sizes)
        self.widens: tuple[str, ...] = ()  # types that are stored as float32, except in arguments
        self.cpu = platform == "cpu"
        self.function = next(item for item in module.body.operations if item.operation.name == "func.func")

    def array(self, value: Any, spec: Spec | None) -> Array:
        text = str(value.type)
        shape, bits, kind = _parse_type(text)
        if self.widens and _element_type(text) in self.widens:
            bits = 32
        spec = spec if spec is not None and len(spec) == len(shape) else ((),) * len(shape)
        return Array(shape, bits, kind, spec, local_shape(shape, spec, self.sizes))

    def main(self) -> tuple[Block, tuple[str, ...], dict[int, int]]:
        function = self.function
        body = function.regions[0].blocks[0]
        attributes = list(function.attributes["arg_attrs"]) if "arg_attrs" in function.attributes else []
        arguments, names, donated, values = [], [], {}, {}
        for index, value in enumerate(body.arguments):
            text = str(attributes[index]) if attributes else ""
            specs = _parse_specs(text[text.find("sdy.sharding") :]) if "sdy.sharding" in text else ()
            arguments.append(self.array(value, specs[0] if specs else None))
            arguments[-1].on_host = bool(_ON_HOST.search(text))
            values[value] = arguments[-1]
            name = _NAME.match(str(value.location))
            names.append(name[1] if name else f"argument {index}")
            if alias := re.search(r"tf.aliasing_output = (\d+)", text):
                donated[index] = int(alias[1])
            elif "jax.buffer_donor" in text:
                donated[index] = -1
        block = Block(tuple(arguments))
        self.widens = jax_compat.float32_on_cpu() if self.cpu else ()
        block.results = tuple(self.block(body, values, block, {}))
        return block, tuple(names), donated

    def block(self, body: Any, values: dict[Any, Array], into: Block, seen: dict[Any, Operation]) -> list[Array]:
        """Append the operations of an MLIR block to `into`; returns the values that it returns."""
        for item in body.operations:
            operation = item.operation
            name = operation.name.partition(".")[2]
            inputs = [values[value] for value in operation.operands]
            if name == "return":
                return inputs
            if name == "manual_computation":
                outputs = self.manual(item, inputs, values, into)
            else:
                outputs = self.operation(item, name, inputs, values, into, seen)
            values.update(zip(operation.results, outputs, strict=True))
        return []

    def manual(self, item: Any, inputs: Sequence[Array], values: dict[Any, Array], into: Block) -> list[Array]:
        """The body of a shard_map: its values have the shapes of one device."""
        body = item.regions[0].blocks[0]
        inside = [self._on_shard(x, self.array(v, None), into) for x, v in zip(inputs, body.arguments, strict=True)]
        results = self.block(body, values | dict(zip(body.arguments, inside, strict=True)), into, {})
        specs = self.specs(item, "out_shardings")
        outside = [self.array(v, spec) for v, spec in zip(item.results, specs, strict=True)]
        return [self._on_shard(x, y, into) for x, y in zip(results, outside, strict=True)]

    def _on_shard(self, before: Array, after: Array, into: Block) -> Array:
        """The same memory as a value of the mesh and as one of a device."""
        after.producer = Operation("shard", (before,), (after,), {}, "")
        into.operations.append(after.producer)
        return after

    def specs(self, item: Any, name: str) -> Sequence[Spec | None]:
        return _parse_specs(str(item.attributes[name])) if name in item.attributes else [None] * len(item.results)

    def operation(
        self,
        item: Any,
        name: str,
        inputs: Sequence[Array],
        values: dict[Any, Array],
        into: Block,
        seen: dict[Any, Operation],
    ) -> Sequence[Array]:
        regions = [region for region in item.regions if len(region.blocks)]
        attributes = {n: _attribute_text(name, item.attributes[n]) for n in item.attributes if n != "sdy.sharding"}
        if name == "sharding_constraint":
            name = "reshard"
        if name == "reshard":
            specs: Sequence[Spec | None] = _parse_specs(attributes.pop("sharding"))
        else:
            specs = self.specs(item, "sdy.sharding")
        name = attributes.pop("chlo", name).strip('"')
        if "annotate_device_placement" in attributes.get("call_target_name", ""):
            if self.cpu:  # XLA for CPUs computes with the memory of the host, without copies
                return inputs
            placement = _PLACEMENT.search(attributes["mhlo.frontend_attributes"])
            name = "to_host" if placement and placement[1].endswith("host") else "to_device"
            attributes = {}
        source = _NAME.match(str(item.location))
        outputs = [self.array(value, spec) for value, spec in zip(item.results, specs, strict=True)]
        for output in outputs:
            output.on_host = name == "to_host" or (name in KEEP_MEMORY and any(x.on_host for x in inputs))
        operation = Operation(name, tuple(inputs), tuple(outputs), attributes, source[1] if source else "")
        if name == "while":
            self.loop(operation, regions, values)
        elif name in ("case", "if"):
            operation.bodies = tuple(self.body(region, values, []) for region in regions)
        elif regions:  # the function of a reduction
            inner = [str(i.operation.name).partition(".")[2] for i in regions[0].blocks[0].operations]
            operation.attributes = attributes | {"function": inner[0] if inner else ""}
        if not operation.bodies and name not in DISTINCT:
            types = tuple((x.shape, x.bits, x.spec) for x in outputs)
            key = (name, tuple(map(id, inputs)), tuple(sorted(operation.attributes.items())), types)
            if seen.setdefault(key, operation) is not operation:
                return seen[key].outputs
        for output in outputs:
            output.producer = operation
        into.operations.append(operation)
        return outputs

    def body(self, region: Any, values: dict[Any, Array], arguments: Sequence[Array]) -> Block:
        body = region.blocks[0]
        given = tuple(arguments)
        block = Block(given)
        block.results = tuple(self.block(body, values | dict(zip(body.arguments, given, strict=True)), block, {}))
        return block

    def loop(self, operation: Operation, regions: Sequence[Any], values: dict[Any, Array]) -> None:
        """The body of a loop. Its arguments have the shardings of the results."""
        condition, body = (region.blocks[0] for region in regions)
        arguments = [self.array(v, o.spec) for v, o in zip(body.arguments, operation.outputs, strict=True)]
        for argument, given in zip(arguments, operation.inputs, strict=True):
            argument.on_host = given.on_host
        operation.bodies = (self.body(regions[1], values, arguments),)
        # A loop that collects values in the memory of the host starts from zeros there.
        results = operation.bodies[0].results
        for each in zip(operation.inputs, arguments, results, operation.outputs, strict=True):
            if any(x.on_host for x in each):
                for x in each:
                    x.on_host = True
        count = expected_trips(operation.source) or self.trip_count(condition, values)
        operation.times, operation.times_known = (count, True) if count is not None else (1, False)

    def trip_count(self, condition: Any, values: dict[Any, Array]) -> int | None:
        """n of the condition `i < n`, as loops of `jax.lax.scan` have it; None for others."""
        constants = {}
        for item in condition.operations:
            name = item.operation.name
            if name.endswith(".constant") and (number := _NUMBER.search(str(item.attributes["value"])[:80])):
                constants[item.results[0]] = int(number[1])
            if name == "stablehlo.compare" and "LT" in str(item.attributes["comparison_direction"]):
                limit = item.operands[1]
                if limit in constants:
                    return constants[limit]
                outer = values.get(limit)
                if outer is not None and outer.producer is not None and "value" in outer.producer.attributes:
                    number = _NUMBER.search(outer.producer.attributes["value"])
                    return int(number[1]) if number else None
        return None


def _attribute_text(name: str, attribute: Any) -> str:
    """The text of an attribute; large constants are not printed."""
    if name in COLLECTIVES and hasattr(attribute, "is_splat") and getattr(attribute.type, "rank", 0) == 2:
        return str(np.array(attribute)[0].tolist())  # the first group of devices
    if name == "constant" and not getattr(attribute, "is_splat", False):
        return f"{hash(attribute)} : {attribute.type}"
    return str(attribute)


PHASES = ("forward", "backward", "update")


def _set_phases(block: Block, outer: str) -> None:
    """The phase of every operation, by its name stack in JAX.

    Names inside of a loop or a shard_map are relative to it: there the phase of the loop counts, or the last one of the
    operands. Operations that are neither forward nor backward are the update.
    """
    for operation in block.operations:
        phases = [x.producer.phase for x in operation.inputs if x.producer is not None]
        if "transpose(" in operation.source or outer == "backward":
            operation.phase = "backward"
        elif "jvp(" in operation.source:
            operation.phase = "forward"
        elif outer == "forward":
            operation.phase = outer
        elif not operation.source.startswith("jit(") and {"forward", "backward"} & set(phases):
            operation.phase = "backward" if "backward" in phases else "forward"
        for body in operation.bodies:
            _set_phases(body, operation.phase)


def read_program(module: Any, axis_sizes: Mapping[str, int], platform: str, excess_precision: bool) -> Program:
    """The program of a propagated module; see `jax_compat.propagated_module`."""
    block, names, donated = _Reader(module, axis_sizes, platform).main()
    _remove_unused(block)
    _split_constants(block, axis_sizes)
    _set_phases(block, "")
    return Program(block, dict(axis_sizes), names, donated, platform, excess_precision)


def local_shape(shape: Sequence[int], spec: Spec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(
        -(-size // math.prod(axis_size(axis, sizes) for axis in axes)) if axes else size
        for size, axes in zip(shape, spec, strict=True)
    )


def _split_constants(block: Block, sizes: Mapping[str, int]) -> None:
    """Values that are computed from constants alone get the sharding of their first use: each device has its part."""
    constant: set[int] = set()
    uses: dict[int, Operation] = {}
    arrays = []
    for operation, _ in block.walk():
        for array in operation.inputs:
            if operation.outputs and operation.outputs[0].shape == array.shape and not operation.bodies:
                uses.setdefault(id(array), operation)
        if operation.kind in ("constant", "iota") or (
            operation.inputs and not operation.bodies and all(id(x) in constant for x in operation.inputs)
        ):
            constant |= set(map(id, operation.outputs))
            arrays += operation.outputs
    for array in reversed(arrays):
        if not array.axes and (use := uses.get(id(array))) is not None:
            array.spec = use.outputs[0].spec
            array.local = local_shape(array.shape, array.spec, sizes)


def _remove_unused(block: Block) -> None:
    """Remove the operations whose results nothing uses, loop values included."""
    used = set(map(id, block.results))
    kept = []
    for operation in reversed(block.operations):
        if not (any(id(x) in used for x in operation.outputs) or operation.attributes.get("has_side_effect") == "true"):
            continue
        for body in operation.bodies:
            _remove_unused(body)
            used |= {id(x) for inner, _ in body.walk() for x in inner.inputs} | set(map(id, body.results))
        used |= set(map(id, operation.inputs))
        kept.append(operation)
    block.operations[:] = reversed(kept)
