"""Evaluates and inlines programs whose values may be Chunks: the layers of a stack in several arrays."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from flax_mesh.jax_compat import JIT, REMAT, evaluate, in_source_of, scan_sizes
from flax_mesh.mpmd.chunks import Chunks, Periods, evaluate_on_chunks, rows_like, select, whole
from flax_mesh.program.program import Eqn, Program, body, evaluate_with, program_of, shape_of, trace


def interpret(program: Program, args: Sequence[Any], opens: Callable[[Eqn], bool] = lambda eqn: False) -> list[Any]:
    """Evaluate `program` with every jit inlined, and also each remat and cond for which `opens` returns True.

    Arguments and outputs may be Chunks: a scan over Chunks becomes one scan per chunk, and an elementwise equation one
    equation per chunk. An opened cond evaluates all branches and selects the result. An output may also be Periods.
    """

    def outputs_of(eqn: Eqn, values: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if name in JIT or (name in REMAT and opens(eqn)):
            return interpret(body(eqn), values, opens)
        if name == "cond" and opens(eqn):
            sides = [interpret(program_of(branch), values[1:], opens) for branch in eqn.params["branches"]]
            return [select(values[0], each) for each in zip(*sides, strict=True)]
        if any(isinstance(value, Chunks | Periods) for value in values):
            with in_source_of(eqn):  # errors name the line that combines several layers
                return _scan_chunks(eqn, values) if name == "scan" else evaluate_on_chunks(eqn, values)
        return evaluate(eqn, values)

    return evaluate_with(program, args, outputs_of)


def inline(program: Program, opens: Callable[[Eqn], bool] = lambda eqn: False) -> Program:
    """The same program without nested jits, and without the remats and conds for which `opens` returns True."""
    if not any(eqn.primitive.name in JIT or opens(eqn) for eqn in program.eqns):
        return program
    shapes = [shape_of(v.aval) for v in program.inputs]
    return trace(lambda *args: interpret(program, args, opens), *shapes)[0]


def _scan_chunks(eqn: Eqn, values: Sequence[Any]) -> list[Any]:
    """One scan per chunk, each starting from the carry of the previous one. Other scanned inputs are sliced.

    Rows of Periods that are in several chunks are no scan: the body is evaluated on their layers. A scan that is
    unrolled completely, and scans nothing, is unrolled here: its carry may be Chunks.
    """
    params = dict(eqn.params)
    inner = program_of(params["jaxpr"])
    num_consts, num_carry = scan_sizes(eqn)
    if params["unroll"] >= params["length"] and len(values) == num_consts + num_carry == num_consts + len(eqn.outvars):
        carry = list(values[num_consts:])
        for _ in range(params["length"]):
            carry = interpret(inner, [*values[:num_consts], *carry])
        return carry
    consts = [whole(value) for value in values[:num_consts]]
    carry = [whole(value) for value in values[num_consts : num_consts + num_carry]]
    xs = values[num_consts + num_carry :]
    like = next((x for kind in (Periods, Chunks) for x in xs if isinstance(x, kind)), None)
    if like is None:
        return evaluate(eqn, [*consts, *carry, *xs])
    all_rows = [rows_like(x, like) for x in xs]
    order = range(len(like.starts))
    ys: list[Any] = [None] * len(order)
    for k in reversed(order) if params["reverse"] else order:
        rows = [rows[k] for rows in all_rows]
        if any(isinstance(x, Chunks) for x in rows):
            layers = [x if isinstance(x, Chunks) else x[0] for x in rows]
            outs = [whole(out) for out in interpret(inner, [*consts, *carry, *layers])]
            outs[num_carry:] = [jnp.expand_dims(y, 0) for y in outs[num_carry:]]
        else:
            outs = eqn.primitive.bind(*consts, *carry, *rows, **{**params, "length": like.sizes[k]})
        carry, ys[k] = outs[:num_carry], outs[num_carry:]
    return [*carry, *(Chunks(parts, like.starts) for parts in zip(*ys, strict=True))]
