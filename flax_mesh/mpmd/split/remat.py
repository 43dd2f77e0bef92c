"""Chooses the residuals that one slice of a stage (F or B) stores for the next: a minimum cut in bytes.

This is the min-cut rematerialization of functorch (He and Chen 2022), except that matrix products, loops, random bits
and communication between devices are never repeated, unless remat="full".

Example: softplus after a matrix product in bfloat16, y = log(1 + exp(x @ w)). B multiplies the cotangent by e / p.

    x --- @ w ---> h -----> f -----> e -----> p -----> y
                 bf16      f32      f32      f32
                         float32   exp(f)   e + 1    log(p)
                                     |        |
                                     +--------+-----> required by B

    remat       stored   bytes per element   recomputed in B
    "none"      e        4                   p: one instruction per element. exp(f) is not, so h is not enough
    "cheap"     h        2                   f, e, p
    "full"      nothing  0                   h, f, e, p

Automatic differentiation alone would store e and p, 8 bytes. x and w are inputs of the stage, which B always has.
"""

from collections.abc import Mapping, Sequence

from jax.sharding import Sharding

from flax_mesh.mpmd.chunks import ELEMENTWISE
from flax_mesh.mpmd.split.assign import EXPENSIVE, is_expensive
from flax_mesh.mpmd.split.min_cut import minimum_cut, recomputed
from flax_mesh.program.program import Eqn, Program, Var, variables
from flax_mesh.tree import num_bytes

# The part of F that B recomputes. "none": operations of about one instruction per element; "cheap": all except STORED;
# "full": the entire stage.
STORED = EXPENSIVE | {"random_bits", "random_gamma", "threefry2x32"}
CONSTRAINT, RESHARD = "sharding_constraint", "reshard"  # on Auto axes, on Explicit axes
# At most one instruction per element: no functions such as exp, no divisions, no reductions.
FREE = frozenset(
    """abs add add_any and broadcast_in_dim ceil clamp concatenate convert_element_type copy eq floor ge gt iota
    is_finite le lt max min mul name ne neg not one_minus_square or pad real reduce_precision reshape reshard rev round
    select_n sharding_constraint sign slice split square squeeze stop_gradient sub transpose xor""".split()  # noqa: SIM905
)


def choose_residuals(
    program: Program, required: Sequence[Var], repeatable: set[int], slice_of: Mapping[Var, int], stored: set[Var]
) -> tuple[list[Var], set[int]]:
    """Returns (values that a slice takes from earlier slices, equations that it repeats to compute `required`).

    The inputs of the stage are available in every slice. Casts of weights, masks and other cheap functions of the
    inputs are therefore not stored for every microbatch in flight. `slice_of` is the slice that computes each value;
    `stored` contains the values that an earlier slice takes.
    """
    producer = {v: i for i, eqn in enumerate(program.eqns) for v in eqn.outvars}

    def parents(v: Var) -> list[Var] | None:
        if v not in producer:
            return []
        return variables(program.eqns[producer[v]].invars) if producer[v] in repeatable else None

    def weight(v: Var) -> int | None:
        # Bytes times duration. For W, a value of F that B does not take is stored twice as long (F to B to W) as a
        # value that B computes, or that is stored until B in any case.
        duration = 2 if stored and slice_of.get(v) == 0 and v not in stored else 1
        return duration * num_bytes(v.aval) if v in slice_of else None

    chosen = minimum_cut(required, parents, weight)
    residuals = [v for i in sorted({producer[v] for v in chosen}) for v in program.eqns[i].outvars if v in chosen]
    return residuals, {producer[v] for v in recomputed(required, chosen, parents) if v in producer}


def find_repeatable(program: Program, num_given: int, *, cheap: bool) -> set[int]:
    """Equations that a later slice may repeat: those in FREE, and with `cheap` all except STORED.

    Equations that depend only on the first `num_given` inputs, leaves of the model and the batch, may be repeated
    unless they are in STORED. Any other equation that changes a known layout is not repeated, because it communicates
    between devices.
    """
    repeatable: set[int] = set()
    given = {*program.inputs[:num_given], *program.consts}  # and everything computed from them alone
    layouts: dict[Var, Sharding] = {}
    for i, eqn in enumerate(program.eqns):
        inputs, name = variables(eqn.invars), eqn.primitive.name
        is_given, layout = given.issuperset(inputs), _layout(eqn, layouts)
        changes_layout = name == CONSTRAINT and layouts.get(next(iter(inputs), None), layout) != layout
        changes_layout |= name == RESHARD and eqn.invars[0].aval.sharding != eqn.outvars[0].aval.sharding
        allowed = is_given or (not changes_layout and (cheap or name in FREE))
        if allowed and not eqn.effects and not is_expensive(eqn, STORED):
            repeatable.add(i)
            given |= set(eqn.outvars) if is_given else set()
        if layout is not None:
            layouts |= dict.fromkeys(eqn.outvars, layout)
    return repeatable


def _layout(eqn: Eqn, layouts: Mapping[Var, Sharding]) -> Sharding | None:
    """The sharding of the result of an equation as far as sharding constraints define it, else None."""
    if eqn.primitive.name == CONSTRAINT:
        return eqn.params["sharding"]
    if eqn.primitive.name not in ELEMENTWISE:
        return None
    shape = eqn.outvars[0].aval.shape
    candidates = {layouts.get(v) for v in variables(eqn.invars) if v.aval.shape == shape}
    return candidates.pop() if len(candidates) == 1 else None
