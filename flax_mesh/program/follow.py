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
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from flax_mesh.program.program import SCAN, SHARD_MAP, WHILE, Eqn, Program, Var, bodies, bodies_of, is_var

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


def follow_equation(eqn: Eqn, given: Sequence[T], rules: Rules[T]) -> Sequence[T]:
    """The facts of the outputs of one equation."""
    return _Walk(rules).results((), eqn, given)


class _Walk(Generic[T]):
    def __init__(self, rules: Rules[T]):
        self.rules = rules
        self.known: dict[BodyPath, dict[Var, T]] = {}
        self.carries: dict[BodyPath, list[T]] = {}

    def run(self, path: BodyPath, program: Program, given: Sequence[T]) -> list[T]:
        """The facts of the outputs of a program or of a body."""
        known = {v: self.rules.constant(x) for v, x in program.consts.items()}
        known |= zip(program.inputs, given, strict=True)
        self.known[path] = known

        def read(atoms: Iterable[Any]) -> list[T]:
            return [known.get(x, self.rules.unknown) if is_var(x) else self.rules.constant(x.val) for x in atoms]

        for eqn in program.eqns:
            known |= zip(eqn.outvars, self.results(path, eqn, read(eqn.invars)), strict=True)
        return read(program.outputs)

    def results(self, path: BodyPath, eqn: Eqn, facts: Sequence[T]) -> Sequence[T]:
        name, rules, inner = eqn.primitive.name, self.rules, bodies_of(eqn)
        if not inner.all or not rules.opens(eqn, facts):
            return rules.through(eqn, facts)
        given = [rules.part(eqn, x) if n in inner.rows else x for n, x in enumerate(facts)]
        # What an earlier walk found of this loop, which is in another one, still holds: the facts given only get fewer.
        carry = self.carries.get((*path, (id(eqn), 0)), [])
        known = [rules.join(given[at], x) for at, x in zip(inner.carry, carry, strict=False)]
        while True:
            for at, x in zip(inner.carry, known, strict=False):
                given[at] = x
            sides = [
                self.run((*path, (id(eqn), n)), program, [given[i] for i in at])
                for n, (program, at) in enumerate(inner.all)
            ]
            by = sides.pop() if name == WHILE else [facts[at] for at in inner.chooses]
            outs = [functools.reduce(rules.join, each) for each in zip(*sides, strict=True)]
            known = [rules.join(given[at], x) for at, x in zip(inner.carry, outs, strict=False)]
            if known == [given[at] for at in inner.carry]:
                break
        self.carries[(*path, (id(eqn), 0))] = known
        if name in (SCAN, SHARD_MAP):
            outs = [rules.whole(eqn, x) for x in outs]
        outs[: len(known)] = known
        return [rules.chosen(by[0], x) for x in outs] if by else outs


def all_equations(eqns: Iterable[Eqn]) -> Iterator[Eqn]:
    """The equations and those in their bodies, for a search."""
    for eqn in eqns:
        yield eqn
        for inner in bodies(eqn):
            yield from all_equations(inner.eqns)


DEPENDS = "depends"  # see `Flow`


class _Row(NamedTuple):
    """In the body of a scan: the current row of the scanned input `value`."""

    scan: int
    value: Hashable


class Flow(Rules[Hashable]):
    """None: does not depend on the inputs; DEPENDS; or the name of an input, which has the same value.

    Values with zero gradients, such as results of comparisons, count as dependent too.
    """

    unknown = None

    def through(self, eqn: Eqn, facts: Sequence[Hashable]) -> Sequence[Hashable]:
        return [DEPENDS if self.opens(eqn, facts) else None] * len(eqn.outvars)

    def join(self, a: Hashable, b: Hashable) -> Hashable:
        return a if a == b else DEPENDS

    def part(self, eqn: Eqn, fact: Hashable) -> Hashable:
        return fact if fact in (None, DEPENDS) else _Row(id(eqn), fact)

    def whole(self, eqn: Eqn, fact: Hashable) -> Hashable:
        """A scan that returns the rows of an input returns that input."""
        if isinstance(fact, _Row) and fact.scan == id(eqn) and eqn.primitive.name == SCAN:
            return fact.value
        return None if fact is None else DEPENDS

    def chosen(self, by: Hashable, fact: Hashable) -> Hashable:
        return DEPENDS if fact is None and by is not None else fact

    def opens(self, eqn: Eqn, facts: Sequence[Hashable]) -> bool:
        return any(fact is not None for fact in facts)
