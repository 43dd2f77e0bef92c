"""Which outputs of a traced function depend on its inputs, and which outputs are unchanged inputs."""

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from jax.extend import core as jex

from flax_mesh.program.equations import SCAN
from flax_mesh.program.follow import Rules, follow
from flax_mesh.program.program import Eqn, Program

DEPENDS = "depends"


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


def flow(
    eqns: Iterable[Eqn], inputs: Sequence[jex.Var], outputs: Sequence[jex.Var | jex.Literal], given: Sequence[Hashable]
) -> Sequence[Hashable]:
    """The flow of every output, see `Flow`. `given` is None for an input that does not count, else its name."""
    return follow(Program(tuple(eqns), tuple(inputs), tuple(outputs), {}), given, Flow()).outputs
