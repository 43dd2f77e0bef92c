"""The kernels that XLA makes of a program, and what it knows of single operations: their costs, and views."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from flax_mesh.plan.program.program import COLLECTIVES, TRANSFERS, Array, Operation
from flax_mesh.plan.program.rules import conv_labels, dot_dims

EXPENSIVE = frozenset(
    {"exponential", "exponential_minus_one", "log", "log_plus_one", "logistic", "tanh", "erf", "power", "rsqrt", "sqrt"}
    | {"cbrt", "sine", "cosine", "tan", "atan2", "remainder", "erf_inv"}
)
CHEAP_ON_ACCELERATORS = frozenset({"tanh", "logistic", "erf"})
PRODUCTS = frozenset({"dot_general", "convolution"})
ROOTS = PRODUCTS | frozenset(
    {"reduce", "reduce_window", "select_and_scatter", "gather", "scatter", "sort", "while", "case", "if", "custom_call"}
    | {"rng_bit_generator", *TRANSFERS, "cholesky", "triangular_solve", "fft", "top_k", "ragged_dot", *COLLECTIVES}
)
LARGE = 2**16  # bytes of a constant that is worth to be stored
CONSTANTS = frozenset({"constant", "iota"})
UPDATES = frozenset({"scatter", "while"})  # they change an operand in place
VIEWS = frozenset({"reshape", "shard", "bitcast_convert", "reshard"})
PARTS = frozenset({"dynamic_slice", "slice", "gather"})  # they read a part of their operand
MOVES = frozenset({"transpose", "reshape", "slice", "concatenate", "pad", "dynamic_update_slice", "reverse"})


@dataclass(eq=False, slots=True, repr=False)
class Buffer:
    """The memory of one value. A `fixed` buffer exists before and after the block, so the block does not count it."""

    bytes: int
    array: Array
    phase: str  # that writes it
    fixed: bool = False
    gathered: bool = False  # the result of a collective


class Read(NamedTuple):
    """A buffer that a kernel reads, and how many of its bytes."""

    buffer: Buffer
    bytes: int


@dataclass(eq=False, slots=True, repr=False)
class Kernel:
    """One instruction of the compiled program. The result of an elementwise one may take the memory of an operand."""

    source: str
    phase: str
    reads: dict[int, Read]  # by the id of the buffer
    writes: list[Buffer]
    computes: tuple[Operation, ...] = ()  # the product, the loop or another root
    elementwise: bool = False
    updates: Buffer | None = None  # that is changed in place
    written_bytes: int = 0
    body: "list[Kernel] | None" = None
    results: list[Buffer] = field(default_factory=list)  # of the body

    @property
    def read_bytes(self) -> int:
        return sum(read.bytes for read in self.reads.values())


def base_of(array: Array, buffers: Mapping[object, Buffer]) -> Buffer | None:
    """The buffer of a value, or of the value of which it is a view."""
    while id(array) not in buffers and array.producer is not None and array.producer.kind in VIEWS:
        (array,) = array.producer.inputs
    return buffers.get(id(array))


def is_broadcast(array: Array) -> bool:
    return array.producer is not None and array.producer.kind in CONSTANTS | {"broadcast_in_dim"}


def is_filled(array: Array) -> bool:
    """Whether it is a broadcast constant."""
    producer = array.producer
    if producer is None or producer.kind != "broadcast_in_dim":
        return False
    number = producer.inputs[0].producer
    return number is not None and number.kind == "constant"


def widens(operation: Operation) -> bool:
    return operation.kind == "convert" and operation.inputs[0].bits < operation.outputs[0].bits


def is_expensive(operation: Operation, on_cpu: bool) -> bool:
    """Whether a result is stored rather than computed twice. XLA multiplies by the reciprocal of a broadcast value.

    Accelerators compute some functions again that CPUs store, and CPUs also store products of two arrays.
    """
    if operation.kind == "multiply":
        return on_cpu and not any(map(is_broadcast, operation.inputs))
    if operation.kind == "divide":
        producer = operation.inputs[1].producer
        return on_cpu and (producer is None or producer.kind != "broadcast_in_dim")
    return operation.kind in EXPENSIVE and (on_cpu or operation.kind not in CHEAP_ON_ACCELERATORS)


def matrix_order(product: Operation, array: Array) -> tuple[int, ...] | None:
    """The order of dims in which CPUs read an operand of a product: batch, rows, columns. None: the order it has."""
    left = product.inputs[0] is array
    if product.kind == "convolution":
        labels = conv_labels(product)[0 if left else 1]
        usual = (labels[0] == "b" and labels[-1] == "f") if left else labels[-1] == "o"
        return None if usual else tuple(range(len(labels)))
    batch_l, batch_r, contract_l, contract_r = dot_dims(product)
    batch, contract = (batch_l, contract_l) if left else (batch_r, contract_r)
    free = tuple(d for d in range(len(array.shape)) if d not in batch + contract)
    order = (*batch, *free, *contract) if left else (*batch, *contract, *free)
    moved = [d for d in order if array.local[d] > 1]
    return None if moved == sorted(moved) else order


def carried_inputs(loop: Operation) -> list[Array]:
    """The initial values of the arguments that a loop changes."""
    body = loop.bodies[0]
    computed = {id(x) for operation in body.operations for x in operation.outputs} | set(map(id, body.arguments))
    triples = zip(loop.inputs, body.arguments, body.results, strict=True)
    return [init for init, argument, result in triples if result is not argument and id(result) in computed]
