"""Splits every scan of a backward pass in two: one scan for input gradients, one scan for weight gradients.

The derivative of a scan over layers is one scan equation that computes both kinds of gradients, so B and W could not
each have its part of it. Example with the layer h = tanh(x @ w), whose residuals are x and h. The scan runs over the
layers in reverse. Its carry is g, the gradient of h:

    one scan                         first scan, part of B            second scan, part of W

    g --> +--------------------+     g --> +--------------------+
          | d = g * (1 - h*h)  |           | d = g * (1 - h*h)  | --> d of all layers, stacked
          | g' = d @ w.T       |           | g' = d @ w.T       |     |
          | dw = x.T @ d       |     g' <- +--------------------+     |     +---------------+
    g' <- +--------------------+ --> dw                               +---> | dw = x.T @ d  | --> dw
                                                                            +---------------+

The first scan has the equations of the body that the early outputs depend on (g'). For each layer it also outputs the
values that the remaining equations use (d), as scanned outputs. The second scan takes them as scanned inputs and has
the remaining equations (dw). No equation runs twice; the cost is the memory of the stacked values between B and W.
"""

from collections.abc import Sequence
from typing import Any

from flax_mesh.program.program import REMAT, SCAN, Eqn, Program, Var, needed, scan_parts, shape_of, trace, variables
from flax_mesh.program.rewrite import inline, rewrite


def split_scans(program: Program, first: Sequence[Any]) -> Program:
    """`program` with every scan split in two of whose outputs `first` needs some, but not all."""
    kept, live = needed(program.eqns, first)
    early, splits = set(live), {program.eqns[i].outvars[0] for i in kept if _is_mixed(program.eqns[i], set(live))}
    if not splits:
        return program

    def rule(eqn: Eqn, values: list[Any]) -> list[Any]:
        return _two_scans(eqn, values, [v in early for v in eqn.outvars])

    def touches(eqn: Eqn, values: Sequence[Any]) -> bool:
        return any(v in splits for v in eqn.outvars[:1])

    shapes = (shape_of(v.aval) for v in program.inputs)
    return trace(lambda *args: rewrite(program, args, rule, touches=touches), *shapes)[0]


def _is_mixed(eqn: Eqn, early: set[Var]) -> bool:
    return eqn.primitive.name == SCAN and 1 <= sum(v in early for v in eqn.outvars) < len(eqn.outvars)


def _two_scans(eqn: Eqn, values: Sequence[Any], early: Sequence[bool]) -> list[Any]:
    """All outputs of a scan, the `early` ones from a first scan that computes nothing for the others."""
    pick = lambda items, chosen: [x for x, c in zip(items, chosen, strict=False) if c]  # noqa: E731
    parts = scan_parts(eqn)
    inner = inline(parts.body, lambda inner: inner.primitive.name in REMAT)
    consts, carry, xs = parts.inputs(values)
    _, carry_in, _ = parts.inputs(inner.inputs)
    num_carry = parts.num_carry

    # 1. Outputs of the first scan: the early ones, and every carry that they depend on.
    is_early = _with_required_carries(inner, carry_in, early)
    is_late = [not chosen for chosen in is_early]
    # 2. Equations of the first scan: those that these outputs depend on.
    early_eqns, _ = needed(inner.eqns, pick(inner.outputs, is_early))
    known_early = {v for i in early_eqns for v in inner.eqns[i].outvars} | set(pick(carry_in, is_early))
    # 3. Equations of the second scan: the remaining ones that the other outputs depend on. Values of the first scan
    #    that they use are passed on, stacked over the layers.
    rest = [i for i in range(len(inner.eqns)) if i not in set(early_eqns)]
    late, late_live = needed([inner.eqns[i] for i in rest], pick(inner.outputs, is_late))
    passed = [v for v in late_live if v in known_early]

    first = _scan_body(inner, early_eqns, is_early, num_carry, passed)
    second = _scan_body(inner, [rest[i] for i in late], is_late, num_carry, [])

    def run_first(c: list[Any], x: list[Any]):
        known = dict(zip(inner.inputs, [*consts, *[None] * num_carry, *x], strict=True))
        return first(known | dict(zip(pick(carry_in, is_early), c, strict=True)))

    def run_second(c: list[Any], x: tuple[list[Any], list[Any]]):
        known = dict(zip(inner.inputs, [*consts, *[None] * num_carry, *x[0]], strict=True))
        known |= dict(zip(passed, x[1], strict=True))
        return second(known | dict(zip(pick(carry_in, is_late), c, strict=True)))

    early_carry, (early_ys, stacked) = parts.run(run_first, pick(carry, is_early), xs)
    late_carry, (late_ys, _) = parts.run(run_second, pick(carry, is_late), (xs, stacked))
    results = {True: iter([*early_carry, *early_ys]), False: iter([*late_carry, *late_ys])}
    return [next(results[chosen]) for chosen in is_early]


def _with_required_carries(inner: Program, carry_in: Sequence[Var], early: Sequence[bool]) -> list[bool]:
    """`early`, extended by every carry that an early output depends on, in this or in a previous iteration."""
    chosen = list(early)
    while True:
        _, live = needed(inner.eqns, [v for v, c in zip(inner.outputs, chosen, strict=True) if c])
        grown = [c or (i < len(carry_in) and carry_in[i] in set(live)) for i, c in enumerate(chosen)]
        if grown == chosen:
            return chosen
        chosen = grown


def _scan_body(inner: Program, eqns: Sequence[int], chosen: Sequence[bool], num_carry: int, passed: Sequence[Var]):
    """The body of a scan with some of the equations: a function from known values to carry, (ys, passed)."""
    outputs = [atom for atom, c in zip(inner.outputs, chosen, strict=True) if c]
    num_chosen_carry = sum(chosen[:num_carry])

    def run(known: dict[Var, Any]):
        part = [inner.eqns[i] for i in eqns]
        computed = {v for eqn in part for v in eqn.outvars}
        used = variables([atom for eqn in part for atom in eqn.invars] + [*outputs, *passed])
        inputs = [v for v in used if v not in computed and v not in inner.consts]
        program = Program(tuple(part), tuple(inputs), (*outputs, *passed), inner.consts)
        outs = program.call(*(known[v] for v in inputs))
        return outs[:num_chosen_carry], (outs[num_chosen_carry : len(outputs)], outs[len(outputs) :])

    return run
