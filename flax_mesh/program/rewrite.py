"""Evaluates a program with a rule.

A rule sees the equations that it touches, with the values of their inputs. It returns the outputs, or None: then the
bodies of the equation, if it has any, are evaluated with the rule, and any other equation is evaluated as it is.

Most values are arrays. A `Composite` stands for an array, and is more than it: a weight with its adapter, for example.
Bodies are traced by JAX, and take and return arrays, so a Composite travels through them as follows:

    a constant, an operand of a branch         the same Composite in the body
    a scanned input                            `Composite.scanned()`, of which the body sees a row
    a loop variable that no iteration changes  the same Composite in the body, and after the loop
    an output that is an unchanged input       the Composite that is this input

Everywhere else it is the array `Composite.whole()`, and `lost(eqn, composite)` is called first.
"""

# JAX has no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, TypeAlias

import jax
from jax.extend import core as jex
from jax.sharding import Sharding
from jax.typing import ArrayLike

from flax_mesh.jax_compat import empty_debug_info, evaluate, in_source_of, source_line
from flax_mesh.program.follow import Flow, follow_equation
from flax_mesh.program.program import (
    COND,
    CUSTOM,
    JIT,
    LINEAR_SOLVE,
    REMAT,
    SCAN,
    SHARD_MAP,
    WHILE,
    Atom,
    Body,
    Eqn,
    Program,
    bodies_of,
    body,
    program_of,
    scan_parts,
    shape_of,
    shard_map_options,
    trace,
)


class Composite(ABC):
    """A value that stands for an array. It must be a pytree of arrays."""

    @abstractmethod
    def whole(self) -> jax.Array:
        """The array."""

    def scanned(self) -> "Composite | None":
        """The value as an input of a scan, which takes a row of each of its arrays; None: it cannot be scanned."""
        return None


Value: TypeAlias = ArrayLike | Composite
Rule: TypeAlias = Callable[[Eqn, list[Value]], Sequence[Value] | None]
Touches: TypeAlias = Callable[[Eqn, Sequence[Value]], bool]
Lost: TypeAlias = Callable[[Eqn, Composite], None]
Call: TypeAlias = Callable[[int, Program, Sequence[Value]], Sequence[Value]]


def has_composite(eqn: Eqn, values: Sequence[Value]) -> bool:
    """Whether one of the values is a Composite, for `touches`."""
    return any(isinstance(x, Composite) for x in values)


def whole(x: Value) -> ArrayLike:
    """The array of a Composite; any other value as it is."""
    return x.whole() if isinstance(x, Composite) else x


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
    lost = lost or _refuse

    def run(program: Program, values: Sequence[Value]) -> list[Value]:
        env = {v: constant(x) for v, x in program.consts.items()} | dict(zip(program.inputs, values, strict=True))

        def read(atom: Atom) -> Value:
            return constant(atom.val) if isinstance(atom, jex.Literal) else env[atom]

        for eqn in program.eqns:
            env.update(zip(eqn.outvars, outputs(eqn, [*map(read, eqn.invars)]), strict=True))
        return [*map(read, program.outputs)]

    def outputs(eqn: Eqn, values: list[Value]) -> Sequence[Value]:
        if touches(eqn, values):
            with in_source_of(eqn), eqn.ctx.manager, _mesh_of(eqn):
                if (outs := rule(eqn, values)) is not None:
                    return outs
                if can_open(eqn, values):
                    return open_bodies(eqn, values, lambda _, program, given: run(program, given), lost)
        return evaluate(eqn, [_array(eqn, x, lost) for x in values])

    return run(program, values)


def inline(program: Program, opens: Callable[[Eqn], bool] = lambda eqn: False) -> Program:
    """The same program without nested jits, and without the remats for which `opens` returns True."""

    def touches(eqn: Eqn, values: Sequence[Value] = ()) -> bool:
        return eqn.primitive.name in JIT or (eqn.primitive.name in REMAT and opens(eqn))

    def run(program: Program, values: Sequence[Value]) -> list[Value]:
        return rewrite(program, values, lambda eqn, values: run(body(eqn), values), touches=touches)

    if not any(map(touches, program.eqns)):
        return program
    return trace(lambda *args: run(program, args), *(shape_of(v.aval) for v in program.inputs))[0]


def can_open(eqn: Eqn, values: Sequence[Value] = ()) -> bool:
    """Whether `open_bodies` evaluates the bodies of an equation for these values."""
    return eqn.primitive.name in _KINDS and not (eqn.primitive.name in _CLOSED and has_composite(eqn, values))


def open_bodies(eqn: Eqn, values: Sequence[Value], call: Call, lost: Lost) -> Sequence[Value]:
    """The outputs of an equation whose bodies are evaluated by `call(number, body, values)`.

    The number is the one of the body in `bodies_of(eqn)`. A value that `call` does not need may be None, unless it is a
    variable of a loop. A jit without shardings is inlined.
    """
    name = eqn.primitive.name
    composites: dict[Hashable, Composite] = {id(x): x for x in values if isinstance(x, Composite) and name not in JIT}
    names = [id(x) if id(x) in composites else None for x in values]
    flows = follow_equation(eqn, names, _Identity()) if composites else ()
    same = {n: composites[flow] for n, flow in enumerate(flows) if flow in composites}
    outs = _KINDS[name](_Opening(eqn, call, lost, same), [*values])
    return [same.get(n, x) for n, x in enumerate(outs)]


class _Identity(Flow):
    def opens(self, eqn: Eqn, facts: Sequence[Hashable]) -> bool:
        return eqn.primitive.name not in _CLOSED and super().opens(eqn, facts)


class _Opening(NamedTuple):
    eqn: Eqn
    call: Call
    lost: Lost
    same: Mapping[int, Composite]  # the outputs that are unchanged inputs; in a loop, they are no variables

    def arrays(self, outs: Sequence[Value]) -> list[ArrayLike]:
        """The outputs of a body, or the variables of a loop, which are the first outputs."""
        return [whole(x) if n in self.same else _array(self.eqn, x, self.lost) for n, x in enumerate(outs)]

    def variables(self, outs: Sequence[Value]) -> list[Value]:
        return [x for n, x in enumerate(self.arrays(outs)) if n not in self.same]

    def start(self, values: Sequence[Value], body: Callable[[], Sequence[Value]]) -> list[Value]:
        """The variables before a loop. If it changes Composites, `body` with them is traced: its uses come first."""
        if any(isinstance(x, Composite) and n not in self.same for n, x in enumerate(values)):
            jax.eval_shape(lambda: [*map(whole, body())])
        return self.variables(values)

    def carry(self, variables: Sequence[Value], count: int) -> list[Value]:
        """Inverse of `variables`: all that a body calls the variables of its loop."""
        current = iter(variables)
        return [self.same[n] if n in self.same else next(current) for n in range(count)]

    def jit(self, values: list[Value]) -> Sequence[Value]:
        """Inlined, unless it has shardings, which are constraints."""
        shardings = [x for key in ("in_shardings", "out_shardings") for x in self.eqn.params.get(key, ())]
        if not any(isinstance(x, Sharding) for x in shardings) or has_composite(self.eqn, values):
            return self.call(0, body(self.eqn), values)
        return self.replaced(values, "jaxpr")

    def custom(self, values: list[Value]) -> list[Value]:
        return self.replaced(values, "call_jaxpr")

    def replaced(self, values: list[Value], name: str) -> list[Value]:
        """With another body in the parameter `name`."""
        closed = jax.make_jaxpr(lambda *given: self.call(0, body(self.eqn), given))(*values)
        return evaluate(self.eqn.replace(params={**self.eqn.params, name: closed}), values)

    def linear_solve(self, values: list[Value]) -> list[Value]:
        """With other programs of the same types in the place of its functions, such as the product and the solver."""

        def traced(function: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
            program = program_of(function)
            call = lambda *given: self.call(0, program, given)  # noqa: E731
            return jax.make_jaxpr(call)(*(shape_of(v.aval) for v in program.inputs))

        is_function = lambda x: isinstance(x, jex.ClosedJaxpr)  # noqa: E731
        params = jax.tree.map(lambda x: traced(x) if is_function(x) else x, self.eqn.params, is_leaf=is_function)
        return evaluate(self.eqn.replace(params=params), values)

    def remat(self, values: list[Value]) -> list[Value]:
        """With all parameters of the equation, some of which `jax.checkpoint` does not take."""
        closed = jax.make_jaxpr(lambda *given: self.arrays(self.call(0, body(self.eqn), given)))(*values)
        inputs = [*closed.jaxpr.constvars, *closed.jaxpr.invars]
        jaxpr = closed.jaxpr.replace(constvars=[], invars=inputs, debug_info=empty_debug_info())
        params = {**self.eqn.params, "jaxpr": jaxpr}
        if isinstance(flags := params["prevent_cse"], tuple):  # one flag per input
            given = tuple(flag for flag, x in zip(flags, values, strict=True) for _ in jax.tree.leaves(x))
            params["prevent_cse"] = any(flags) if closed.consts else given
        return self.eqn.primitive.bind(*closed.consts, *jax.tree.leaves(values), **params)

    def shard_map(self, values: list[Value]) -> list[Value]:
        local = lambda *given: tuple(self.call(0, body(self.eqn), given))  # noqa: E731
        return [*jax.shard_map(local, **shard_map_options(self.eqn))(*values)]

    def cond(self, values: list[Value]) -> Sequence[Value]:
        def evaluated(number: int, branch: Program) -> Callable[..., list[ArrayLike]]:
            return lambda *given: self.arrays(self.call(number, branch, given))

        calls = [evaluated(number, branch.program) for number, branch in enumerate(bodies_of(self.eqn).all)]
        if platforms := self.eqn.params.get("branches_platforms"):  # only the branch of the platform compiles
            pairs = [*zip(platforms, calls, strict=True)]
            default = next((call for names, call in pairs if names is None), None)
            named = {name: call for names, call in pairs for name in names or ()}
            return jax.lax.platform_dependent(*values[1:], default=default, **named)
        return jax.lax.switch(_array(self.eqn, values[0], self.lost), calls, *values[1:])

    def scan(self, values: list[Value]) -> list[Value]:
        parts = scan_parts(self.eqn)
        consts, start, rows = parts.inputs(values)
        rows = [x.scanned() or _array(self.eqn, x, self.lost) if isinstance(x, Composite) else x for x in rows]

        def step(variables: list[Value], rows: list[Value]) -> tuple[list[Value], list[ArrayLike]]:
            carry = self.carry(variables, parts.num_carry)
            after, stacked = parts.outputs(self.arrays(self.call(0, parts.body, [*consts, *carry, *rows])))
            return self.variables(after), stacked

        def body() -> Sequence[Value]:
            call = lambda x: [*map(whole, self.call(0, parts.body, [*consts, *start, *x]))]  # noqa: E731
            return parts.run(lambda carry, x: (carry, call(x)), 0, rows)[1]

        after, stacked = parts.run(step, self.start(start, body), rows)
        return [*self.carry(after, parts.num_carry), *stacked]

    def while_(self, values: list[Value]) -> list[Value]:
        (repeated, test), numbers, *_ = bodies_of(self.eqn)

        def call(number: int, each: Body, variables: list[Value]) -> Sequence[Value]:
            current = dict(zip(numbers, self.carry(variables, len(numbers)), strict=True))
            return self.call(number, each.program, [current.get(at, values[at]) for at in each.at])

        body = lambda: self.call(0, repeated.program, [values[at] for at in repeated.at])  # noqa: E731
        start = self.start([values[at] for at in numbers], body)
        step = lambda variables: self.variables(call(0, repeated, variables))  # noqa: E731
        after = jax.lax.while_loop(lambda variables: call(1, test, variables)[0], step, start)
        return self.carry(after, len(numbers))


_CLOSED = (*CUSTOM, SHARD_MAP, LINEAR_SOLVE)  # with a Composite among the values
_KINDS: dict[str, Callable[[_Opening, list[Value]], Sequence[Value]]] = {
    **dict.fromkeys(JIT, _Opening.jit),
    **dict.fromkeys(REMAT, _Opening.remat),
    **dict.fromkeys(CUSTOM, _Opening.custom),
    LINEAR_SOLVE: _Opening.linear_solve,
    SHARD_MAP: _Opening.shard_map,
    COND: _Opening.cond,
    SCAN: _Opening.scan,
    WHILE: _Opening.while_,
}


def _array(eqn: Eqn, x: Value, lost: Lost) -> ArrayLike:
    if isinstance(x, Composite):
        lost(eqn, x)
    return whole(x)


def _refuse(eqn: Eqn, value: Composite) -> None:
    raise TypeError(
        f"{value} must not be used by {eqn.primitive.name} ({source_line(eqn)}), for which there is no rule"
    )


def _mesh_of(eqn: Eqn) -> AbstractContextManager[object]:
    """Context with the mesh of the results of an equation, which `jax.sharding.auto_axes` changes within a program."""
    meshes = (v.aval.sharding.mesh for v in eqn.outvars if hasattr(v.aval, "sharding"))
    mesh = next((mesh for mesh in meshes if not mesh.empty), None)
    return nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh)
