"""The operations of a traced step with the sharding of every value, read from its StableHLO module.

JAX lowers the step for a platform without its devices, Shardy propagates the shardings of the arguments and of the
constraints to all other values (`jax_compat.propagated_module`), and `read_program` copies the result into four small
types. Operations that cannot affect a result, and repeated ones, are left out, as in XLA.
"""

import re
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache

import numpy as np
from jax.extend.mlir import ir

from flax_mesh import jax_compat
from flax_mesh.blockwise.loops import expected_trips
from flax_mesh.plan.program.program import COLLECTIVES, Array, Block, Operation, Program, Spec, local_shape

_TYPE = re.compile(r"tensor<((?:\d+x)*)(?:complex<)?([a-z]+)(\d*)\w*")
_SPEC = re.compile(r"\[((?:\{[^}]*\}(?:p\d+)?(?:, )?)*)\]")
_DIM = re.compile(r"\{([^}]*)\}")
_AXIS = re.compile(r'"([^"]+)"(?::\((\d+)\)(\d+))?')
_ON_HOST = re.compile(r'mhlo.memory_kind = "(?:un)?pinned_host"')
_PLACEMENT = re.compile(r'_xla_buffer_placement = "(\w+)"')
_NUMBER = re.compile(r"dense<(-?\d+)>")
# Operations that are not read once if they are repeated.
DISTINCT = frozenset({"custom_call", "optimization_barrier", "rng", "rng_bit_generator"})
# Of an operand in the memory of the host, the result is there too.
KEEP_MEMORY = frozenset({"dynamic_update_slice", "dynamic_slice", "slice", "reshape", "broadcast_in_dim", "transpose"})


@lru_cache(65536)
def _parse_type(text: str) -> tuple[tuple[int, ...], int, str, str]:
    """(shape, bits per element, kind, name of the elements) of a type such as `tensor<16x128xbf16>`."""
    match = _TYPE.match(text)
    if match is None:
        return (), 0, "i", ""
    dims, name, bits = match.groups()
    width = 8 if name + bits == "i1" else int(bits or 32)  # "index" has no number
    complex_ = "complex<" in text
    kind = "c" if complex_ else "f" if name.startswith(("f", "bf")) else "i"
    return tuple(map(int, dims.split("x")[:-1])), width * (1 + complex_), kind, name + bits


@lru_cache(65536)
def _parse_specs(text: str) -> tuple[Spec, ...]:
    """The specs of a sharding attribute, one per value."""

    def axes(dim: str) -> tuple[str, ...]:
        return tuple(f"{name}:({before}){size}" if size else name for name, before, size in _AXIS.findall(dim))

    return tuple(tuple(map(axes, _DIM.findall(spec))) for spec in _SPEC.findall(text))


Values = dict[ir.Value, Array]
Seen = dict[Hashable, Operation]  # what an operation computes, and of which values -> the first such operation


class _Reader:
    """Copies a module. Equal operations on equal values are read once, as common subexpressions."""

    def __init__(self, module: ir.Module, axis_sizes: Mapping[str, int], platform: str):
        self.sizes = dict(axis_sizes)
        self.widens: tuple[str, ...] = ()  # types that are stored as float32, except in arguments
        self.cpu = platform == "cpu"
        self.function = next(item for item in module.body.operations if item.operation.name == "func.func")

    def array(self, value: ir.Value, spec: Spec | None) -> Array:
        shape, bits, kind, name = _parse_type(str(value.type))
        bits = 32 if name in self.widens else bits
        spec = spec if spec is not None and len(spec) == len(shape) else ((),) * len(shape)
        return Array(shape, bits, kind, spec, local_shape(shape, spec, self.sizes))

    def main(self) -> tuple[Block, dict[int, int]]:
        function = self.function
        body = function.regions[0].blocks[0]
        attributes = list(ir.ArrayAttr(function.attributes["arg_attrs"])) if "arg_attrs" in function.attributes else []
        arguments, donated, values = [], {}, {}
        for index, value in enumerate(body.arguments):
            text = str(attributes[index]) if attributes else ""
            specs = _parse_specs(text[text.find("sdy.sharding") :]) if "sdy.sharding" in text else ()
            arguments.append(self.array(value, specs[0] if specs else None))
            arguments[-1].on_host = bool(_ON_HOST.search(text))
            values[value] = arguments[-1]
            if alias := re.search(r"tf.aliasing_output = (\d+)", text):
                donated[index] = int(alias[1])
            elif "jax.buffer_donor" in text:
                donated[index] = -1
        block = Block(tuple(arguments))
        self.widens = jax_compat.float32_on_cpu() if self.cpu else ()
        block.results = tuple(self.block(body, values, block, {}))
        return block, donated

    def block(self, body: ir.Block, values: Values, into: Block, seen: Seen) -> list[Array]:
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

    def manual(self, item: ir.OpView, inputs: Sequence[Array], values: Values, into: Block) -> list[Array]:
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

    def specs(self, item: ir.OpView, name: str) -> Sequence[Spec | None]:
        return _parse_specs(str(item.attributes[name])) if name in item.attributes else [None] * len(item.results)

    def operation(
        self,
        item: ir.OpView,
        name: str,
        inputs: Sequence[Array],
        values: Values,
        into: Block,
        seen: Seen,
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
        source = getattr(item.location, "name_str", "")  # unlike its text, without the stack of the call
        outputs = [self.array(value, spec) for value, spec in zip(item.results, specs, strict=True)]
        for output in outputs:
            output.on_host = name == "to_host" or (name in KEEP_MEMORY and any(x.on_host for x in inputs))
        operation = Operation(name, tuple(inputs), tuple(outputs), attributes, source)
        if name == "while":
            self.loop(operation, regions, values)
        elif name in ("case", "if"):
            operation.bodies = tuple(self.body(region, values, []) for region in regions)
        elif regions:  # the function of a reduction
            inner = [str(i.operation.name).partition(".")[2] for i in regions[0].blocks[0].operations]
            operation.attributes = attributes | {"function": inner[0] if inner else ""}
        if (first := seen.setdefault(key_of(operation), operation)) is not operation:
            return first.outputs
        for output in outputs:
            output.producer = operation
        into.operations.append(operation)
        return outputs

    def body(self, region: ir.Region, values: Values, arguments: Sequence[Array]) -> Block:
        body = region.blocks[0]
        given = tuple(arguments)
        block = Block(given)
        block.results = tuple(self.block(body, values | dict(zip(body.arguments, given, strict=True)), block, {}))
        return block

    def loop(self, operation: Operation, regions: Sequence[ir.Region], values: Values) -> None:
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

    def trip_count(self, condition: ir.Block, values: Values) -> int | None:
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


def key_of(operation: Operation) -> Hashable:
    """Equal operations on the same values have equal keys, unless they are never read once."""
    if operation.bodies or operation.kind in DISTINCT:
        return id(operation)
    types = tuple((x.shape, x.bits, x.spec) for x in operation.outputs)
    return operation.kind, tuple(map(id, operation.inputs)), tuple(sorted(operation.attributes.items())), types


def _attribute_text(name: str, attribute: ir.Attribute) -> str:
    """The text of an attribute; large constants are not printed."""
    dense = attribute if isinstance(attribute, ir.DenseElementsAttr) else None
    if name in COLLECTIVES and dense is not None and ir.RankedTensorType(dense.type).rank == 2:
        return str(np.array(attribute)[0].tolist())  # the first group of devices
    if name == "constant" and not (dense and dense.is_splat):
        return f"{hash(attribute)} : {attribute.type}"
    return str(attribute)


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


def read_program(module: ir.Module, axis_sizes: Mapping[str, int], platform: str, excess_precision: bool) -> Program:
    """The program of a propagated module; see `jax_compat.propagated_module`."""
    block, donated = _Reader(module, axis_sizes, platform).main()
    _remove_unused(block)
    _split_constants(block, axis_sizes)
    _set_phases(block, "")
    return Program(block, dict(axis_sizes), donated, platform, excess_precision)


def _split_constants(block: Block, sizes: Mapping[str, int]) -> None:
    """Values that are computed from constants alone get the sharding of their first use: each device has its part."""
    constant: set[int] = set()
    uses: dict[int, Operation] = {}
    arrays = []
    for operation in block.walk():
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
            used |= {id(x) for inner in body.walk() for x in inner.inputs} | set(map(id, body.results))
        used |= set(map(id, operation.inputs))
        kept.append(operation)
    block.operations[:] = reversed(kept)
