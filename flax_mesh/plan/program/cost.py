"""FLOPs and bytes of the memory (HBM) of every kernel, and the time of each on a chip.

The time of a kernel is that of the roofline model (Williams et al. 2009): the greater of its FLOPs over the reachable
peak and its bytes over the bandwidth of the memory. Matrix products, convolutions and attention are counted; the
arithmetic of all other operations is cheaper than reading their operands. Attention with a head dim below 128 fills a
part of the matrix units: on an H200 cuDNN reaches 0.45 of the FLOP/s of other products with a head dim of 64
(docs/benchmarks.md).
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flax_mesh.hardware import Chip
from flax_mesh.jax_compat import ATTENTION
from flax_mesh.plan.program.fusion import Kernel
from flax_mesh.plan.program.read import TRANSFERS, Operation, Program
from flax_mesh.plan.program.rules import conv_labels, dot_dims, sharding_needs

DTYPES = {(16, "f"): "bfloat16", (32, "f"): "float32", (64, "f"): "float32", (8, "f"): "float8", (8, "i"): "int8"}
MATRIX_UNIT = 128  # rows and columns of the matrix units of TPUs
_STATED = re.compile(r'"?flops"?: ?(\d+)')


class Cost(NamedTuple):
    """FLOPs and bytes of one execution of a kernel on one device."""

    phase: str
    flops: float
    bytes: float
    dtype: str  # of the operands
    times: int
    host_bytes: float = 0.0  # that are copied from or to the memory of the host
    filled: float = 1.0  # part of the matrix units

    def seconds(self, chip: Chip) -> tuple[float, float]:
        """(compute, memory) of one execution."""
        compute = self.flops / (chip.peak(self.dtype) * chip.matmul_fraction * self.filled)
        return compute, self.bytes / chip.memory_bandwidth


def costs(kernels: Sequence[Kernel], program: Program, times: int = 1) -> Iterator[Cost]:
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
        filled = min([x.inputs[0].shape[-1] / MATRIX_UNIT for x in kernel.computes if _is_attention(x)], default=1.0)
        size = kernel.read_bytes + kernel.written_bytes
        yield Cost(kernel.phase, flops, size, dtype, times, copied, min(filled, 1.0))


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
        return 2.0 * operation.outputs[0].size * operation.inputs[0].shape[-1]
    if operation.kind == "custom_call":
        return _kernel_flops(operation)
    return 0.0


def _scattered(operation: Operation, program: Program) -> float:
    """Factor for sums over split dims: a device computes all of the result from its part of the sum."""
    partial = sharding_needs(operation).partial
    split = [axis for axis in partial if axis not in operation.outputs[0].axes]
    return 1 / program.group_size(split)


def _kernel_flops(operation: Operation) -> float:
    """Attention: two products forward, five backward, half of each if causal. Others: what the kernel states."""
    text = operation.attributes.get("backend_config", "")
    if not _is_attention(operation):
        return float(stated[1]) if (stated := _STATED.search(text.replace('\\\\"', '"'))) else 0.0
    query, key = operation.inputs[:2]
    direction, mask, window = text.strip('"').split()
    keys = _attended_keys(query.shape[1], key.shape[1], "CAUSAL" in mask, int(window))
    products = 2 if direction == "forward" else 5
    return products * 2.0 * query.size * keys


def _is_attention(operation: Operation) -> bool:
    return operation.kind == "custom_call" and ATTENTION in operation.attributes.get("call_target_name", "")


def _attended_keys(queries: int, keys: int, causal: bool, window: int) -> float:
    """Mean number of keys that a query attends to."""
    if window and window < keys:
        return window - window * window / (2 * queries)
    return keys / 2 if causal and queries == keys else float(keys)
