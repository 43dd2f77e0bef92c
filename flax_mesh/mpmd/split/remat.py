"""What is kept of one half of a stage for the next: the fewest bytes from which it can make what it takes, cheaply.

As in the min-cut rematerialisation of functorch (He and Chen 2022), but that matrix products, loops, random bits and
exchanges between devices are never repeated: gradients have the numbers that they would have had.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from flax_mesh.mpmd.split.assign import EXPENSIVE, is_expensive
from flax_mesh.mpmd.split.jaxpr import ELEMENTWISE, Program, Var, num_bytes, variables
from flax_mesh.mpmd.split.min_cut import minimum_cut, recomputed

# What B recomputes. "none": operations of about one instruction per element; "cheap": all but STORED; "full": the
# stage.
REMAT_MODES = ("none", "cheap", "full")
STORED = EXPENSIVE | {"random_bits", "threefry2x32"}
CONSTRAINT = "sharding_constraint"
# At most one instruction an element: no function such as exp, no division, no sum.
FREE = frozenset(
    """abs add add_any and broadcast_in_dim ceil clamp concatenate convert_element_type copy eq expand_dims floor ge gt
    iota is_finite le lt max min mul ne neg not or pad real reduce_precision reshape rev round select_n
    sharding_constraint sign slice split square squeeze stop_gradient sub transpose xor""".split()  # noqa: SIM905
)


def fewest_bytes(
    whole: Program, taken: Sequence[Var], repeatable: set[int], maker: Mapping[Var, int], held: set[Var]
) -> tuple[list[Var], set[int]]:
    """What a slice of `whole` takes of earlier ones to have `taken`, and the equations that it runs again for it.

    The inputs of the stage are there in every slice, so that casts of weights, masks and what follows from the inputs
    freely need not be kept for every microbatch in flight. `maker` has the slice that makes each value, `held` what a
    slice before takes: another value of slice 0 is kept twice as long as one of those.
    """
    producer = {v: i for i, eqn in enumerate(whole.eqns) for v in eqn.outvars}

    def parents(v: Var) -> list[Var] | None:
        if v not in producer:
            return []
        return variables(whole.eqns[producer[v]].invars) if producer[v] in repeatable else None

    def weight(v: Var) -> int | None:
        times = 2 if held and maker.get(v) == 0 and v not in held else 1
        return times * num_bytes(v.aval) if v in maker else None

    chosen = minimum_cut(taken, parents, weight)
    again = {producer[v] for v in recomputed(taken, chosen, parents) if v in producer}
    return [v for i in sorted({producer[v] for v in chosen}) for v in whole.eqns[i].outvars if v in chosen], again


def find_repeatable(whole: Program, num_given: int, *, cheap: bool) -> set[int]:
    """Equations that a later slice may run again: free ones, and cheap ones if `cheap`, or if they follow from the
    first `num_given` inputs alone, leaves and the batch. One that changes a known layout is neither, because devices
    exchange something for it; they do so anyway for leaves and the batch."""
    found: set[int] = set()
    given = {*whole.inputs[:num_given], *whole.consts}  # and what follows from them
    layouts: dict[Var, Any] = {}
    for i, eqn in enumerate(whole.eqns):
        inputs, name = variables(eqn.invars), eqn.primitive.name
        is_given, layout = given.issuperset(inputs), _layout(eqn, layouts)
        moves = name == CONSTRAINT and layouts.get(inputs[0], layout) != layout
        may = is_given or (not moves and (cheap or name in FREE))
        if may and not eqn.effects and not is_expensive(eqn, STORED):
            found.add(i)
            given |= set(eqn.outvars) if is_given else set()
        if layout is not None:
            layouts |= dict.fromkeys(eqn.outvars, layout)
    return found


def _layout(eqn: Any, layouts: Mapping[Var, Any]) -> Any:
    """The sharding of the result of an equation, as far as constraints say; else None."""
    if eqn.primitive.name == CONSTRAINT:
        return eqn.params["sharding"]
    if eqn.primitive.name not in ELEMENTWISE:
        return None
    shape = eqn.outvars[0].aval.shape
    found = {layouts.get(v) for v in variables(eqn.invars) if v.aval.shape == shape}
    return found.pop() if len(found) == 1 else None
