"""What a traced step computes and reads, counted in its jaxpr, beside what the kernels of its estimate have.

The count knows the shapes of the jaxpr and nothing of `flax_mesh.plan`. It is of all devices: the kernels of one device
have their share of it where every product is split over all axes of the mesh.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters import partial_eval

from flax_mesh.plan.forecast import Estimate
from flax_mesh.plan.program.kernels import Kernel

SENDS = {"all_gather": "all-gather", "psum": "all-reduce", "psum_invariant": "all-reduce"}
SENDS |= {"reduce_scatter": "reduce-scatter", "ppermute": "collective-permute", "all_to_all": "all-to-all"}


class Counted(NamedTuple):
    flops: dict[str, float]  # of matrix products and convolutions, by the dtype of their operands
    arguments: frozenset[int]  # that are read
    operands: float  # bytes that products and what is added to them read
    collectives: dict[str, float]  # operand bytes of those that are written in a shard_map


def in_jaxpr(step: Any, arguments: Sequence[Any]) -> Counted:
    closed = step.trace(*arguments).jaxpr
    jaxpr, used = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    flops, collectives, operands = defaultdict[str, float](float), defaultdict[str, float](float), 0.0
    for eqn, times in _walk(jaxpr, 1):
        name = eqn.primitive.name
        if name in ("dot_general", "conv_general_dilated"):
            flops[str(eqn.invars[0].aval.dtype)] += times * _product(eqn)
            operands += times * sum(x.aval.size * x.aval.dtype.itemsize for x in dict.fromkeys(eqn.invars))
        elif name == "ragged_dot_general":
            rows, out = eqn.invars[0].aval, eqn.outvars[0].aval
            flops[str(rows.dtype)] += times * 2 * rows.size * out.shape[-1]
        elif name == "add_any" or (name == "add" and eqn.outvars[0].aval.ndim):
            operands += times * eqn.outvars[0].aval.size * eqn.outvars[0].aval.dtype.itemsize
        elif name in SENDS:
            collectives[SENDS[name]] += times * sum(x.aval.size * x.aval.dtype.itemsize for x in eqn.invars)
    read = frozenset(index for index, is_used in enumerate(used) if is_used)
    return Counted(dict(flops), read, operands, dict(collectives))


def _walk(jaxpr: Any, times: int) -> Iterator[tuple[Any, int]]:
    """Every equation, also those inside of others, and how often it runs. Each device runs a shard_map."""
    for eqn in jaxpr.eqns:
        yield eqn, times
        trips = _trips(eqn)
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if isinstance(inner, ClosedJaxpr | Jaxpr):
                    yield from _walk(getattr(inner, "jaxpr", inner), times * trips)


def _trips(eqn: Any) -> int:
    """The runs of a scan, of a loop while `i < n`, and the devices of a shard_map."""
    if eqn.primitive.name == "while":
        (condition,) = eqn.params["cond_jaxpr"].jaxpr.eqns
        return int(condition.invars[1].val)
    return {"scan": eqn.params.get("length"), "shard_map": getattr(eqn.params.get("mesh"), "size", 1)}.get(
        eqn.primitive.name, 1
    )


def _product(eqn: Any) -> int:
    size = math.prod(eqn.outvars[0].aval.shape)
    left, right = (x.aval.shape for x in eqn.invars[:2])
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * size * math.prod(left[d] for d in contracted)
    features, *_ = eqn.params["dimension_numbers"].rhs_spec
    return 2 * size * math.prod(right) // right[features]


def in_kernels(one: Estimate) -> Counted:
    """The same of the kernels of one device."""
    flops, collectives, operands, read = defaultdict[str, float](float), defaultdict[str, float](float), 0.0, set[int]()
    index_of = {id(x): index for index, x in enumerate(one.program.block.arguments)}
    for cost in one.costs:
        flops[cost.dtype] += cost.flops * cost.times
    for kernel, times in _kernels(one.kernels, 1):
        kinds = {operation.kind for operation in kernel.computes}
        read |= {index_of[id(x.buffer.array)] for x in kernel.reads.values() if id(x.buffer.array) in index_of}
        if kinds & {"dot_general", "convolution"}:
            operands += times * kernel.read_bytes
        for kind in kinds:
            if (name := kind.replace("_", "-")) in SENDS.values():
                collectives[name] += times * kernel.read_bytes
    return Counted({k: v for k, v in flops.items() if v}, frozenset(read), operands, dict(collectives))


def _kernels(kernels: Sequence[Kernel], times: float) -> Iterator[tuple[Kernel, float]]:
    for kernel in kernels:
        yield kernel, times
        if kernel.body is not None:
            yield from _kernels(kernel.body, times * kernel.computes[0].times)
