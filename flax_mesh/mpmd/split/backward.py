"""A stage differentiated, and cut into its forward (F), its backward to the inputs (B) and to the weights (W).

The three are slices of one program that runs the stage and its vector-Jacobian product: F is what the outputs need; of
the rest B is what the gradients of the inputs need, and W what remains (Qi et al. 2023, "Zero Bubble Pipeline
Parallelism"). What a later slice needs of an earlier one is handed over: residuals by F, a carry from B to W.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flax_mesh.mpmd.split.assign import Piece
from flax_mesh.mpmd.split.jaxpr import REMAT, Program, Var, inline, needed, trace, variables
from flax_mesh.mpmd.split.remat import fewest_bytes, find_repeatable
from flax_mesh.mpmd.split.split_scan import unzip_scans


class Slice(NamedTuple):
    """A part of the program of a stage. Its inputs are those at `inputs` and `received` of the piece, at `cotangents`
    of `floats_out`, at `residuals` of what F hands over, and all of the carry."""

    program: Program
    inputs: tuple[int, ...]
    received: tuple[int, ...]
    cotangents: tuple[int, ...] = ()
    residuals: tuple[int, ...] = ()
    carry: tuple[int, ...] = ()


class StageProgram(NamedTuple):
    """F, B and W of one stage."""

    piece: Piece
    trained: tuple[int, ...]  # inputs of the program that are differentiated
    floats_in: tuple[int, ...]  # indices into piece.received of what is differentiated
    floats_out: tuple[int, ...]  # indices into piece.sent of what has a cotangent
    forward: Slice  # -> sent, outputs, residuals
    backward: Slice | None  # -> gradients of floats_in, those of trained unless there is a W, carry; None: F alone
    weights: Slice | None  # -> gradients of trained


def differentiate(
    program: Program, piece: Piece, trained: Sequence[int], *, remat: str = "none", split: bool = False
) -> StageProgram:
    """F, B and W of a piece of `program`, whose inputs at `trained` are differentiated.

    Output 0 of `program` is the loss: where the piece makes it, its cotangent is 1. `remat` is one of
    REMAT_MODES; with "full" B starts from the inputs of the stage, and F hands nothing over. `split`: the gradients
    of the weights come from W, else from B.
    """
    trained = tuple(at for at in piece.inputs if at in set(trained))
    floats_in = tuple(i for i, v in enumerate(piece.received) if _is_float(v))
    floats_out = tuple(i for i, v in enumerate(piece.sent) if _is_float(v))
    whole = _joint(program, piece, trained, floats_in, floats_out)
    num_made = len(piece.sent) + len(piece.outputs)
    if split:
        # A remat, too, would give both kinds of gradients at once; what it computes again stays in B all the same.
        whole = inline(whole, lambda eqn: eqn.primitive.name in REMAT)
        whole = unzip_scans(whole, whole.outputs[: num_made + len(floats_in)])
    made, grads = whole.outputs[:num_made], whole.outputs[num_made:]
    wanted = [made, grads[: len(floats_in)], grads[len(floats_in) :]] if split else [made, grads]
    parts, handed = _slices(whole, wanted, remat, num_given=len(piece.inputs))
    from_forward = variables(v for later in handed[1:] for v in later[0])
    carry = variables(handed[2][1]) if split else []
    bounds = (0, len(piece.inputs), len(piece.inputs) + len(piece.received), len(whole.inputs))
    groups = [*(whole.inputs[a:b] for a, b in pairwise(bounds)), from_forward, carry]
    backward = _slice(whole, parts[1], [*wanted[1], *carry], groups)
    return StageProgram(
        piece=piece,
        trained=trained,
        floats_in=floats_in,
        floats_out=floats_out,
        forward=_slice(whole, parts[0], [*made, *from_forward], groups),
        backward=backward,
        weights=_slice(whole, parts[2], wanted[2], groups) if split else None,
    )


def forward_only(program: Program, piece: Piece) -> StageProgram:
    """F alone, without residuals."""
    return StageProgram(piece, (), (), (), _stage(program, piece), None, None)


def _stage(program: Program, piece: Piece) -> Slice:
    inputs = (*(program.inputs[at] for at in piece.inputs), *piece.received)
    outputs = (*piece.sent, *(program.outputs[at] for at in piece.outputs))
    stage = Program(piece.eqns, inputs, outputs, program.consts)
    return Slice(stage, tuple(range(len(piece.inputs))), tuple(range(len(piece.received))))


def _joint(program: Program, piece: Piece, trained, floats_in, floats_out) -> Program:
    """(inputs, received, cotangents) -> sent, outputs, gradients of floats_in, gradients of trained."""
    stage = _stage(program, piece).program
    num_inputs, num_sent = len(piece.inputs), len(piece.sent)
    at_input = [piece.inputs.index(at) for at in trained]
    at_received = [num_inputs + i for i in floats_in]
    makes_loss = 0 in piece.outputs
    seeded = [*floats_out, *([num_sent + piece.outputs.index(0)] if makes_loss else [])]

    def run(values: list[Any], cotangents: list[Any]) -> list[Any]:
        def of(moving: list[Any]) -> tuple[list[Any], list[Any]]:
            args = list(values)
            for at, value in zip([*at_received, *at_input], moving, strict=True):
                args[at] = value
            outs = stage.call(*args)
            return [outs[i] for i in seeded], outs

        moving = [values[at] for at in [*at_received, *at_input]]
        seeds, pull, outs = jax.vjp(of, moving, has_aux=True)
        given = [*cotangents, *([jnp.ones_like(seeds[-1])] if makes_loss else [])]
        return [*outs, *pull(given)[0]]

    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in stage.inputs]
    cotangents = [jax.ShapeDtypeStruct(piece.sent[i].aval.shape, piece.sent[i].aval.dtype) for i in floats_out]
    return inline(trace(run, shapes, cotangents)[0])


def _slices(
    whole: Program, wanted: Sequence[Sequence[Any]], remat: str, num_given: int
) -> tuple[list[list[int]], list[list[list[Var]]]]:
    """Equations of each slice, and handed[slice][earlier slice], the values that it takes from that one."""
    maker: dict[Var, int] = {}
    held: set[Var] = set()  # handed to a slice before
    repeatable = find_repeatable(whole, num_given, cheap=remat != "none")
    parts, handed = [], []
    for number, outputs in enumerate(wanted):
        free = [i for i, eqn in enumerate(whole.eqns) if not any(v in maker for v in eqn.outvars)]
        kept, live = needed([whole.eqns[i] for i in free], outputs, effects=number == 0)
        taken, again = fewest_bytes(whole, [v for v in live if v in maker], repeatable, maker, held)
        eqns = sorted({*(free[i] for i in kept), *again})
        made = {v for i in eqns for v in whole.eqns[i].outvars}
        parts.append(eqns)
        handed.append([[v for v in taken if maker[v] == k] for k in range(number)])
        held |= set(taken)
        if not (remat == "full" and number == 0):
            maker |= {v: number for v in made if v not in maker}
    return parts, handed


def _slice(whole: Program, eqns: Sequence[int], outputs: Sequence[Any], groups: Sequence[Sequence[Var]]) -> Slice:
    made = {v for i in eqns for v in whole.eqns[i].outvars}
    used = {v for i in eqns for v in variables(whole.eqns[i].invars)} | set(variables(outputs))
    picks = [tuple(i for i, v in enumerate(group) if v in used and v not in made) for group in groups]
    inputs = tuple(group[i] for group, pick in zip(groups, picks, strict=True) for i in pick)
    program = Program(tuple(whole.eqns[i] for i in eqns), inputs, tuple(outputs), whole.consts)
    return Slice(program, *picks)


def _is_float(v: Var) -> bool:
    return jnp.issubdtype(v.aval.dtype, jnp.floating)
