"""Evaluates equations with bodies: jit, remat, loops, branches, parts of devices, functions with custom derivatives.

Most values are arrays. A `Composite` stands for an array, and is more than it: a weight with its adapter, for example.
Bodies are traced by JAX, and take and return arrays, so a Composite travels through them as follows:

    a constant, an operand of a branch         the same Composite in the body
    a scanned input                            `Composite.scanned()`, of which the body sees a row
    a loop variable that no iteration changes  the same Composite in the body, and after the loop
    an output that is an unchanged input       the Composite that is this input

Everywhere else it is the array `Composite.whole()`, and `lost(eqn, composite)` is called first.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
from jax.sharding import Sharding
from jax.typing import ArrayLike

from flax_mesh.jax_compat import empty_debug_info, evaluate
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
from flax_mesh.program.program import Eqn, Program


class Composite(ABC):
    """A value that stands for an array. It must be a pytree of arrays."""

    @abstractmethod
    def whole(self) -> jax.Array:
        """The array."""

    def scanned(self) -> "Composite | None":
        """The value as an input of a scan, which takes a row of each of its arrays; None: it cannot be scanned."""
        return None


Value: TypeAlias = ArrayLike | Composite
Lost: TypeAlias = Callable[[Eqn, Composite], None]
Call: TypeAlias = Callable[[int, Program, Sequence[Value]], Sequence[Value]]


def has_composite(eqn: Eqn, values: Sequence[Value]) -> bool:
    """Whether one of the values is a Composite, for `touches`."""
    return any(isinstance(x, Composite) for x in values)


def whole(x: Value) -> ArrayLike:
    """The array of a Composite; any other value as it is."""
    return x.whole() if isinstance(x, Composite) else x


def can_open(eqn: Eqn, values: Sequence[Value]) -> bool:
    """Whether `open_bodies` evaluates the bodies of an equation for these values."""
    name = eqn.primitive.name
    return name in _KINDS and not (name in (*CUSTOM, SHARD_MAP) and has_composite(eqn, values))


def open_bodies(eqn: Eqn, values: Sequence[Value], call: Call, lost: Lost) -> list[Value]:
    """The outputs of an equation whose bodies are evaluated by `call(number, body, values)`.

    The number is the one of a branch, 1 for the test of a while, and otherwise 0. A value that `call` does not need may
    be None, unless it is a variable of a loop. A jit without shardings is inlined.
    """
    return _KINDS[eqn.primitive.name](_Opening(eqn, call, lost), [*values])


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


class _Opening(NamedTuple):
    eqn: Eqn
    call: Call
    lost: Lost

    def array(self, x: Value) -> ArrayLike:
        if isinstance(x, Composite):
            self.lost(self.eqn, x)
        return whole(x)

    def restored(self, values: Sequence[Value], outs: Sequence[Value], returned: _Returned) -> list[Value]:
        """`outs`, with the Composites among the inputs that the bodies of an equation return unchanged."""
        result = [*outs]
        for at, composite in returned.composites.items():
            first, *others = [None if n is None else values[n] for n in returned.inputs[at]]
            if first is None or any(x is not first for x in others):
                self.lost(self.eqn, composite)
            else:
                result[at] = first
        return result

    def jit(self, values: list[Value]) -> list[Value]:
        """Inlined, unless it has shardings, which are constraints."""
        program, params = body(self.eqn), self.eqn.params
        shardings = [*params.get("in_shardings", ()), *params.get("out_shardings", ())]
        if not any(isinstance(x, Sharding) for x in shardings) or has_composite(self.eqn, values):
            return [*self.call(0, program, values)]
        closed = jax.make_jaxpr(lambda *given: self.call(0, program, given))(*values)
        return evaluate(self.eqn.replace(params={**params, "jaxpr": closed}), values)

    def remat(self, values: list[Value]) -> list[Value]:
        """With all parameters of the equation, some of which `jax.checkpoint` does not take."""
        program, returned = body(self.eqn), _Returned()
        closed = jax.make_jaxpr(lambda *given: returned.arrays(self.call(0, program, given), given))(*values)
        inputs = [*closed.jaxpr.constvars, *closed.jaxpr.invars]
        jaxpr = closed.jaxpr.replace(constvars=[], invars=inputs, debug_info=empty_debug_info())
        params = {**self.eqn.params, "jaxpr": jaxpr}
        if isinstance(flags := params["prevent_cse"], tuple):  # one flag per input
            given = tuple(flag for flag, x in zip(flags, values, strict=True) for _ in jax.tree.leaves(x))
            params["prevent_cse"] = any(flags) if closed.consts else given
        outs = self.eqn.primitive.bind(*closed.consts, *jax.tree.leaves(values), **params)
        return self.restored(values, outs, returned)

    def custom(self, values: list[Value]) -> list[Value]:
        program = body(self.eqn)
        closed = jax.make_jaxpr(lambda *given: self.call(0, program, given))(*values)
        return evaluate(self.eqn.replace(params={**self.eqn.params, "call_jaxpr": closed}), values)

    def shard_map(self, values: list[Value]) -> list[Value]:
        program = body(self.eqn)
        local = lambda *given: tuple(self.call(0, program, given))  # noqa: E731
        return [*jax.shard_map(local, **shard_map_options(self.eqn))(*values)]

    def cond(self, values: list[Value]) -> list[Value]:
        returned = _Returned()

        def evaluated(number: int, branch: Program) -> Callable[..., list[Value]]:
            return lambda *given: returned.arrays(self.call(number, branch, given), [values[0], *given])

        index, *operands = values
        calls = [evaluated(number, branch) for number, branch in enumerate(branches(self.eqn))]
        if platforms := self.eqn.params.get("branches_platforms"):  # only the branch of the platform compiles
            pairs = [*zip(platforms, calls, strict=True)]
            default = next((call for names, call in pairs if names is None), None)
            named = {name: call for names, call in pairs for name in names or ()}
            outs = jax.lax.platform_dependent(*operands, default=default, **named)
        else:
            outs = jax.lax.switch(self.array(index), calls, *operands)
        return self.restored(values, outs, returned)

    def scan(self, values: list[Value]) -> list[Value]:
        parts, returned = scan_parts(self.eqn), _Returned()
        consts, start, rows = parts.inputs(values)
        scanned = [(x.scanned() or self.array(x)) if isinstance(x, Composite) else x for x in rows]

        def loop(carry: _Carry) -> tuple[Sequence[Value], Sequence[Value]]:
            def step(changing: list[Value], rows: list[Value]) -> tuple[list[Value], list[Value]]:
                after, stacked = parts.outputs(self.call(0, parts.body, [*consts, *carry.all(changing), *rows]))
                return carry.after(after), returned.arrays(stacked, rows)

            return jax.lax.scan(step, carry.changing(), scanned, **parts.options)

        after, stacked = self.repeat(start, loop)
        return [*after, *self.restored(rows, stacked, returned)]

    def while_(self, values: list[Value]) -> list[Value]:
        parts = while_parts(self.eqn)
        of_test, of_body, start = parts.inputs(values)

        def loop(carry: _Carry) -> tuple[Sequence[Value], Sequence[Value]]:
            after = jax.lax.while_loop(
                lambda changing: self.call(1, parts.test, [*of_test, *carry.all(changing)])[0],
                lambda changing: carry.after(self.call(0, parts.body, [*of_body, *carry.all(changing)])),
                carry.changing(),
            )
            return after, []

        return self.repeat(start, loop)[0]

    def repeat(
        self, start: Sequence[Value], loop: Callable[[_Carry], tuple[Sequence[Value], Sequence[Value]]]
    ) -> tuple[list[Value], Sequence[Value]]:
        """(loop variables, other results) after a loop. Composites that it changes are arrays in its last trace."""
        start = [*start]
        while True:
            carry = _Carry(start, self.array)
            try:
                after, others = loop(carry)
            except _Changed as changed:
                for at in changed.at:
                    start[at] = self.array(start[at])
            else:
                return carry.all(after), others


_KINDS: dict[str, Callable[[_Opening, list[Value]], list[Value]]] = {
    **dict.fromkeys(JIT, _Opening.jit),
    **dict.fromkeys(REMAT, _Opening.remat),
    **dict.fromkeys(CUSTOM, _Opening.custom),
    SHARD_MAP: _Opening.shard_map,
    COND: _Opening.cond,
    SCAN: _Opening.scan,
    WHILE: _Opening.while_,
}
