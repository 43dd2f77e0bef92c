"""Means of means: a loss or a metric that is divided by a number that differs between the parts of a batch."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend import core as jex

from flax_mesh.jax_compat import source_line
from flax_mesh.step.parameter_flow import CALLS, DEPENDS, flow
from flax_mesh.text import listed

_Flags = Sequence[bool]  # of the inputs of a jaxpr


def warn_mean_of_means(
    jaxpr: jex.Jaxpr, named: Mapping[str, Any], weight: Any, of_batch: _Flags, of_params: _Flags
) -> None:
    """Warns if a value of `named` is divided by a scalar that depends on the batch and on no parameter.

    Only divisions after the last reduction count: layers may divide arrays. `named` has the loss and the metrics, as
    variables of `jaxpr`, whose inputs are its constants and its arguments: rows of a batch, trained parameters, others.
    Nothing is reported if `weight` depends on the batch: the values are sums then.
    """
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    (by_batch,) = flow(jaxpr.eqns, inputs, [weight], [DEPENDS if flag else None for flag in of_batch])
    if by_batch is not None:
        return
    lines: dict[str, list[str]] = {}
    for name, value in named.items():
        eqn = next(_divisions(jaxpr, [value], of_batch, of_params), None) if value.aval.shape == () else None
        if eqn is not None:
            lines.setdefault(source_line(eqn) or "loss_fn", []).append(repr(name))
    if lines:
        text = "; ".join(f"{listed(names)} in {line}" for line, names in lines.items())
        warnings.warn(
            f"loss_fn divides by a number that depends on the batch: {text}. Over several parts, such as microbatches "
            "or the batches of an evaluation, the result is the mean of their means, in which a part with few examples "
            "counts as much as one with many. Return the sum and the number, (loss_sum, weight) or (loss_sum, weight, "
            "{metric: sum}): they are divided once, at the end.",
            stacklevel=1,  # one line of code for all steps: Python reports equal warnings of a line once
        )


def _divisions(jaxpr: jex.Jaxpr, wanted: Sequence[Any], of_batch: _Flags, of_params: _Flags) -> Iterator[jex.JaxprEqn]:
    """The divisions that follow the last reduction of `wanted`, as described in `warn_mean_of_means`."""
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    producers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}

    def depends(atoms: Sequence[Any], flags: _Flags) -> list[bool]:
        flows = flow(jaxpr.eqns, inputs, atoms, [DEPENDS if flag else None for flag in flags])
        return [value is not None for value in flows]

    todo, seen = list[Any](wanted), set[Any]()
    while todo:
        v = todo.pop()
        eqn = None if isinstance(v, jex.Literal) or v in seen else producers.get(v)
        if eqn is None:
            continue
        seen.add(v)
        divisor = _divisor(eqn)
        if divisor and depends(divisor, of_batch) == [True] and depends(divisor, of_params) == [False]:
            yield eqn
        for body, atoms in _bodies(eqn):
            outs = [out for out, of_eqn in zip(body.outvars, eqn.outvars, strict=True) if of_eqn is v]
            flags = [[False] * len(body.constvars) + depends(atoms, each) for each in (of_batch, of_params)]
            yield from _divisions(body, outs, *flags)
        scalars = [atom for atom in eqn.invars if getattr(atom.aval, "shape", None) == ()]
        todo += scalars if len(scalars) == len(eqn.invars) or _bodies(eqn) else []


def _divisor(eqn: jex.JaxprEqn) -> Sequence[Any]:
    """The divisor of a division or of a negative power, in a list; nothing of other equations."""
    name = eqn.primitive.name
    if name == "integer_pow" and eqn.params["y"] < 0:  # also jnp.reciprocal
        return eqn.invars
    return eqn.invars[1:] if name == "div" else []


def _bodies(eqn: jex.JaxprEqn) -> list[tuple[jex.Jaxpr, Sequence[Any]]]:
    """The bodies that a call or a branch evaluates once, and their inputs."""
    name, params = eqn.primitive.name, eqn.params
    if name == "cond":
        return [(branch.jaxpr, eqn.invars[1:]) for branch in params["branches"]]
    bodies = [x for x in params.values() if isinstance(x, jex.ClosedJaxpr | jex.Jaxpr)] if name in CALLS else []
    opened = [x.jaxpr if isinstance(x, jex.ClosedJaxpr) else x for x in bodies]
    return [(body, eqn.invars) for body in opened if len(body.invars) == len(eqn.invars)]
