"""A stage differentiated, and cut into its forward (F), its backward to the inputs (B) and to the weights (W).

The three are slices of one program that runs the stage and its vector-Jacobian product: F is what the outputs need; of
the rest B is what the gradients of the inputs need, and W what remains (Qi et al. 2023, "Zero Bubble Pipeline
Parallelism"). Residuals are what B and W take of F, the carry is what W takes of B.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from flax_mesh.mpmd.split.assign import StageProgram
from flax_mesh.mpmd.split.jaxpr import REMAT, Program, Var, inline, needed, trace, variables
from flax_mesh.mpmd.split.remat import fewest_bytes, find_repeatable
from flax_mesh.mpmd.split.split_scan import unzip_scans


def differentiate(
    stage: StageProgram, trained: Sequence[int], *, remat: str = "none", split: bool = False
) -> StageProgram:
    """The stage with F, B and W, where the inputs of the loss function's program at `trained` are differentiated.

    Output 0 of that program is the loss: where the stage makes it, its cotangent is 1. `remat` is one of REMAT_MODES;
    with "full" B starts from the inputs of the stage, and F makes no residuals. `split`: the gradients of the weights
    come from W, else from B.
    """
    trained = tuple(at for at in stage.inputs if at in set(trained))
    floats_in = tuple(i for i, v in enumerate(stage.received) if _is_float(v))
    floats_out = tuple(i for i, v in enumerate(stage.sent) if _is_float(v))
    whole = _joint(stage, trained, floats_in, floats_out)
    num_made = len(stage.forward.outputs)
    if split:
        # A remat, too, would give both kinds of gradients at once; what it computes again stays in B all the same.
        whole = inline(whole, lambda eqn: eqn.primitive.name in REMAT)
        whole = unzip_scans(whole, whole.outputs[: num_made + len(floats_in)])
    made, grads = whole.outputs[:num_made], whole.outputs[num_made:]
    wanted = [made, grads[: len(floats_in)], grads[len(floats_in) :]] if split else [made, grads]
    slices, handed = _slices(whole, wanted, remat, num_given=len(stage.inputs))
    residuals = variables(v for later in handed[1:] for v in later[0])
    carry = variables(handed[2][1]) if split else []
    bounds = (0, len(stage.inputs), len(stage.forward.inputs), len(whole.inputs))
    arguments = (*(whole.inputs[a:b] for a, b in pairwise(bounds)), tuple(residuals), tuple(carry))
    return stage._replace(
        arguments=arguments,
        forward=_slice(whole, slices[0], [*made, *residuals], arguments),
        backward=_slice(whole, slices[1], [*wanted[1], *carry], arguments),
        weights=_slice(whole, slices[2], wanted[2], arguments) if split else None,
        trained=trained,
        floats_in=floats_in,
        floats_out=floats_out,
    )


def _joint(stage: StageProgram, trained, floats_in, floats_out) -> Program:
    """(inputs, received, cotangents) -> sent, outputs, gradients of floats_in, gradients of trained."""
    num_inputs, num_sent = len(stage.inputs), len(stage.sent)
    at_input = [stage.inputs.index(at) for at in trained]
    at_received = [num_inputs + i for i in floats_in]
    makes_loss = 0 in stage.outputs
    seeded = [*floats_out, *([num_sent + stage.outputs.index(0)] if makes_loss else [])]

    def run(values: list[Any], cotangents: list[Any]) -> list[Any]:
        def of(moving: list[Any]) -> tuple[list[Any], list[Any]]:
            args = list(values)
            for at, value in zip([*at_received, *at_input], moving, strict=True):
                args[at] = value
            outs = stage.forward.call(*args)
            return [outs[i] for i in seeded], outs

        moving = [values[at] for at in [*at_received, *at_input]]
        seeds, pull, outs = jax.vjp(of, moving, has_aux=True)
        given = [*cotangents, *([jnp.ones_like(seeds[-1])] if makes_loss else [])]
        return [*outs, *pull(given)[0]]

    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in stage.forward.inputs]
    cotangents = [jax.ShapeDtypeStruct(stage.sent[i].aval.shape, stage.sent[i].aval.dtype) for i in floats_out]
    return inline(trace(run, shapes, cotangents)[0])


def _slices(
    whole: Program, wanted: Sequence[Sequence[Any]], remat: str, num_given: int
) -> tuple[list[list[int]], list[list[list[Var]]]]:
    """Equations of each slice, and handed[slice][earlier slice], the values that it takes from that one."""
    maker: dict[Var, int] = {}
    held: set[Var] = set()  # handed to a slice before
    repeatable = find_repeatable(whole, num_given, cheap=remat != "none")
    found, handed = [], []
    for number, outputs in enumerate(wanted):
        free = [i for i, eqn in enumerate(whole.eqns) if not any(v in maker for v in eqn.outvars)]
        kept, live = needed([whole.eqns[i] for i in free], outputs, effects=number == 0)
        taken, again = fewest_bytes(whole, [v for v in live if v in maker], repeatable, maker, held)
        eqns = sorted({*(free[i] for i in kept), *again})
        made = {v for i in eqns for v in whole.eqns[i].outvars}
        found.append(eqns)
        handed.append([[v for v in taken if maker[v] == k] for k in range(number)])
        held |= set(taken)
        if not (remat == "full" and number == 0):
            maker |= {v: number for v in made if v not in maker}
    return found, handed


def _slice(whole: Program, eqns: Sequence[int], outputs: Sequence[Any], arguments: Sequence[Sequence[Var]]) -> Program:
    made = {v for i in eqns for v in whole.eqns[i].outvars}
    used = {v for i in eqns for v in variables(whole.eqns[i].invars)} | set(variables(outputs))
    inputs = tuple(v for names in arguments for v in names if v in used and v not in made)
    return Program(tuple(whole.eqns[i] for i in eqns), inputs, tuple(outputs), whole.consts)


def _is_float(v: Var) -> bool:
    return jnp.issubdtype(v.aval.dtype, jnp.floating)
