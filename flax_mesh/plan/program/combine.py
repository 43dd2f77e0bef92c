"""All-reduces that XLA for CPUs combines into one instruction, which waits for the operands of all of them.

XLA visits the all-reduces of a program in post-order from its results. It combines those with the same function, type
and devices, until one depends on a member: that one starts the next instruction. A sum whose operands are small can
so wait for the gradient of a whole layer, and the partial gradients of all weights for the last of them.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence

from flax_mesh.plan.program.collectives import Exchange
from flax_mesh.plan.program.kernels import Buffer, Kernel, Read
from flax_mesh.plan.program.program import Block, Operation

MOST = 256  # in one instruction
SHARED = 16  # nodes below an operation from which it is a node itself, so that the graph stays small
SUMS = ("all-reduce", "reduce-scatter")  # CPUs have no reduce-scatter: they reduce all, and take a part

Exchanges = Mapping[int, Sequence[Exchange]]  # by the id of the operation


def combine(kernels: Sequence[Kernel], block: Block, exchanges: Exchanges) -> list[Kernel]:
    """The kernels of a block, with one more for each combined all-reduce, which writes the results of its members.

    The kernel of a member writes its partial sums. The new kernel costs nothing: each member has the cost of its own.
    """
    groups = [group for group in combined_sums(block, exchanges) if len(group) > 1]
    number = {id(operation): i for i, group in enumerate(groups) for operation in group}
    members: dict[int, list[Kernel]] = {}
    combined: list[Kernel] = []
    for kernel in kernels:
        if kernel.computes and (i := number.get(id(kernel.computes[0]))) is not None:
            members.setdefault(i, []).append(kernel)
    for group in members.values():
        last, reads, results = group[-1], dict[int, Read](), list[Buffer]()
        for kernel in group:
            (operation,) = kernel.computes[:1]
            size = max(x.operand_bytes for x in _sums(operation, exchanges))
            partial = Buffer(size, operation.outputs[0], kernel.phase)
            results += kernel.writes
            kernel.writes, reads[id(partial)] = [partial], Read(partial, 0)
        combined.append(Kernel(last.source, last.phase, reads, results))
    return [*kernels, *combined]


def _sums(operation: Operation, exchanges: Exchanges) -> list[Exchange]:
    return [x for x in exchanges.get(id(operation), ()) if x.array is None and x.kind in SUMS]


def combined_sums(block: Block, exchanges: Exchanges) -> Iterator[list[Operation]]:
    """The members of each combined all-reduce, those with one member included."""
    graph = _Graph(block, exchanges)
    keys = {at: _key(operation, exchanges) for at, operation in graph.operations.items()}
    while keys:
        key, members = None, list[int]()
        order, before = graph.post_order()
        for at in order:
            if at not in keys or (members and keys[at] != key):
                continue
            if any(before[at] >> member & 1 for member in members):
                break
            key = keys.pop(at)
            members.append(at)
            if len(members) == MOST:
                break
        if not members:
            return  # the others have no result that is used
        graph.merge(members)
        yield [graph.operations[at] for at in members]


def _key(operation: Operation, exchanges: Exchanges) -> Hashable:
    out = operation.outputs[0]
    axes = frozenset(axis for x in _sums(operation, exchanges) for axis in x.axes)
    function = operation.attributes.get("function", "add") if operation.kind == "reduce" else "add"
    return function, out.kind, max(out.bits, 32 if out.kind == "f" else 0), axes


class _Graph:
    """Which all-reduces a result needs, in the order in which XLA visits them: a node is one, or several results."""

    def __init__(self, block: Block, exchanges: Exchanges):
        self.operations: dict[int, Operation] = {}  # by the node
        self.children: list[list[int]] = []
        self.home: list[int] = []  # of a merged node, the one that it is part of
        below: dict[int, tuple[int, ...]] = {}  # by the id of an operation
        for operation in block.operations:
            inner = (x for body in operation.bodies for each in body.walk() for x in each.inputs)
            inputs = [*operation.inputs, *inner]
            children = dict.fromkeys(at for x in inputs for at in below.get(id(x.producer), ()))
            if is_sum := bool(_sums(operation, exchanges)):
                self.operations[len(self.children)] = operation
            below[id(operation)] = self._node(children) if is_sum or len(children) > SHARED else tuple(children)
        self._node(dict.fromkeys(at for x in block.results for at in below.get(id(x.producer), ())))

    def _node(self, children: Mapping[int, object]) -> tuple[int]:
        self.children.append(list(children))
        self.home.append(len(self.home))
        return (len(self.home) - 1,)

    def merge(self, members: Sequence[int]) -> None:
        first, *others = members
        for at in others:
            self.home[at] = first
            self.children[first] += self.children[at]

    def post_order(self) -> tuple[list[int], dict[int, int]]:
        """The nodes that the results need, and for each of them those that it needs, as the bits of a number."""
        before: dict[int, int] = {}
        order, waiting = list[int](), [(len(self.children) - 1, False)]
        while waiting:
            at, is_done = waiting.pop()
            if is_done:
                for child in self.children[at]:
                    before[at] |= before[self.home[child]] | 1 << self.home[child]
                order.append(at)
            elif at not in before:
                before[at] = 0
                waiting.append((at, True))
                waiting += [(self.home[child], False) for child in reversed(self.children[at])]
        return order, before
