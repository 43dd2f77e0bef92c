"""Bytes on one device over the time of a program: which values XLA stores, in which order, and for how long.

XLA fuses most operations into those that use their results. The rules here say which values are stored nevertheless:

- results of matrix products, convolutions, reductions, collectives, lookups, loops and kernels;
- what these read, except reductions: their operands are computed inside of the fusion;
- results that are expensive to recompute (exp, divide ...) and have several uses;
- arguments and results of the program and of loops.

All other values are computed where they are used. A value that dies where another one of its size is made gives its
memory to it. The carried values of a loop are updated in place, and so are donated arguments.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flax_mesh.plan.collectives import Exchange, conv_labels, dot_dims
from flax_mesh.plan.program import COLLECTIVES, Array, Block, Operation, Program

EXPENSIVE = frozenset(
    {"exponential", "exponential_minus_one", "log", "log_plus_one", "logistic", "tanh", "erf", "power", "rsqrt", "sqrt"}
    | {"cbrt", "divide", "sine", "cosine", "tan", "atan2", "remainder", "erf_inv"}
)
# Operations with a result of their own in memory; all others are fused.
ROOTS = frozenset(
    {"dot_general", "dot", "convolution", "reduce", "reduce_window", "select_and_scatter", "gather", "scatter", "sort"}
    | {"while", "case", "if", "custom_call", "rng_bit_generator", "cholesky", "triangular_solve", "fft", "top_k"}
    | {"ragged_dot", "optimization_barrier", *COLLECTIVES}
)
PRODUCTS = frozenset({"dot_general", "convolution"})
FREE = frozenset({"constant", "iota"})
VIEWS = frozenset({"reshape", "shard", "bitcast_convert", "optimization_barrier"})


@dataclass(eq=False, slots=True)
class Buffer:
    """Memory of one value, from its kernel to the last one that reads it."""

    bytes: int
    array: Array
    label: str
    kernel: int = -1
    last: int = -1
    fixed: bool = False  # it exists before the block and after it: not counted in the block


@dataclass(eq=False, slots=True)
class Kernel:
    """One instruction after fusion."""

    operation: Operation | None
    reads: list[Buffer] = field(default_factory=list)
    writes: list[Buffer] = field(default_factory=list)
    inside: "BlockMemory | None" = None  # the body of a loop
    source: str = ""
    reuses: bool = True  # whether the result may take the memory of an operand


@dataclass(frozen=True)
class BlockMemory:
    """The temporary bytes of a block: `peak`, and the buffers that are alive then."""

    peak: int
    alive: tuple[tuple[Buffer, int], ...]
    kernels: tuple[Kernel, ...] = ()
    totals: tuple[int, ...] = ()  # temporary bytes while each kernel runs


class BlockWalk:
    """Buffers and kernels of one block."""

    def __init__(
        self,
        block: Block,
        program: Program,
        exchanges: Mapping[int, Sequence[Exchange]],
        outer: Mapping[object, Buffer],
        in_place: frozenset[int] = frozenset(),
    ):
        self.block, self.program, self.exchanges, self.in_place = block, program, exchanges, in_place
        self.cpu = program.platform == "cpu"
        self.uses: dict[int, list[Operation]] = {}
        for operation in block.operations:
            inputs = operation.inputs
            if operation.kind == "while" and not self.cpu:
                inputs = carried_inputs(operation)  # what a loop does not change is computed in its body
            for array in inputs:
                self.uses.setdefault(id(array), []).append(operation)
            for body in operation.bodies:
                for inner, _ in body.walk():
                    for array in inner.inputs:
                        self.uses.setdefault(id(array), []).append(inner)
        self.results = set(map(id, block.results))
        self.stored = self._stored()
        self.buffers: dict[object, Buffer] = dict(outer or {})
        self.kernels: list[Kernel] = []
        self._leaves: dict[int, tuple[Array, ...]] = {}
        self.inherited: dict[int, tuple[Array, ...]] = {}

    def _stored(self) -> set[int]:
        """Ids of the values that are stored although they could be fused."""
        stored: set[int] = set()
        for operation in reversed(self.block.operations):
            for array in operation.outputs:
                uses = self.uses.get(id(array), [])
                if id(array) in self.results or any(self._reads_memory(use, array) for use in uses):
                    stored.add(id(array))
                elif len(uses) > 1 and is_expensive(operation):
                    stored.add(id(array))
        return stored

    def _reads_memory(self, use: Operation, array: Array) -> bool:
        if use.kind in PRODUCTS and not self.cpu:
            return False
        if use.kind == "reduce":
            return False
        if use.kind in ROOTS:
            return not (self.cpu and use.kind in PRODUCTS and self._form(use, array) is not None)
        return bool(self.exchanges.get(id(use)))

    def _form(self, use: Operation, array: Array) -> tuple[int, ...] | None:
        """The order of dims in which a product on CPU reads an operand; None: as it is."""
        if use.kind == "convolution":
            labels = conv_labels(use)[0 if use.inputs[0] is array else 1]
            first, last = ("b", "f") if use.inputs[0] is array else ("", "o")
            ends = (not first or labels[0] == first) and labels[-1] == last
            return None if ends else tuple(range(len(labels)))
        batch_l, batch_r, contract_l, contract_r = dot_dims(use)
        lhs = use.inputs[0] is array
        batch, contract = (batch_l, contract_l) if lhs else (batch_r, contract_r)
        free = tuple(d for d in range(len(array.shape)) if d not in batch + contract)
        order = (*batch, *free, *contract) if lhs else (*batch, *contract, *free)
        moved = tuple(d for d in order if array.local[d] > 1)
        return None if moved == tuple(sorted(moved)) else order

    # Reading

    def leaves(self, array: Array) -> tuple[Array, ...]:
        """The stored values that an array is computed from."""
        found = self._leaves.get(id(array)) or self.inherited.get(id(array))
        if found is None:
            producer = array.producer
            if id(array) in self.buffers or producer is None or producer.kind in ROOTS - VIEWS:
                found = (array,)
            elif producer.kind in FREE:
                found = ()
            else:
                found = tuple({id(x): x for i in producer.inputs for x in self.leaves(i)}.values())
            self._leaves[id(array)] = found
        return found

    def read(self, array: Array) -> list[Buffer]:
        return [self.buffers[id(x)] for x in self.leaves(array) if id(x) in self.buffers]

    # Kernels

    def walk(self) -> None:
        for operation in self.block.operations:
            if operation.kind == "optimization_barrier":
                self.barrier(operation)
            elif operation.kind in ROOTS - VIEWS:
                self.root(operation)
            else:
                for array in operation.outputs:
                    if id(array) in self.stored and operation.kind not in FREE:
                        self.fused(operation, array)
                for exchange in self.exchanges.get(id(operation), ()):
                    del exchange

    def barrier(self, operation: Operation) -> None:
        for array, out in zip(operation.inputs, operation.outputs, strict=True):
            self._leaves[id(out)] = self.leaves(array)

    def fused(self, operation: Operation, array: Array) -> None:
        reads = list({id(b): b for x in operation.inputs for b in self.read(x)}.values())
        if operation.kind in VIEWS and len(reads) == 1 and operation.inputs[0].bytes == array.bytes:
            if id(operation.inputs[0]) in self.buffers:
                self.buffers[id(array)] = reads[0]
                return
        if operation.kind == "dynamic_update_slice":
            target = operation.inputs[0]
            base = self.read(target)
            if len(base) == 1 and base[0].bytes == array.bytes:
                self.buffers[id(array)] = base[0]  # in place
                self.kernels.append(Kernel(operation, reads, [], source=operation.source))
                return
        self.add(operation, reads, (array,))

    def add(self, operation: Operation, reads: list[Buffer], arrays: Sequence[Array], reuses: bool = True) -> Kernel:
        kernel = Kernel(operation, reads, source=operation.source, reuses=reuses)
        for array in arrays:
            buffer = Buffer(array.bytes, array, operation.source, fixed=id(array) in self.in_place)
            self.buffers[id(array)] = buffer
            kernel.writes.append(buffer)
        self.kernels.append(kernel)
        return kernel

    def root(self, operation: Operation) -> None:
        gathered = {id(e): e for e in self.exchanges.get(id(operation), ())}
        if operation.kind == "while":
            self.loop(operation)
            return
        reads: list[Buffer] = []
        for array in operation.inputs:
            reads += self.operand(operation, array)
        reads = list({id(b): b for b in reads}.values())
        del gathered
        self.add(operation, reads, operation.outputs, reuses=False)

    def operand(self, operation: Operation, array: Array) -> list[Buffer]:
        """The buffers that an operand is read from: a gathered copy, a transposed copy, or the value."""
        for exchange in self.exchanges.get(id(operation), ()):
            if exchange.kind in ("all-gather", "all-to-all") and exchange.array is array:
                return [self.copy(("gathered", id(array), exchange.wanted), array, exchange.result_bytes)]
        if operation.kind in PRODUCTS and self.cpu and (form := self._form(operation, array)) is not None:
            return [self.copy(("form", id(array), form), array, array.bytes)]
        return self.read(array)

    def copy(self, key: object, array: Array, size: int) -> Buffer:
        found = self.buffers.get(key)
        if found is None:
            producer = array.producer
            found = Buffer(size, array, producer.source if producer else "")
            self.buffers[key] = found
            reads = self.read(array)
            if producer is not None and producer.kind not in ROOTS and not is_expensive(producer):
                reads = list({id(b): b for x in producer.inputs for b in self.read(x)}.values()) or reads
            self.kernels.append(Kernel(producer, reads, [found], source=found.label, reuses=False))
        return found

    def loop(self, operation: Operation) -> None:
        """The carried values are stored once; the body adds its own temporary peak. Invariants are read directly."""
        body = operation.bodies[0]
        inner: dict[object, Buffer] = {
            key: Buffer(buffer.bytes, buffer.array, "", fixed=True) for key, buffer in self.buffers.items()
        }
        carried, reads = [], []
        changed = set(map(id, carried_inputs(operation)))
        for init, argument, out in zip(operation.inputs, body.arguments, operation.outputs, strict=True):
            if id(init) not in changed:
                self._leaves[id(argument)] = self._leaves[id(out)] = self.leaves(init)
            else:
                carried.append(out)
                inner[id(argument)] = Buffer(argument.bytes, argument, "", fixed=True)
                reads += self.read(init)
        inside = {id(array) for each, _ in body.walk() for array in each.outputs}
        for each, _ in body.walk():
            for array in each.inputs:
                if id(array) not in inside:
                    reads += self.read(array)
        memory = block_memory(body, self.program, self.exchanges, inner, leaves=self._leaves)
        kernel = self.add(operation, list({id(b): b for b in reads}.values()), carried)
        kernel.inside = memory


def is_expensive(operation: Operation) -> bool:
    """Whether a result is stored rather than computed twice. XLA multiplies by the reciprocal of a broadcast value."""
    if operation.kind == "divide":
        producer = operation.inputs[1].producer
        return producer is None or producer.kind != "broadcast_in_dim"
    return operation.kind in EXPENSIVE


def carried_inputs(loop: Operation) -> list[Array]:
    """The initial values of what a loop changes."""
    body = loop.bodies[0]
    computed = {id(array) for operation in body.operations for array in operation.outputs}
    computed |= set(map(id, body.arguments))
    triples = zip(loop.inputs, body.arguments, body.results, strict=True)
    return [init for init, argument, result in triples if result is not argument and id(result) in computed]


def block_memory(
    block: Block,
    program: Program,
    exchanges: Mapping[int, Sequence[Exchange]],
    outer: Mapping[object, Buffer],
    in_place: frozenset[int] = frozenset(),
    leaves: Mapping[int, tuple[Array, ...]] | None = None,
) -> BlockMemory:
    """The temporary bytes of a block. `outer` are buffers that exist outside of it; results `in_place` take one over."""
    walk = BlockWalk(block, program, exchanges, outer, in_place)
    walk.inherited = dict(leaves or {})
    walk.walk()
    kernels = order_kernels(walk.kernels, "breadth" if walk.cpu else "memory")
    return measure(kernels, [walk.buffers.get(id(x)) for x in block.results])


def order_kernels(kernels: list[Kernel], how: str) -> list[Kernel]:
    """The order in which XLA runs the kernels: breadth first on CPU, else the one that frees most memory first."""
    writer = {id(b): i for i, k in enumerate(kernels) for b in k.writes}
    last_update: dict[int, int] = {}
    waits: list[set[int]] = []
    for i, kernel in enumerate(kernels):
        before = {writer[id(b)] for b in kernel.reads if id(b) in writer}
        before |= {last_update[id(b)] for b in kernel.reads if id(b) in last_update}
        before.discard(i)
        waits.append(before)
        if not kernel.writes and kernel.reads:
            last_update[id(kernel.reads[0])] = i
    users: list[list[int]] = [[] for _ in kernels]
    for i, before in enumerate(waits):
        for j in before:
            users[j].append(i)
    missing = [len(before) for before in waits]
    if how == "breadth":
        queue = [i for i, count in enumerate(missing) if not count]
        for i in queue:
            for j in users[i]:
                missing[j] -= 1
                if not missing[j]:
                    queue.append(j)
        return [kernels[i] for i in queue]
    return _memory_order(kernels, users, missing)


def _memory_order(kernels: list[Kernel], users: list[list[int]], missing: list[int]) -> list[Kernel]:
    """List scheduling: of the ready kernels, the one that frees most bytes more than it takes."""
    reading: dict[int, list[int]] = {}
    for i, kernel in enumerate(kernels):
        for buffer in kernel.reads:
            reading.setdefault(id(buffer), []).append(i)
    readers = {buffer: len(indices) for buffer, indices in reading.items()}

    def gain(i: int) -> int:
        kernel = kernels[i]
        freed = sum(b.bytes for b in kernel.reads if readers[id(b)] == 1 and not b.fixed)
        return freed - sum(b.bytes for b in kernel.writes)

    heap = [(-gain(i), i) for i, count in enumerate(missing) if not count]
    heapq.heapify(heap)
    done, result = set(), []
    while heap:
        value, i = heapq.heappop(heap)
        if i in done:
            continue
        if -value != gain(i):
            heapq.heappush(heap, (-gain(i), i))
            continue
        done.add(i)
        result.append(kernels[i])
        touched = set()
        for buffer in kernels[i].reads:
            readers[id(buffer)] -= 1
            if readers[id(buffer)] == 1:  # the last reader frees it
                touched |= {j for j in reading[id(buffer)] if j not in done and not missing[j]}
        for j in users[i]:
            missing[j] -= 1
            if not missing[j]:
                touched.add(j)
        for j in touched:
            heapq.heappush(heap, (-gain(j), j))
    return result


def measure(
    kernels: list[Kernel], results: Sequence[Buffer | None]
) -> BlockMemory:
    """Peak of the temporary bytes while the kernels run in this order."""
    last: dict[int, int] = {}
    for i, kernel in enumerate(kernels):
        for buffer in (*kernel.reads, *kernel.writes):
            last[id(buffer)] = i
    kept = {id(b) for b in results if b is not None}
    for buffer_id in kept:
        last[buffer_id] = len(kernels)
    alive: dict[int, Buffer] = {}
    total, peak, at_peak, totals = 0, 0, (), []
    for i, kernel in enumerate(kernels):
        dying = [b for b in kernel.reads if last[id(b)] == i and id(b) in alive]
        freed = 0
        for buffer in kernel.writes:
            if buffer.fixed:
                continue
            if kernel.reuses and (match := next((b for b in dying if b.bytes == buffer.bytes), None)):
                dying.remove(match)
                total -= alive.pop(id(match)).bytes
            alive[id(buffer)] = buffer
            total += buffer.bytes
        extra = kernel.inside.peak if kernel.inside else 0
        totals.append(total + extra)
        if total + extra > peak:
            peak = total + extra
            at_peak = tuple((b, b.bytes) for b in alive.values()) + (kernel.inside.alive if kernel.inside else ())
        for buffer in kernel.reads:
            if last[id(buffer)] == i and id(buffer) in alive:
                total -= alive.pop(id(buffer)).bytes
        for buffer in kernel.writes:
            if last[id(buffer)] == i and id(buffer) in alive:
                total -= alive.pop(id(buffer)).bytes
        del freed
    return BlockMemory(peak, at_peak, tuple(kernels), tuple(totals))
