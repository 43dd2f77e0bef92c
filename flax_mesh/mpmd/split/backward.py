"""Differentiates a stage into forward (F), backward for the inputs (B) and backward for the weights (W).

The stage and its vector-Jacobian product are traced as one program, of which F, B and W are slices. F has the equations
that the outputs depend on. B has the remaining ones that the gradients of the inputs depend on, and W the rest (Qi et
al. 2023, "Zero Bubble Pipeline Parallelism"). F stores residuals for B and W; B passes intermediate values on to W.
"""

from collections.abc import Sequence
from itertools import pairwise

import jax
import jax.numpy as jnp

from flax_mesh.jax_compat import REMAT
from flax_mesh.mpmd.split.assign import StageProgram
from flax_mesh.mpmd.split.remat import choose_residuals, find_repeatable
from flax_mesh.mpmd.split.split_scan import split_scans
from flax_mesh.program.program import Program, Var, needed, shape_of, trace, variables
from flax_mesh.program.rewrite import inline

_Arrays = list[jax.Array]


def differentiate(
    stage: StageProgram, trained: Sequence[int], *, remat: str = "none", split: bool = False
) -> StageProgram:
    """The stage with F, B and W. `trained` are the inputs of the loss function's program to differentiate.

    Output 0 of that program is the loss. The stage that returns it uses 1 as its cotangent. `remat` is one of
    REMAT_MODES. With "full", F stores no residuals and B recomputes the stage from its inputs. With `split`, W computes
    the gradients of the weights; otherwise B does, and W does not exist.
    """
    trained = tuple(at for at in stage.inputs if at in set(trained))
    floats_in = tuple(i for i, v in enumerate(stage.received) if _has_gradient(v) and v not in stage.frozen)
    floats_out = tuple(i for i, v in enumerate(stage.sent) if _has_gradient(v) and v not in stage.frozen)
    program = _joint(stage, trained, floats_in, floats_out)
    num_outputs = len(stage.forward.outputs)
    if split:
        # A remat, like a scan, is one equation for both kinds of gradients. B still has its recomputation.
        program = inline(program, lambda eqn: eqn.primitive.name in REMAT)
        program = split_scans(program, program.outputs[: num_outputs + len(floats_in)])
    outputs, grads = program.outputs[:num_outputs], program.outputs[num_outputs:]
    results = [outputs, grads[: len(floats_in)], grads[len(floats_in) :]] if split else [outputs, grads]
    slices, taken = _slices(program, results, remat, num_given=len(stage.inputs))
    residuals = variables(v for later in taken[1:] for v in later[0])
    from_b_to_w = variables(taken[2][1]) if split else []
    bounds = (0, len(stage.inputs), len(stage.forward.inputs), len(program.inputs))
    arguments = (*(program.inputs[a:b] for a, b in pairwise(bounds)), tuple(residuals), tuple(from_b_to_w))
    return stage._replace(
        arguments=arguments,
        forward=_slice(program, slices[0], [*outputs, *residuals], arguments),
        backward=_slice(program, slices[1], [*results[1], *from_b_to_w], arguments),
        weights=_slice(program, slices[2], results[2], arguments) if split else None,
        trained=trained,
        floats_in=floats_in,
        floats_out=floats_out,
    )


def _joint(stage: StageProgram, trained, floats_in, floats_out) -> Program:
    """The program (inputs, received, cotangents) -> (sent, outputs, gradients of floats_in, gradients of trained)."""
    num_inputs, num_sent = len(stage.inputs), len(stage.sent)
    at_input = [stage.inputs.index(at) for at in trained]
    at_received = [num_inputs + i for i in floats_in]
    has_loss = 0 in stage.outputs
    with_cotangent = [*floats_out, *([num_sent + stage.outputs.index(0)] if has_loss else [])]

    def run(values: _Arrays, cotangents: _Arrays) -> _Arrays:
        def forward(primals: _Arrays) -> tuple[_Arrays, _Arrays]:
            args = list(values)
            for at, value in zip([*at_received, *at_input], primals, strict=True):
                args[at] = value
            outs = stage.forward.call(*args)
            return [outs[i] for i in with_cotangent], outs

        primals = [values[at] for at in [*at_received, *at_input]]
        differentiated, vjp_fn, outs = jax.vjp(forward, primals, has_aux=True)
        seeds = [*cotangents, *([jnp.ones_like(differentiated[-1])] if has_loss else [])]
        return [*outs, *vjp_fn(seeds)[0]]

    shapes = [shape_of(v.aval) for v in stage.forward.inputs]
    cotangents = [shape_of(stage.sent[i].aval) for i in floats_out]
    return inline(trace(run, shapes, cotangents)[0])


def _slices(
    program: Program, results: Sequence[Sequence[object]], remat: str, num_given: int
) -> tuple[list[list[int]], list[list[list[Var]]]]:
    """Returns (equations of every slice, taken[slice][earlier slice]: the values that it takes from that slice)."""
    slice_of: dict[Var, int] = {}  # the first slice that computes each value
    stored: set[Var] = set()  # values that an earlier slice takes already
    repeatable = find_repeatable(program, num_given, cheap=remat != "none")
    slices, taken = [], []
    for number, outputs in enumerate(results):
        remaining = [i for i, eqn in enumerate(program.eqns) if not any(v in slice_of for v in eqn.outvars)]
        # Effects, such as debug prints, run once: in F.
        kept, live = needed([program.eqns[i] for i in remaining], outputs, effects=number == 0)
        required = [v for v in live if v in slice_of]
        residuals, repeated = choose_residuals(program, required, repeatable, slice_of, stored)
        eqns = sorted({*(remaining[i] for i in kept), *repeated})
        computed = {v for i in eqns for v in program.eqns[i].outvars}
        slices.append(eqns)
        taken.append([[v for v in residuals if slice_of[v] == k] for k in range(number)])
        stored |= set(residuals)
        # With remat="full", B must not find any value of F, and so computes all of them again.
        if not (remat == "full" and number == 0):
            slice_of |= {v: number for v in computed if v not in slice_of}
    return slices, taken


def _slice(
    program: Program, eqns: Sequence[int], outputs: Sequence[object], arguments: Sequence[Sequence[Var]]
) -> Program:
    computed = {v for i in eqns for v in program.eqns[i].outvars}
    used = {v for i in eqns for v in variables(program.eqns[i].invars)} | set(variables(outputs))
    inputs = tuple(v for names in arguments for v in names if v in used and v not in computed)
    return Program(tuple(program.eqns[i] for i in eqns), inputs, tuple(outputs), program.consts)


def _has_gradient(v: Var) -> bool:
    """Whether a value is of a real or complex floating-point dtype."""
    return jnp.issubdtype(v.aval.dtype, jnp.inexact)
