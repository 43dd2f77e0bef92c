"""FLOPs and bytes of the memory (HBM) of every kernel, and the time of each on a chip.

The time of a kernel follows the roofline model (Williams et al. 2009): the greater of its FLOPs over the reachable
peak and its bytes over the bandwidth of the memory. Matrix products, convolutions and attention are counted; the
arithmetic of all other operations is cheaper than reading their operands. Attention fills a part of the matrix units if
its head dim is not a multiple of their side: on an H200 cuDNN reaches 0.45 of the FLOP/s of other products with a
head dim of 64 (docs/benchmarks.md).
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flax_mesh.hardware import LANES, Chip
from flax_mesh.jax_compat import ATTENTION, KERNEL
from flax_mesh.plan.program.kernels import Kernel
from flax_mesh.plan.program.program import TRANSFERS, Operation, Program
from flax_mesh.plan.program.rules import conv_labels, dims_of, dot_dims, sharding_needs

DTYPES = {(16, "f"): "bfloat16", (32, "f"): "float32", (64, "f"): "float32", (8, "f"): "float8", (8, "i"): "int8"}
WEIGHTS = {128: 3 * 2**20 - 1, 256: 8 * 2**20}  # side of the matrix units: bytes of the weights that a tile has
_STATED = re.compile(r'"?flops"?: ?(\d+)')


class Grouped(NamedTuple):
    """The products of the rows (A, K) of E groups with the weights (E, K, N) of their groups, in bytes and dims.

    XLA for TPUs computes them in tiles of as many rows as the matrix units have, and of as many columns as fit. Rows of
    two groups are never in one tile, so that each group but one has a tile more than its rows fill. The rows are read
    once for every tile of columns; the weights once. `weights`: the result is the gradient (E, K, N) of the weights, of
    which a tile has as many columns as the matrix units. These are in the compiled programs for v4 to v7x.
    """

    rows: int
    inner: int
    columns: int
    groups: int
    bits: int
    weights: bool
    copied: int  # bytes of operands and results that XLA writes and reads once more, in another layout

    def padded(self, unit: int) -> float:
        """The FLOPs of the tiles over the FLOPs of the products."""
        whole = [math.ceil(size / unit) * unit / size for size in (self.inner, self.columns)]
        return math.prod(whole) * (1 + unit * (self.groups - 1) / self.rows)

    def bytes(self, unit: int) -> float:
        a, k, n = self.rows, self.inner, self.columns
        tile = unit if self.weights else max(1, WEIGHTS[unit] * 8 // (self.bits * k * unit)) * unit
        elements = a * k * math.ceil(n / tile) + a * n + self.groups * k * n
        return elements * self.bits / 8 + 2 * self.copied


class Cost(NamedTuple):
    """FLOPs and bytes of one execution of a kernel on one device."""

    phase: str
    flops: float
    bytes: float
    dtype: str  # of the operands
    times: float
    host_bytes: float = 0.0  # that are copied from or to the memory of the host
    head_dim: int = 0  # of attention
    grouped: Grouped | None = None
    indexed: bool = False

    def seconds(self, chip: Chip) -> tuple[float, float]:
        """(compute, memory) of one execution."""
        unit, size, filled = chip.matrix_unit, self.bytes, 1.0
        if self.head_dim:
            filled = self.head_dim / (unit * math.ceil(self.head_dim / unit))
        if self.grouped is not None and chip.platform == "tpu":
            filled, size = 1 / self.grouped.padded(unit), self.grouped.bytes(unit)
        if self.indexed:
            size /= chip.indexed_fraction
        compute = self.flops / (chip.peak(self.dtype) * chip.matmul_fraction * filled)
        return compute, size / chip.memory_bandwidth


def costs(kernels: Sequence[Kernel], program: Program, times: float = 1) -> Iterator[Cost]:
    """The costs of all kernels, those in loops included."""
    for kernel in kernels:
        if kernel.body is not None:
            yield from costs(kernel.body, program, times * kernel.computes[0].times)
            continue
        flops, dtype = 0.0, "bfloat16"
        for operation in kernel.computes:
            flops += _flops_of(operation, program)
            if operation.inputs:
                dtype = DTYPES.get((operation.inputs[0].bits, operation.inputs[0].kind), "bfloat16")
        copied = sum(x.outputs[0].stored_bytes for x in kernel.computes if x.kind in TRANSFERS)
        head_dim = next((x.inputs[0].shape[-1] for x in kernel.computes if _is_attention(x)), 0)
        grouped = next((_grouped(x) for x in kernel.computes if x.kind == "ragged_dot"), None)
        indexed = any(x.kind in ("gather", "scatter") for x in kernel.computes)
        size = kernel.read_bytes + kernel.written_bytes
        yield Cost(kernel.phase, flops, size, dtype, times, copied, head_dim, grouped, indexed)


def _flops_of(operation: Operation, program: Program) -> float:
    """FLOPs of one execution on one device. A product and a sum count as two."""
    if operation.kind == "dot_general":
        lhs, out = operation.inputs[0], operation.outputs[0]
        contracted = math.prod(lhs.shape[d] for d in dot_dims(operation)[2])
        return 2.0 * out.size * contracted * _scattered(operation, program)
    if operation.kind == "convolution":
        _, right, _ = conv_labels(operation)
        kernel, out = operation.inputs[1], operation.outputs[0]
        per_output = math.prod(size for size, label in zip(kernel.shape, right, strict=True) if label != "o")
        return 2.0 * out.size * per_output * _scattered(operation, program)
    if operation.kind == "ragged_dot":
        return 2.0 * math.prod(_grouped(operation)[:3])
    if operation.kind == "custom_call":
        return _kernel_flops(operation)
    return 0.0


def _scattered(operation: Operation, program: Program) -> float:
    """Factor for sums over split dims: a device computes all of the result from its part of the sum."""
    partial = sharding_needs(operation).partial
    split = [axis for axis in partial if axis not in operation.outputs[0].axes]
    return 1 / program.group_size(split)


def _kernel_flops(operation: Operation) -> float:
    """Attention: two products forward, five backward, half of each if causal. Others: FLOPs that the kernel states."""
    text = operation.attributes.get("backend_config", "")
    if ATTENTION not in operation.attributes.get("call_target_name", ""):
        return float(stated[1]) if (stated := _STATED.search(text.replace('\\\\"', '"'))) else 0.0
    query, key = operation.inputs[:2]
    direction, mask, window = text.strip('"').split()
    keys = _attended_keys(query.shape[1], key.shape[1], "CAUSAL" in mask, int(window))
    products = 2 if direction == "forward" else 5
    return products * 2.0 * query.size * keys


def _is_attention(operation: Operation) -> bool:
    target = operation.attributes.get("call_target_name", "")
    return operation.kind == "custom_call" and (ATTENTION in target or KERNEL in target)


def _grouped(operation: Operation) -> Grouped:
    text = operation.attributes["ragged_dot_dimension_numbers"]
    (lhs, rhs, sizes), out = operation.inputs, operation.outputs[0]
    groups, weights = sizes.local[-1], not dims_of(text, "rhs_group_dimensions")
    rows, inner = lhs.local[-2:]
    # The weights are read along the dim that is not contracted, and values whose rows end within a tile are copied.
    turned = not weights and dims_of(text, "rhs_contracting_dimensions")[0] == len(rhs.local) - 1
    copied = [x.bytes for x in (lhs, rhs, out) if x.local[-1] % LANES or (turned and x is rhs)]
    return Grouped(rows, inner, out.local[-1], groups, lhs.bits, weights, sum(copied))


def _attended_keys(queries: int, keys: int, causal: bool, window: int) -> float:
    """Mean number of keys that a query attends to."""
    if window and window < keys:
        return window - window * window / (2 * queries)
    return keys / 2 if causal and queries == keys else float(keys)
