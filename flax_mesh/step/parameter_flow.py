"""Which outputs of a traced function depend on its inputs, and which outputs are unchanged inputs."""

import functools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from jax.extend import core as jex

from flax_mesh.jax_compat import JIT, REMAT, scan_sizes

_Flows: TypeAlias = Sequence[Hashable]  # of several values, see `flow`
_Body: TypeAlias = jex.ClosedJaxpr | jex.Jaxpr
DEPENDS = "depends"
# Primitives that call a body with their inputs and return its results.
CALLS = (*JIT, *REMAT, "custom_jvp_call", "custom_vjp_call")


class _Row(NamedTuple):
    """In the body of a scan: the current row of the scanned input `value`."""

    scan: int
    value: Hashable


def flow(eqns: Iterable[jex.JaxprEqn], inputs: Sequence[jex.Var], outputs: Sequence[Any], given: _Flows) -> _Flows:
    """The flow of every output of a jaxpr: None if it does not depend on the inputs, DEPENDS, or the flow of an input.

    `given` has the flow of every input: None for an input that does not count, else a name. An output with the name of
    an input has the same value. Values with zero gradients, such as results of comparisons, count as dependent too.
    Calls, loops and branches are followed; every other equation mixes its inputs.
    """
    known = dict(zip(inputs, given, strict=True))
    for eqn in eqns:
        flows = [known.get(atom) if isinstance(atom, jex.Var) else None for atom in eqn.invars]
        known |= zip(eqn.outvars, _through(eqn, flows), strict=True)
    return [known.get(atom) if isinstance(atom, jex.Var) else None for atom in outputs]


def _through(eqn: jex.JaxprEqn, given: _Flows) -> _Flows:
    name, params = eqn.primitive.name, eqn.params
    if all(value is None for value in given):
        return [None] * len(eqn.outvars)
    if name == "scan":
        return _through_scan(eqn, given)
    if name == "while":
        num_test, num_body = params["cond_nconsts"], params["body_nconsts"]
        of_test, consts, carry = given[:num_test], given[num_test : num_test + num_body], given[num_test + num_body :]
        carry, _ = _repeated(params["body_jaxpr"], consts, carry, [])
        return _selected(_inside(params["cond_jaxpr"], [*of_test, *carry])[0], carry)
    if name == "cond":
        index, *values = given
        sides = [_inside(branch, values) for branch in params["branches"]]
        return _selected(index, [functools.reduce(_either, each) for each in zip(*sides, strict=True)])
    bodies = [x for x in params.values() if isinstance(x, jex.ClosedJaxpr | jex.Jaxpr)]
    bodies = [x for x in bodies if len(_opened(x).invars) == len(given) and len(_opened(x).outvars) == len(eqn.outvars)]
    if len(bodies) == 1:
        outs = _inside(bodies[0], given)
        return outs if name in CALLS else [None if value is None else DEPENDS for value in outs]
    return [DEPENDS] * len(eqn.outvars)


def _through_scan(eqn: jex.JaxprEqn, given: _Flows) -> _Flows:
    num_consts, num_carry = scan_sizes(eqn)
    consts, carry, xs = given[:num_consts], given[num_consts : num_consts + num_carry], given[num_consts + num_carry :]
    rows = [value if value in (None, DEPENDS) else _Row(id(eqn), value) for value in xs]
    carry, ys = _repeated(eqn.params["jaxpr"], consts, carry, rows)
    # A scan that returns the rows of an input returns that input.
    whole = [y.value if isinstance(y, _Row) and y.scan == id(eqn) else None if y is None else DEPENDS for y in ys]
    return [*carry, *whole]


def _repeated(body: _Body, consts: _Flows, carry: _Flows, rows: _Flows) -> tuple[_Flows, _Flows]:
    """The flow of the carry after any number of iterations, and of the other outputs."""
    while True:
        outs = _inside(body, [*consts, *carry, *rows])
        after = [_either(a, b) for a, b in zip(carry, outs, strict=False)]
        if after == carry:
            return carry, outs[len(carry) :]
        carry = after


def _inside(body: _Body, given: _Flows) -> _Flows:
    jaxpr = _opened(body)
    return flow(jaxpr.eqns, jaxpr.invars, jaxpr.outvars, given)


def _opened(body: _Body) -> jex.Jaxpr:
    return body.jaxpr if isinstance(body, jex.ClosedJaxpr) else body


def _either(a: Hashable, b: Hashable) -> Hashable:
    return a if a == b else DEPENDS


def _selected(by: Hashable, values: _Flows) -> _Flows:
    """The flow of `values` if `by` determines how they are computed."""
    return values if by is None else [DEPENDS if value is None else value for value in values]
