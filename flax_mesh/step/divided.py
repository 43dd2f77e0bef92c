"""Means of means: a loss or a metric that is divided by a number that differs between the parts of a batch."""

import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

from flax_mesh.jax_compat import source_line
from flax_mesh.program.follow import DEPENDS, BodyPath, Facts, Flow, follow
from flax_mesh.program.program import CALLS, COND, Eqn, Program, Var, bodies_of, is_var
from flax_mesh.text import listed

_Flags = Sequence[bool]


def warn_mean_of_means(
    program: Program, named: Mapping[str, Var], weight: Var, of_batch: _Flags, of_params: _Flags
) -> None:
    """Warns if a value of `named` is divided by a scalar that depends on the batch and on no parameter.

    Only divisions after the last reduction count: layers may divide arrays. `named` has the loss and the metrics, as
    variables of `program`; the flags are of its constants and its inputs.
    Nothing is reported if `weight` depends on the batch: the values are sums then.
    """
    program = program._replace(inputs=(*program.consts, *program.inputs), consts={})
    flows = [follow(program, [DEPENDS if flag else None for flag in each], Flow()) for each in (of_batch, of_params)]
    by = _Dependences(*flows)
    if by.batch.of(weight) is not None:
        return
    lines: dict[str, list[str]] = {}
    for name, value in named.items():
        eqn = next(_divisions(program, (), [value], by), None) if value.aval.shape == () else None
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


class _Dependences(NamedTuple):
    """What the values of a program depend on: None for nothing."""

    batch: Facts[Hashable]
    params: Facts[Hashable]

    def only_of_batch(self, atom: Var, path: BodyPath) -> bool:
        return self.batch.of(atom, path) is not None and self.params.of(atom, path) is None


def _divisions(program: Program, path: BodyPath, wanted: Sequence[Var], by: _Dependences) -> Iterator[Eqn]:
    """The divisions that follow the last reduction of `wanted`, as described in `warn_mean_of_means`."""
    producers = {v: eqn for eqn in program.eqns for v in eqn.outvars}
    todo, seen = list[Var](wanted), set[Var]()
    while todo:
        v = todo.pop()
        eqn = producers.get(v) if is_var(v) and v not in seen else None
        if eqn is None:
            continue
        seen.add(v)
        if any(by.only_of_batch(divisor, path) for divisor in _divisor(eqn)):
            yield eqn
        inner = bodies_of(eqn).all if eqn.primitive.name in (*CALLS, COND) else ()
        for n, (each, _) in enumerate(inner):
            outs = [out for out, of_eqn in zip(each.outputs, eqn.outvars, strict=True) if of_eqn is v]
            yield from _divisions(each, (*path, (id(eqn), n)), outs, by)
        scalars = [atom for atom in eqn.invars if getattr(atom.aval, "shape", None) == ()]
        todo += scalars if len(scalars) == len(eqn.invars) or inner else []


def _divisor(eqn: Eqn) -> Sequence[Var]:
    """The divisor of a division or of a negative power, in a list; nothing of other equations."""
    name = eqn.primitive.name
    if name == "integer_pow" and eqn.params["y"] < 0:  # also jnp.reciprocal
        return eqn.invars
    return eqn.invars[1:] if name == "div" else []
