"""Scans of a backward pass, each cut into one for the inputs and one for the weights.

Differentiated, a scan over layers is one equation that gives both kinds of gradients; whoever wants the one would
compute the other. Unzipped, the first scan gives the gradients of the inputs and, layer by layer, the values that the
second one needs; the second has the rest of the body and gives the gradients of the weights.
"""

from collections.abc import Sequence
from typing import Any

import jax

from flax_mesh.jax_compat import scan_sizes
from flax_mesh.mpmd.split.jaxpr import (
    REMAT,
    Eqn,
    Program,
    Var,
    body,
    evaluate,
    inline,
    is_var,
    needed,
    trace,
    variables,
)


def unzip_scans(program: Program, first: Sequence[Any]) -> Program:
    """`program` with every scan in two that gives something for the outputs `first` and something for others alone."""
    kept, live = needed(program.eqns, first)
    early, splits = set(live), {program.eqns[i].outvars[0] for i in kept if _gives_both(program.eqns[i], set(live))}
    if not splits:
        return program

    def run(*args: Any) -> list[Any]:
        env = dict(program.consts) | dict(zip(program.inputs, args, strict=True))
        for eqn in program.eqns:
            values = [env[atom] if is_var(atom) else atom.val for atom in eqn.invars]
            split = eqn.outvars and eqn.outvars[0] in splits
            outs = _two_scans(eqn, values, [v in early for v in eqn.outvars]) if split else evaluate(eqn, values)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [env[atom] if is_var(atom) else atom.val for atom in program.outputs]

    return trace(run, *(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in program.inputs))[0]


def _gives_both(eqn: Eqn, early: set[Var]) -> bool:
    return eqn.primitive.name == "scan" and 1 <= sum(v in early for v in eqn.outvars) < len(eqn.outvars)


def _two_scans(eqn: Eqn, values: Sequence[Any], early: Sequence[bool]) -> list[Any]:
    """All outputs of a scan; those that are `early` from a scan that computes nothing of the others."""
    pick = lambda items, chosen: [x for x, c in zip(items, chosen, strict=False) if c]  # noqa: E731
    inner = inline(body(eqn), lambda inner: inner.primitive.name in REMAT)
    num_consts, num_carry = scan_sizes(eqn)
    start_xs = num_consts + num_carry
    consts, carry, xs = values[:num_consts], values[num_consts:start_xs], list(values[start_xs:])
    carry_in = inner.inputs[num_consts:start_xs]
    one = _closure(inner, carry_in, early)
    other = [not chosen for chosen in one]
    early_eqns, _ = needed(inner.eqns, pick(inner.outputs, one))
    made = {v for i in early_eqns for v in inner.eqns[i].outvars} | set(pick(carry_in, one))
    rest = [i for i in range(len(inner.eqns)) if i not in set(early_eqns)]
    late, late_live = needed([inner.eqns[i] for i in rest], pick(inner.outputs, other))
    handed = [v for v in late_live if v in made]

    first = _part(inner, early_eqns, one, num_carry, handed)
    second = _part(inner, [rest[i] for i in late], other, num_carry, [])
    kinds = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}

    def run_first(c: list[Any], x: list[Any]):
        known = dict(zip(inner.inputs, [*consts, *[None] * num_carry, *x], strict=True))
        return first(known | dict(zip(pick(carry_in, one), c, strict=True)))

    def run_second(c: list[Any], x: tuple[list[Any], list[Any]]):
        known = dict(zip(inner.inputs, [*consts, *[None] * num_carry, *x[0]], strict=True))
        known |= dict(zip(handed, x[1], strict=True))
        return second(known | dict(zip(pick(carry_in, other), c, strict=True)))

    carry_one, (ys_one, passed) = jax.lax.scan(run_first, pick(carry, one), xs, **kinds)
    carry_other, (ys_other, _) = jax.lax.scan(run_second, pick(carry, other), (xs, passed), **kinds)
    found = {True: iter([*carry_one, *ys_one]), False: iter([*carry_other, *ys_other])}
    return [next(found[chosen]) for chosen in one]


def _closure(inner: Program, carry_in: Sequence[Var], early: Sequence[bool]) -> list[bool]:
    """`early` with every carry that an early output depends on."""
    chosen = list(early)
    while True:
        _, live = needed(inner.eqns, [v for v, c in zip(inner.outputs, chosen, strict=True) if c])
        grown = [c or (i < len(carry_in) and carry_in[i] in set(live)) for i, c in enumerate(chosen)]
        if grown == chosen:
            return chosen
        chosen = grown


def _part(inner: Program, eqns: Sequence[int], chosen: Sequence[bool], num_carry: int, handed: Sequence[Var]):
    """A body of a scan that runs some equations: known values -> carry, (ys, handed)."""
    outputs = [atom for atom, c in zip(inner.outputs, chosen, strict=True) if c]
    split = sum(chosen[:num_carry])

    def run(known: dict[Var, Any]):
        part = [inner.eqns[i] for i in eqns]
        made = {v for eqn in part for v in eqn.outvars}
        used = variables([atom for eqn in part for atom in eqn.invars] + [*outputs, *handed])
        inputs = [v for v in used if v not in made and v not in inner.consts]
        program = Program(tuple(part), tuple(inputs), (*outputs, *handed), inner.consts)
        outs = program.call(*(known[v] for v in inputs))
        return outs[:split], (outs[split : len(outputs)], outs[len(outputs) :])

    return run
