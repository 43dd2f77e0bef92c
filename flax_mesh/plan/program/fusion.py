"""The kernels of a program: which operations XLA computes together, and which values it stores.

Most operations are computed inside of those that use their results. These values are stored:

- results and operands of matrix products, convolutions, reductions, collectives, lookups, loops and kernels;
  but a reduction computes its operand itself, and on TPUs so does a product;
- results that are expensive to compute (exp, tanh ...) and have several uses;
- on accelerators, results with several uses that take fewer bytes to store and read than to compute again;
- on CPUs, both factors of products that a reduction sums (but broadcast ones with one use), and products of two arrays
  with several uses;
- results of the program and of loops.

On TPUs a product includes the operations that follow it elementwise; on GPUs, where cuBLAS computes most products, only
a conversion of its result. On CPUs it reads operands whose last dims are not the dims of a matrix product from a
transposed copy, and values behind an optimization barrier wait for all of its operands.
"""

import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence

from flax_mesh.plan.program.collectives import Exchange
from flax_mesh.plan.program.combine import combine
from flax_mesh.plan.program.kernels import (
    CONSTANTS,
    LARGE,
    MOVES,
    PARTS,
    PRODUCTS,
    ROOTS,
    UPDATES,
    VIEWS,
    Buffer,
    Kernel,
    Read,
    base_of,
    carried_inputs,
    is_broadcast,
    is_expensive,
    is_filled,
    matrix_order,
    widens,
)
from flax_mesh.plan.program.once import remove_single_trips
from flax_mesh.plan.program.program import Array, Block, Operation, Program, local_shape
from flax_mesh.plan.program.rules import sharding_needs
from flax_mesh.text import grouped

Leaves = tuple[tuple[Array, int], ...]  # stored values that a value is computed from, and how many bytes of each


def fuse(program: Program, exchanges: Sequence[Exchange]) -> tuple[list[Kernel], list[Buffer]]:
    """The kernels of a program in the order of its operations, and the buffers of its results."""
    block = program.block
    exchanges = remove_single_trips(block, exchanges)
    by_operation = grouped(exchanges, lambda exchange: id(exchange.operation))
    given: dict[object, Buffer] = {id(x): Buffer(x.bytes, x, "", fixed=True) for x in block.arguments}
    in_place = {id(block.results[result]) for result in program.donated.values() if result >= 0}
    fusion = _Fusion(block, program, by_operation, given, {}, in_place)
    return fusion.kernels, fusion.buffers_of(block.results)


class _Fusion:
    """The fusion of one block. `given` are buffers outside of it, `outside` the leaves of values outside of it."""

    def __init__(
        self,
        block: Block,
        program: Program,
        exchanges: Mapping[int, Sequence[Exchange]],
        given: Mapping[object, Buffer],
        outside: Mapping[int, Leaves],
        in_place: set[int],
    ):
        self.block, self.program, self.exchanges, self.in_place = block, program, exchanges, in_place
        self.cpu, self.tpu = program.platform == "cpu", program.platform == "tpu"
        self.buffers, self.known = dict(given), dict(outside)
        self.gathered: dict[object, Array] = {}
        self.results, self.inside = set(map(id, block.results)), set(block.operations)
        self.uses = self._uses()
        self.chains: dict[int, list[Operation]] = {}  # id of the last value -> the product and the operations after it
        self.absorbed: set[int] = set()
        if not self.cpu:
            for operation in block.operations:
                self._extend(operation)
        self.stored = self._stored()
        self.kernels: list[Kernel] = []
        for operation in block.operations:
            self._visit(operation)
        if self.cpu:
            self.kernels = combine(self.kernels, block, exchanges)

    def buffers_of(self, arrays: Iterable[Array]) -> list[Buffer]:
        buffers = {id(read.buffer): read.buffer for x in arrays for read in self.read(x).values()}
        return list(buffers.values())

    # Which values are stored

    def _uses(self) -> dict[int, list[Operation]]:
        """The operations that use each value. CPUs store the inputs of loops; accelerators may compute them inside."""
        uses: dict[int, list[Operation]] = {}
        for operation in self.block.operations:
            for array in carried_inputs(operation) if operation.kind == "while" else operation.inputs:
                uses.setdefault(id(self._narrow(operation, array)), []).append(operation)
            for body in operation.bodies:
                for inner in body.walk():
                    for array in inner.inputs:
                        uses.setdefault(id(self._narrow(inner, array)), []).append(operation if self.cpu else inner)
        return uses

    def _narrow(self, use: Operation, array: Array) -> Array:
        """The value that is stored for a use. Without excess precision, it is the narrow value that the use widens."""
        producer = array.producer
        if self.cpu or self.program.excess_precision or producer is None or not widens(producer):
            return array
        return producer.inputs[0] if use.kind == "reduce" or not self._is_root(use) else array

    def _is_root(self, operation: Operation) -> bool:
        """Whether an operation has a separate result in memory. A gathered operand alone does not suffice."""
        exchanges = self.exchanges.get(id(operation), ())
        return operation.kind in ROOTS or any(x.array is None or operation.kind == "reshard" for x in exchanges)

    def _extend(self, product: Operation) -> None:
        """Find the chain of elementwise operations after a product."""
        if product.kind not in PRODUCTS or self.exchanges.get(id(product)):
            return
        chain, array = [product], product.outputs[0]
        while len(uses := self.uses.get(id(array), [])) == 1 and id(array) not in self.results:
            (use,) = uses
            if use not in self.inside or use.kind in CONSTANTS | MOVES or self._is_root(use):
                break
            if not self.tpu and (use.kind != "convert" or (widens(use) and not self.program.excess_precision)):
                break
            if len(use.outputs) != 1 or use.outputs[0].size != array.size:
                break
            if id(use.outputs[0]) in self.absorbed or id(use.outputs[0]) in self.chains:
                break  # the kernel of another product computes it, and reads the result of this one
            chain.append(use)
            array = use.outputs[0]
        if len(chain) > 1:
            self.chains[id(array)] = chain
            self.absorbed |= {id(each.outputs[0]) for each in chain[:-1]}

    def _stored(self) -> set[int]:
        stored = set(self.results) | set(self.chains)
        for operation in self.block.operations:
            for array in operation.outputs:
                uses = self.uses.get(id(array), [])
                phases = {use.phase for use in uses if use.kind in PRODUCTS}
                several = len(uses) > 1 and (is_expensive(operation, self.cpu) or len(phases) > 1)
                if several or any(self._reads_memory(use, array) for use in uses):
                    stored.add(id(array))
        return stored

    def _saves_reads(self, array: Array) -> bool:
        """Whether accelerators read and write fewer bytes if they store a value than if each use computes it again."""
        uses = len(self.uses.get(id(array), ()))
        if self.cpu or uses < 2:
            return False
        operands = sum(read.bytes for read in self.read(array).values())
        return (uses - 1) * operands > (uses + 1) * array.bytes

    def _reads_memory(self, use: Operation, array: Array) -> bool:
        if use.kind == "reduce":
            return False
        if self.cpu and use.kind == "multiply" and self._is_reduced(use):
            return array.producer is not None and (not is_broadcast(array) or len(self.uses[id(array)]) > 1)
        if use.kind in PRODUCTS:
            return not self.tpu and (not self.cpu or matrix_order(use, array) is None)
        return use.kind == "optimization_barrier" or self._is_root(use)

    def _is_reduced(self, factor: Operation) -> bool:
        """Whether CPUs sum the products in the kernel of a reduction, which reads both factors."""
        return [use.kind for use in self.uses.get(id(factor.outputs[0]), ())] == ["reduce"]

    # The values that a value is computed from

    def leaves(self, array: Array) -> Leaves:
        """Found from the value back, without recursion: a chain of cheap operations is as long as the model is deep."""
        if id(array) in self.known:
            return self.known[id(array)]
        sizes: dict[int, tuple[Array, int]] = {}
        reached: dict[int, int] = {}  # id of a value -> most bytes that are read of each of its leaves
        waiting = [(array, sys.maxsize)]
        while waiting:
            x, most = waiting.pop()
            if most <= reached.get(id(x), -1):
                continue
            reached[id(x)] = most
            leaves, operands = self._origin(x)
            for leaf, size in leaves:
                before = sizes[id(leaf)][1] if id(leaf) in sizes else 0
                sizes[id(leaf)] = leaf, max(before, min(size, most))
            if x.producer is not None and x.producer.kind in PARTS:
                most = min(most, x.bytes)
            waiting += [(operand, most) for operand in reversed(operands)]
        self.known[id(array)] = tuple(sizes.values())
        return self.known[id(array)]

    def _origin(self, array: Array) -> tuple[Leaves, Sequence[Array]]:
        """The leaves of a value that are known at once, and the values that have its other leaves."""
        if id(array) in self.known:
            return self.known[id(array)], ()
        producer = array.producer
        if producer is None or id(array) in self.buffers or self._is_root(producer):
            return ((array, array.bytes),), ()
        if producer.kind != "optimization_barrier":
            return (), self._gathered(producer)
        operand = producer.inputs[producer.outputs.index(array)]
        if not self.cpu or any(x.producer is not None for x, _ in self.leaves(operand)):
            return (), (operand,)
        others = (x for each in producer.inputs for x, _ in self.leaves(each))
        # An argument waits for the others.
        return (*self.leaves(operand), *((x, 0) for x in others if x.producer is not None)), ()

    def _gathered(self, operation: Operation) -> list[Array]:
        """The operands of a fused operation: an array that a collective changes is replaced by its result."""
        operands = list(operation.inputs)
        for exchange in self.exchanges.get(id(operation), ()):
            if exchange.array is None:
                continue
            key = "result", id(exchange.array), exchange.wanted
            if key not in self.gathered:
                x = exchange.array
                local = local_shape(x.shape, exchange.wanted, self.program.axis_sizes)
                result = self.gathered[key] = Array(x.shape, x.bits, x.kind, exchange.wanted, local, None)
                self._add(operation, self.read(x), (result,))
                self.buffers[id(result)].gathered = True
            operands = [self.gathered[key] if x is exchange.array else x for x in operands]
        return operands

    def read(self, *arrays: Array) -> dict[int, Read]:
        """The buffers that are read to compute values."""
        reads: dict[int, Read] = {}
        for array in arrays:
            for x, size in self.leaves(array):
                if (buffer := self.buffers.get(id(x))) is not None:
                    before = reads[id(buffer)].bytes if id(buffer) in reads else 0
                    reads[id(buffer)] = Read(buffer, max(size, before))
        return reads

    # Kernels

    def _visit(self, operation: Operation) -> None:
        first = id(operation.outputs[0]) if operation.outputs else 0
        if first in self.absorbed or operation.kind == "optimization_barrier":
            return
        if first in self.chains:
            self._product(self.chains[first])
        elif operation.kind == "while":
            self._loop(operation)
        elif self._is_root(operation):
            filled = self._fill(operation.inputs[:1] if operation.kind == "scatter" else ())
            reads = self._operands(operation, operation.inputs)
            kernel = self._add(operation, reads, operation.outputs, (operation,))
            kernel.elementwise = bool(filled)
            self._forget(filled)
        elif operation.kind not in CONSTANTS:
            self._gathered(operation)
            for array in operation.outputs:
                if id(array) in self.stored or self._saves_reads(array):
                    self._fused(operation, array)

    def _add(
        self,
        operation: Operation,
        reads: dict[int, Read],
        arrays: Sequence[Array],
        computes: tuple[Operation, ...] = (),
    ) -> Kernel:
        writes = [Buffer(x.bytes, x, operation.phase, fixed=id(x) in self.in_place) for x in arrays]
        self.buffers.update({id(x): buffer for x, buffer in zip(arrays, writes, strict=True)})
        written = sum(buffer.bytes for buffer in writes)
        kernel = Kernel(
            operation.source, operation.phase, reads, writes, computes, elementwise=not computes, written_bytes=written
        )
        self.kernels.append(kernel)
        return kernel

    def _fused(self, operation: Operation, array: Array) -> None:
        """A stored value of a cheap operation: a view of another one, an update in place, or a kernel."""
        if not self.cpu and not self.leaves(array) and all(u.kind == "while" for u in self.uses.get(id(array), [])):
            self.known.pop(id(array))
            return  # the zeros that a loop starts from are written where the loop updates them
        self.known.pop(id(array), None)
        if self._is_filled(array) and any(use.kind in UPDATES for use in self.uses[id(array)]):
            return  # each of these uses updates a separate array
        base = base_of(operation.inputs[0], self.buffers) if operation.inputs else None
        if operation.kind in VIEWS and base is not None and base.bytes == array.bytes:
            self.buffers[id(array)] = base
        elif operation.kind == "dynamic_update_slice" and base is not None and base.bytes == array.bytes:
            reads = self.read(*operation.inputs[1:])
            self.buffers[id(array)] = base
            size = operation.inputs[1].bytes
            self.kernels.append(Kernel(operation.source, operation.phase, reads, [], updates=base, written_bytes=size))
        else:
            reads = self.read(*self._gathered(operation))
            if operation.kind in PARTS:
                reads = {key: Read(buffer, min(size, array.bytes)) for key, (buffer, size) in reads.items()}
            self._add(operation, reads, (array,))

    def _fill(self, arrays: Sequence[Array]) -> list[Buffer]:
        """CPUs write an array of one number for each value that starts from it, as early as possible."""
        filled = list[Buffer]()
        for x in filter(self._is_filled, arrays):
            self.known.pop(id(x), None)
            assert x.producer is not None
            filled += self._add(x.producer, {}, (x,)).writes
        return filled

    def _is_filled(self, array: Array) -> bool:
        return self.cpu and id(array) not in self.results and is_filled(array)

    def _forget(self, filled: Sequence[Buffer]) -> None:
        for buffer in filled:
            self.known.pop(id(buffer.array), None)
            self.buffers.pop(id(buffer.array), None)

    def _product(self, chain: Sequence[Operation]) -> None:
        product, *rest = chain
        reads = self._operands(product, product.inputs)
        reads |= self.read(*(x for each in rest for x in each.inputs if id(x) not in self.absorbed))
        self._add(product, reads, chain[-1].outputs, (product,))

    def _operands(self, operation: Operation, arrays: Sequence[Array]) -> dict[int, Read]:
        """Where a root reads its operands: a gathered copy, a transposed copy, or the value."""
        reads: dict[int, Read] = {}
        gathered = {
            id(exchange.array): exchange.result_bytes
            for exchange in self.exchanges.get(id(operation), ())
            if exchange.kind in ("all-gather", "all-to-all") and operation.kind != "reshard"
        }
        wanted = dict(zip(map(id, operation.inputs), sharding_needs(operation).specs, strict=False))
        for array in arrays:
            key = "gathered", id(array), wanted.get(id(array))
            if id(array) in gathered or (self.cpu and key in self.buffers):  # by this operation, or before
                copy = self._copy(key, array, gathered.get(id(array), 0))
                reads[id(copy)] = Read(copy, copy.bytes)
            elif operation.kind in PRODUCTS and self.cpu and (order := matrix_order(operation, array)) is not None:
                copy = self._copy(("transposed", id(array), order), array, array.bytes)
                reads[id(copy)] = Read(copy, copy.bytes)
            elif operation.kind == "gather" and array is operation.inputs[0]:
                size = operation.outputs[0].bytes
                reads |= {key: Read(x.buffer, min(x.bytes, size)) for key, x in self.read(array).items()}
            else:
                reads |= self.read(array)
        return reads

    def _copy(self, key: tuple[Hashable, ...], array: Array, size: int) -> Buffer:
        """A copy of a value, made once. It is computed from the operands of the value, if that is cheap."""
        buffer = self.buffers.get(key)
        if buffer is None:
            producer = array.producer
            reads = self.read(array)
            if producer is not None and not self._is_root(producer) and not is_expensive(producer, self.cpu):
                reads = self.read(*producer.inputs) or reads
            source, phase = (producer.source, producer.phase) if producer is not None else ("", "forward")
            buffer = self.buffers[key] = Buffer(size, array, phase, gathered=key[0] == "gathered")
            self.kernels.append(Kernel(source, phase, reads, [buffer], written_bytes=size))
        return buffer

    def _loop(self, operation: Operation) -> None:
        """The values that a loop changes are stored once and updated; the others are read where they are."""
        body = operation.bodies[0]
        given: dict[object, Buffer] = {
            key: Buffer(x.bytes, x.array, x.phase, fixed=True) for key, x in self.buffers.items()
        }
        changed = set(map(id, carried_inputs(operation)))
        carried, inits = list[Array](), list[Array]()
        for init, argument, out in zip(operation.inputs, body.arguments, operation.outputs, strict=True):
            if id(init) in changed:
                carried.append(out)
                inits.append(init)
                given[id(argument)] = Buffer(argument.bytes, argument, "", fixed=True)
            else:
                self.known[id(argument)] = self.known[id(out)] = self.leaves(init)
        inside = {id(x) for each in body.walk() for x in each.outputs} | set(map(id, body.arguments))
        captured = {id(x): x for each in body.walk() for x in each.inputs if id(x) not in inside}
        filled = self._fill(inits)
        reads = self.read(*inits, *captured.values()) | {id(x): Read(x, x.bytes) for x in filled}
        self._forget(filled)
        if self.cpu:
            reads |= self._hoisted(operation)
        inner = _Fusion(body, self.program, self.exchanges, given, self.known, set())
        kernel = self._add(operation, reads, carried, (operation,))
        kernel.body, kernel.results = inner.kernels, inner.buffers_of(body.results)
        kernel.elementwise = True  # each carried value takes the memory of its initial one

    def _hoisted(self, loop: Operation) -> dict[int, Read]:
        """CPUs store constants that JAX computes before a loop, such as masks of attention.

        Shardy computes them in the body, for all that use them; the sharding is the one in the body.
        """
        inside = {(x.shape, x.bits): x for each in loop.bodies[0].walk() for x in each.outputs}
        reads: dict[int, Read] = {}
        for init in loop.inputs:
            x = inside.get((init.shape, init.bits))
            if x is not None and x.bytes >= LARGE and not init.axes and not self.leaves(init):
                buffer = self._copy(("hoisted", x.local, x.bits), x, x.bytes)
                reads[id(buffer)] = Read(buffer, x.bytes)
        return reads
