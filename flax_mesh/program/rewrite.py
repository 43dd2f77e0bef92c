"""Evaluates a program with a rule: the only code that opens the bodies of jit, remat, loops, branches and functions.

A rule sees the equations that it touches, with the values of their inputs. It returns the outputs, or None: then the
body of the equation, if it has one, is evaluated with the rule, and any other equation is evaluated as it is.

Most values are arrays. A `Composite` stands for an array, and is more than it: a weight with its adapter, for example.
Bodies are traced by JAX, and take and return arrays, so a Composite travels through them as follows:

    a constant, an operand of a branch         the same Composite in the body
    a scanned input                            `Composite.scanned()`, of which the body sees a row
    a loop variable that no iteration changes  the same Composite in the body, and after the loop
    an output that is an unchanged input       the Composite that is this input

Everywhere else, and in equations that the rule leaves to the default, it is the array `Composite.whole()`, and
`lost(eqn, composite)` is called first.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, TypeAlias

import jax
from jax.typing import ArrayLike

from flax_mesh.jax_compat import empty_debug_info, evaluate, in_source_of, source_line
from flax_mesh.program.equations import (
    COND,
    CUSTOM,
    JIT,
    REMAT,
    SCAN,
    SHARD_MAP,
    WHILE,
    body,
    branches,
    scan_parts,
    shard_map_options,
    while_parts,
)
from flax_mesh.program.program import Eqn, Program, is_var, shape_of, trace


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


class _Changed(Exception):
    """Ends the trace of a loop whose iterations change Composites that were assumed to stay the same."""

    def __init__(self, at: Sequence[int]):
        super().__init__(at)
        self.at = at


class _Returned:
    """The outputs of bodies as arrays; remembers which of them are inputs that are Composites."""

    def __init__(self) -> None:
        self.inputs: dict[int, set[int | None]] = {}  # output -> inputs; None: a Composite that is no input
        self.composites: dict[int, Composite] = {}

    def arrays(self, outs: Sequence[Value], given: Sequence[Value]) -> list[Value]:
        at_input = {id(x): at for at, x in enumerate(given) if isinstance(x, Composite)}
        for at, x in enumerate(outs):
            self.inputs.setdefault(at, set()).add(at_input.get(id(x)))
            if isinstance(x, Composite):
                self.composites[at] = x
        return [whole(x) for x in outs]


class _Carry(NamedTuple):
    """The variables of a loop. Composites are not variables of the new loop, as no iteration may change them."""

    start: Sequence[Value]
    array: Callable[[Value], ArrayLike]

    def changing(self) -> list[Value]:
        return [x for x in self.start if not isinstance(x, Composite)]

    def all(self, changing: Sequence[Value]) -> list[Value]:
        """All variables, with the current values of the changing ones."""
        current = iter(changing)
        return [x if isinstance(x, Composite) else next(current) for x in self.start]

    def after(self, outs: Sequence[Value]) -> list[Value]:
        """The changing variables after an iteration; raises _Changed if it changed others."""
        pairs = [*zip(self.start, outs, strict=True)]
        if changed := [at for at, (x, out) in enumerate(pairs) if isinstance(x, Composite) and out is not x]:
            raise _Changed(changed)
        return [self.array(out) for x, out in pairs if not isinstance(x, Composite)]


class _Rewriting(NamedTuple):
    rule: Rule
    touches: Touches
    constant: Callable[[ArrayLike], ArrayLike]
    lost: Lost

    def run(self, program: Program, values: Sequence[Value]) -> list[Value]:
        env = {v: self.constant(x) for v, x in program.consts.items()} | dict(zip(program.inputs, values, strict=True))
        read = lambda atom: env[atom] if is_var(atom) else self.constant(atom.val)  # noqa: E731
        for eqn in program.eqns:
            env.update(zip(eqn.outvars, self.outputs(eqn, [*map(read, eqn.invars)]), strict=True))
        return [*map(read, program.outputs)]

    def outputs(self, eqn: Eqn, values: list[Value]) -> Sequence[Value]:
        name = eqn.primitive.name
        if self.touches(eqn, values):
            with in_source_of(eqn), _mesh_of(eqn):
                if (outs := self.rule(eqn, values)) is not None:
                    return outs
                if name in _OPENED and not (name in _OF_ARRAYS and has_composite(eqn, values)):
                    return _OPENED[name](self, eqn, values)
        return evaluate(eqn, [self.array(eqn, x) for x in values])

    def array(self, eqn: Eqn, x: Value) -> ArrayLike:
        if isinstance(x, Composite):
            self.lost(eqn, x)
        return whole(x)

    def restored(self, eqn: Eqn, values: Sequence[Value], outs: Sequence[Value], returned: _Returned) -> list[Value]:
        """`outs`, with the Composites among the inputs that the bodies of an equation return unchanged."""
        result = [*outs]
        for at, composite in returned.composites.items():
            first, *others = returned.inputs[at]
            if first is None or others:
                self.lost(eqn, composite)
            else:
                result[at] = values[first]
        return result

    def jit(self, eqn: Eqn, values: list[Value]) -> list[Value]:
        return self.run(body(eqn), values)

    def remat(self, eqn: Eqn, values: list[Value]) -> list[Value]:
        """With all parameters of the equation, some of which `jax.checkpoint` does not take."""
        program, returned = body(eqn), _Returned()
        closed = jax.make_jaxpr(lambda *given: returned.arrays(self.run(program, given), given))(*values)
        inputs = [*closed.jaxpr.constvars, *closed.jaxpr.invars]
        jaxpr = closed.jaxpr.replace(constvars=[], invars=inputs, debug_info=empty_debug_info())
        outs = eqn.primitive.bind(*closed.consts, *jax.tree.leaves(values), **{**eqn.params, "jaxpr": jaxpr})
        return self.restored(eqn, values, outs, returned)

    def custom(self, eqn: Eqn, values: list[Value]) -> list[Value]:
        program = body(eqn)
        closed = jax.make_jaxpr(lambda *given: self.run(program, given))(*values)
        return evaluate(eqn.replace(params={**eqn.params, "call_jaxpr": closed}), values)

    def shard_map(self, eqn: Eqn, values: list[Value]) -> list[Value]:
        program = body(eqn)
        return [*jax.shard_map(lambda *given: tuple(self.run(program, given)), **shard_map_options(eqn))(*values)]

    def cond(self, eqn: Eqn, values: list[Value]) -> list[Value]:
        returned = _Returned()

        def call(branch: Program) -> Callable[..., list[Value]]:
            return lambda *given: returned.arrays(self.run(branch, given), [values[0], *given])

        index, *operands = values
        outs = jax.lax.switch(self.array(eqn, index), [call(branch) for branch in branches(eqn)], *operands)
        return self.restored(eqn, values, outs, returned)

    def scan(self, eqn: Eqn, values: list[Value]) -> list[Value]:
        parts, returned = scan_parts(eqn), _Returned()
        consts, start, rows = parts.inputs(values)
        scanned = [(x.scanned() or self.array(eqn, x)) if isinstance(x, Composite) else x for x in rows]

        def loop(carry: _Carry) -> tuple[Sequence[Value], Sequence[Value]]:
            def step(changing: list[Value], rows: list[Value]) -> tuple[list[Value], list[Value]]:
                after, stacked = parts.outputs(self.run(parts.body, [*consts, *carry.all(changing), *rows]))
                return carry.after(after), returned.arrays(stacked, rows)

            return jax.lax.scan(step, carry.changing(), scanned, **parts.options)

        after, stacked = self.repeat(eqn, start, loop)
        return [*after, *self.restored(eqn, rows, stacked, returned)]

    def while_(self, eqn: Eqn, values: list[Value]) -> list[Value]:
        parts = while_parts(eqn)
        of_test, of_body, start = parts.inputs(values)

        def loop(carry: _Carry) -> tuple[Sequence[Value], Sequence[Value]]:
            after = jax.lax.while_loop(
                lambda changing: self.run(parts.test, [*of_test, *carry.all(changing)])[0],
                lambda changing: carry.after(self.run(parts.body, [*of_body, *carry.all(changing)])),
                carry.changing(),
            )
            return after, []

        return self.repeat(eqn, start, loop)[0]

    def repeat(
        self, eqn: Eqn, start: Sequence[Value], loop: Callable[[_Carry], tuple[Sequence[Value], Sequence[Value]]]
    ) -> tuple[list[Value], Sequence[Value]]:
        """(loop variables, other results) after a loop. Composites that it changes are arrays in its last trace."""
        start = [*start]
        while True:
            carry = _Carry(start, lambda x: self.array(eqn, x))
            try:
                after, others = loop(carry)
            except _Changed as changed:
                for at in changed.at:
                    start[at] = self.array(eqn, start[at])
            else:
                return carry.all(after), others


_OPENED: dict[str, Callable[[_Rewriting, Eqn, list[Value]], list[Value]]] = {
    **dict.fromkeys(JIT, _Rewriting.jit),
    **dict.fromkeys(REMAT, _Rewriting.remat),
    **dict.fromkeys(CUSTOM, _Rewriting.custom),
    SHARD_MAP: _Rewriting.shard_map,
    COND: _Rewriting.cond,
    SCAN: _Rewriting.scan,
    WHILE: _Rewriting.while_,
}
_OF_ARRAYS = (*CUSTOM, SHARD_MAP)  # their bodies take no Composites
