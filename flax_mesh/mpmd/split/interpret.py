"""Evaluates programs whose values may be Chunks: the layers of a stack in several arrays."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from flax_mesh.jax_compat import evaluate
from flax_mesh.mpmd.chunks import Chunks, Periods, evaluate_on_chunks, rows_like, select, whole
from flax_mesh.program.program import COND, JIT, REMAT, SCAN, Eqn, Program, bodies_of, body, scan_parts
from flax_mesh.program.rewrite import rewrite


def interpret(program: Program, args: Sequence[Any], opens: Callable[[Eqn], bool] = lambda eqn: False) -> list[Any]:
    """Evaluate `program` with every jit inlined, and also each remat and cond for which `opens` returns True.

    Arguments and outputs may be Chunks: a scan over Chunks becomes one scan per chunk, and an elementwise equation one
    equation per chunk. An opened cond evaluates all branches and selects the result. An output may also be Periods.
    """

    def run(program: Program, values: Sequence[Any]) -> list[Any]:
        return rewrite(program, values, rule, touches=touches)

    def touches(eqn: Eqn, values: Sequence[Any]) -> bool:
        is_opened = eqn.primitive.name in JIT or (eqn.primitive.name in (*REMAT, COND) and opens(eqn))
        return is_opened or any(isinstance(value, Chunks | Periods) for value in values)

    def rule(eqn: Eqn, values: list[Any]) -> Sequence[Any]:
        name = eqn.primitive.name
        if name in JIT or (name in REMAT and opens(eqn)):
            return run(body(eqn), values)
        if name == COND and opens(eqn):
            sides = [run(branch.program, values[1:]) for branch in bodies_of(eqn).all]
            return [select(values[0], each) for each in zip(*sides, strict=True)]
        return _scan_chunks(eqn, values) if name == SCAN else evaluate_on_chunks(eqn, values)

    return run(program, args)


def _scan_chunks(eqn: Eqn, values: Sequence[Any]) -> list[Any]:
    """One scan per chunk, each starting from the carry of the previous one. Other scanned inputs are sliced.

    Rows of Periods that are in several chunks are no scan: the body is evaluated on their layers. A scan that is
    unrolled completely, and scans nothing, is unrolled here: its carry may be Chunks.
    """
    parts = scan_parts(eqn)
    consts, carry, xs = parts.inputs(values)
    if parts.unroll >= parts.length and len(values) == len(consts) + len(carry) == len(consts) + len(eqn.outvars):
        for _ in range(parts.length):
            carry = interpret(parts.body, [*consts, *carry])
        return carry
    consts, carry = [*map(whole, consts)], [*map(whole, carry)]
    like = next((x for kind in (Periods, Chunks) for x in xs if isinstance(x, kind)), None)
    if like is None:
        return evaluate(eqn, [*consts, *carry, *xs])
    all_rows = [rows_like(x, like) for x in xs]
    order = range(len(like.starts))
    ys: list[Any] = [None] * len(order)
    for k in reversed(order) if parts.reverse else order:
        rows = [rows[k] for rows in all_rows]
        if any(isinstance(x, Chunks) for x in rows):
            layers = [x if isinstance(x, Chunks) else x[0] for x in rows]
            outs = [whole(out) for out in interpret(parts.body, [*consts, *carry, *layers])]
            carry, stacked = parts.outputs(outs)
            ys[k] = [jnp.expand_dims(y, 0) for y in stacked]
        else:
            outs = eqn.primitive.bind(*consts, *carry, *rows, **{**eqn.params, "length": like.sizes[k]})
            carry, ys[k] = parts.outputs(outs)
    return [*carry, *(Chunks(parts, like.starts) for parts in zip(*ys, strict=True))]
