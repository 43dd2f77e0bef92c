"""What is kept of one half of a stage for the next: the fewest bytes from which it can make what it takes, cheaply.

As in the min-cut rematerialisation of functorch (He and Chen 2022), but that matrix products, loops, random bits and
exchanges between devices are never repeated: gradients have the numbers that they would have had.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from flax_mesh.mpmd.crossing import cheapest_cut, to_make
from flax_mesh.mpmd.cut import EXPENSIVE, is_expensive
from flax_mesh.mpmd.jaxprs import ELEMENTWISE, Eqn, Program, Var, num_bytes, variables

STORED = EXPENSIVE | {"random_bits", "threefry2x32"}
CONSTRAINT = "sharding_constraint"


def fewest_bytes(
    whole: Program, taken: Sequence[Var], num_given: int, maker: Mapping[Var, int], held: set[Var]
) -> tuple[list[Var], set[int]]:
    """What a slice of `whole` takes of earlier ones to have `taken`, and the equations that it runs again for it.

    The inputs of the stage are there in every slice, so that casts of weights, masks and what follows from the inputs
    cheaply need not be kept for every microbatch in flight. The first `num_given` are leaves and the batch. `maker`
    has the slice that makes each value, `held` what a slice before takes: another value of slice 0 is kept twice as
    long as one of those.
    """
    producer = {v: i for i, eqn in enumerate(whole.eqns) for v in eqn.outvars}
    repeatable = _repeatable(whole, num_given)

    def parents(v: Var) -> list[Var] | None:
        if v not in producer:
            return []
        return variables(whole.eqns[producer[v]].invars) if producer[v] in repeatable else None

    def weight(v: Var) -> int | None:
        times = 2 if held and maker.get(v) == 0 and v not in held else 1
        return times * num_bytes(v.aval) if v in maker else None

    chosen = cheapest_cut(taken, parents, weight)
    again = {producer[v] for v in to_make(taken, chosen, parents) if v in producer}
    return [v for i in sorted({producer[v] for v in chosen}) for v in whole.eqns[i].outvars if v in chosen], again


def _repeatable(whole: Program, num_given: int) -> set[int]:
    """Equations that are cheap. One that changes a layout that is known is not: devices exchange something for it, as
    they do anyway for leaves and the batch."""
    found: set[int] = set()
    given = {*whole.inputs[:num_given], *whole.consts}  # and what follows from them
    layouts: dict[Var, Any] = {}
    for i, eqn in enumerate(whole.eqns):
        inputs = variables(eqn.invars)
        is_given, layout = given.issuperset(inputs), _layout(eqn, layouts)
        moves = eqn.primitive.name == CONSTRAINT and layouts.get(inputs[0], layout) != layout and not is_given
        if not (moves or eqn.effects or is_expensive(eqn, STORED)):
            found.add(i)
            given |= set(eqn.outvars) if is_given else set()
        if layout is not None:
            layouts |= dict.fromkeys(eqn.outvars, layout)
    return found


def _layout(eqn: Eqn, layouts: Mapping[Var, Any]) -> Any:
    """The sharding of the result of an equation, as far as constraints say; else None."""
    if eqn.primitive.name == CONSTRAINT:
        return eqn.params["sharding"]
    if eqn.primitive.name not in ELEMENTWISE:
        return None
    shape = eqn.outvars[0].aval.shape
    found = {layouts.get(v) for v in variables(eqn.invars) if v.aval.shape == shape}
    return found.pop() if len(found) == 1 else None
