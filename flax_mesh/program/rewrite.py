"""Evaluates a program with a rule.

A rule sees the equations that it touches, with the values of their inputs. It returns the outputs, or None: then the
body of the equation, if it has one, is evaluated with the rule, and any other equation is evaluated as it is.

Values that are more than arrays, and how they travel through bodies: `bodies.py`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, TypeAlias

import jax
from jax.extend import core as jex
from jax.typing import ArrayLike

from flax_mesh.jax_compat import evaluate, in_source_of, source_line
from flax_mesh.program.bodies import Composite, Lost, Value, can_open, open_bodies, whole
from flax_mesh.program.equations import JIT, REMAT, body
from flax_mesh.program.program import Atom, Eqn, Program, shape_of, trace

Rule: TypeAlias = Callable[[Eqn, list[Value]], Sequence[Value] | None]
Touches: TypeAlias = Callable[[Eqn, Sequence[Value]], bool]


def rewrite(
    program: Program,
    values: Sequence[Value],
    rule: Rule,
    *,
    touches: Touches = lambda eqn, values: True,
    constant: Callable[[ArrayLike], ArrayLike] = lambda x: x,
    lost: Lost | None = None,
) -> list[Value]:
    """The outputs of `program` for one value per input, evaluated with `rule`.

    New equations, and errors, have the line of the user's code that the equation at hand comes from. The body of a jit
    is inlined. A function with a custom derivative keeps its derivative; one with a Composite is never opened.

    Args:
        program: The program.
        values: One value per input.
        rule: `rule(eqn, values)` returns the outputs, or None.
        touches: `touches(eqn, values)`: whether the rule has something to do with an equation, or in its bodies.
            Otherwise the equation is evaluated as it is, with the same jaxprs, and the rule does not see it.
        constant: What an array that the program closes over, or a literal, becomes.
        lost: Called where a Composite becomes an array without the rule. None: a TypeError.
    """
    return _Rewriting(rule, touches, constant, lost or _refuse).run(program, values)


def inline(program: Program, opens: Callable[[Eqn], bool] = lambda eqn: False) -> Program:
    """The same program without nested jits, and without the remats for which `opens` returns True."""

    def touches(eqn: Eqn, values: Sequence[Value] = ()) -> bool:
        return eqn.primitive.name in JIT or (eqn.primitive.name in REMAT and opens(eqn))

    def run(program: Program, values: Sequence[Value]) -> list[Value]:
        return rewrite(program, values, lambda eqn, values: run(body(eqn), values), touches=touches)

    if not any(map(touches, program.eqns)):
        return program
    return trace(lambda *args: run(program, args), *(shape_of(v.aval) for v in program.inputs))[0]


def _refuse(eqn: Eqn, value: Composite) -> None:
    raise TypeError(
        f"{value} must not be used by {eqn.primitive.name} ({source_line(eqn)}), for which there is no rule"
    )


def _mesh_of(eqn: Eqn) -> AbstractContextManager[object]:
    """Context with the mesh of the results of an equation, which `jax.sharding.auto_axes` changes within a program."""
    meshes = (v.aval.sharding.mesh for v in eqn.outvars if hasattr(v.aval, "sharding"))
    mesh = next((mesh for mesh in meshes if not mesh.empty), None)
    return nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh)


class _Rewriting(NamedTuple):
    rule: Rule
    touches: Touches
    constant: Callable[[ArrayLike], ArrayLike]
    lost: Lost

    def run(self, program: Program, values: Sequence[Value]) -> list[Value]:
        env = {v: self.constant(x) for v, x in program.consts.items()} | dict(zip(program.inputs, values, strict=True))

        def read(atom: Atom) -> Value:
            return self.constant(atom.val) if isinstance(atom, jex.Literal) else env[atom]

        for eqn in program.eqns:
            env.update(zip(eqn.outvars, self.outputs(eqn, [*map(read, eqn.invars)]), strict=True))
        return [*map(read, program.outputs)]

    def outputs(self, eqn: Eqn, values: list[Value]) -> Sequence[Value]:
        if self.touches(eqn, values):
            with in_source_of(eqn), eqn.ctx.manager, _mesh_of(eqn):
                if (outs := self.rule(eqn, values)) is not None:
                    return outs
                if can_open(eqn, values):
                    return open_bodies(eqn, values, lambda _, program, given: self.run(program, given), self.lost)
        for x in values:
            if isinstance(x, Composite):
                self.lost(eqn, x)
        return evaluate(eqn, [whole(x) for x in values])
