"""Facts about the values of a traced program: one walk through its equations and the bodies of all kinds of them.

A fact is any value of yours that says something about an array, such as "it is zero" or "dim 0 is split over data".
You give the facts of the inputs and `Rules`; `follow` returns the facts of everything that is computed from them.

    equation                          its bodies are walked                    facts of the results
    jit, remat, custom derivatives    once                                     as the body returns them
    shard_map                         once, on `part` of the inputs            `whole` of the body's results
    scan                              until the facts of the carry stay,       the carry; `whole` of the rows
                                      with `part` of the scanned inputs
    while                             until the facts of the carry stay        `chosen` by the test
    cond                              every branch once                        the branches by `join`, `chosen` by index
    any other                         not at all                               `through`
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from flax_mesh.program import equations as views
from flax_mesh.program.equations import CALLS, COND, SCAN, SHARD_MAP, WHILE
from flax_mesh.program.program import Eqn, Program, Var, is_var

T = TypeVar("T")
# Where a value is computed: for every body around it, the id of its equation and the number of the body.
BodyPath: TypeAlias = tuple[tuple[int, int], ...]


class Rules(ABC, Generic[T]):
    """What operations do to facts. Override what differs; every loop ends if `join` forgets a finite number of times.

    `unknown` is the fact of values about which nothing is given.
    """

    unknown: T

    @abstractmethod
    def through(self, eqn: Eqn, facts: Sequence[T]) -> Sequence[T]:
        """The facts of the results of an equation that is not opened."""

    @abstractmethod
    def join(self, a: T, b: T) -> T:
        """The fact of a value that has one of two facts: of a branch, or before and after an iteration."""

    def constant(self, value: object) -> T:
        """The fact of a number in the program, or of an array that it closes over."""
        return self.unknown

    def part(self, eqn: Eqn, fact: T) -> T:
        """The fact of a row of a scanned input, or of the part of an input that one device has."""
        return fact

    def whole(self, eqn: Eqn, fact: T) -> T:
        """The fact of a result that consists of such rows or parts."""
        return fact

    def chosen(self, by: T, fact: T) -> T:
        """The fact of a result of a branch or of a loop, if a value with the fact `by` decides which or how often."""
        return fact

    def opens(self, eqn: Eqn, facts: Sequence[T]) -> bool:
        """Whether the bodies of an equation are walked. Otherwise `through` has the facts of its results."""
        return True


class Facts(NamedTuple, Generic[T]):
    outputs: list[T]
    known: Mapping[BodyPath, Mapping[Var, T]]
    unknown: T

    def of(self, atom: Any, path: BodyPath = ()) -> T:
        """The fact of a variable of the program, or of the body at `path`."""
        return self.known.get(path, {}).get(atom, self.unknown) if is_var(atom) else self.unknown


def follow(program: Program, given: Sequence[T], rules: Rules[T]) -> Facts[T]:
    """The facts of all values of `program`, from those `given` of its inputs."""
    walk = _Walk(rules)
    return Facts(walk.run((), program, given), walk.known, rules.unknown)


class _Walk(Generic[T]):
    def __init__(self, rules: Rules[T]):
        self.rules = rules
        self.known: dict[BodyPath, dict[Var, T]] = {}

    def run(self, path: BodyPath, program: Program, given: Sequence[T]) -> list[T]:
        """The facts of the outputs of a program or of a body."""
        known = {v: self.rules.constant(x) for v, x in program.consts.items()}
        known |= zip(program.inputs, given, strict=True)
        self.known[path] = known

        def read(atoms: Iterable[Any]) -> list[T]:
            return [known.get(x, self.rules.unknown) if is_var(x) else self.rules.constant(x.val) for x in atoms]

        for eqn in program.eqns:
            known |= zip(eqn.outvars, self._results(path, eqn, read(eqn.invars)), strict=True)
        return read(program.outputs)

    def _results(self, path: BodyPath, eqn: Eqn, facts: list[T]) -> Sequence[T]:
        name, rules = eqn.primitive.name, self.rules
        if name not in (*CALLS, COND, SCAN, SHARD_MAP, WHILE) or not rules.opens(eqn, facts):
            return rules.through(eqn, facts)

        def inside(program: Program, given: Sequence[T], number: int = 0) -> list[T]:
            return self.run((*path, (id(eqn), number)), program, given)

        if name == SCAN:
            scan = views.scan_parts(eqn)
            consts, carry, xs = scan.inputs(facts)
            rows = [rules.part(eqn, x) for x in xs]
            outs = self._repeated(carry, lambda carry: inside(scan.body, [*consts, *carry, *rows]))
            carry, ys = scan.outputs(outs)
            return [*carry, *(rules.whole(eqn, y) for y in ys)]
        if name == WHILE:
            loop = views.while_parts(eqn)
            of_test, consts, carry = loop.inputs(facts)
            carry = self._repeated(carry, lambda carry: inside(loop.body, [*consts, *carry]))
            (test,) = inside(loop.test, [*of_test, *carry], 1)
            return [rules.chosen(test, x) for x in carry]
        if name == COND:
            index, *values = facts
            sides = [inside(branch, values, n) for n, branch in enumerate(views.branches(eqn))]
            return [rules.chosen(index, functools.reduce(rules.join, each)) for each in zip(*sides, strict=True)]
        if name == SHARD_MAP:
            outs = inside(views.body(eqn), [rules.part(eqn, x) for x in facts])
            return [rules.whole(eqn, x) for x in outs]
        return inside(views.body(eqn), facts)

    def _repeated(self, carry: list[T], iteration: Callable[[list[T]], list[T]]) -> list[T]:
        """The facts of the carry after any number of iterations, and of the other results of the last one."""
        while True:
            outs = iteration(carry)
            after = [self.rules.join(a, b) for a, b in zip(carry, outs, strict=False)]
            if after == carry:
                return [*carry, *outs[len(carry) :]]
            carry = after


def all_equations(eqns: Iterable[Eqn]) -> Iterator[Eqn]:
    """The equations and those in their bodies, for a search."""
    for eqn in eqns:
        yield eqn
        for inner in views.bodies(eqn):
            yield from all_equations(inner.eqns)
