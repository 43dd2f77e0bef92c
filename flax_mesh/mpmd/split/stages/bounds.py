"""Where the stages begin: the order of the layers, and bounds that balance the costs of the stages."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

from flax_mesh.mpmd.split.assign import OUTSIDE, VARIABLES, CutError, drop_marks, label, settle, stage_programs
from flax_mesh.mpmd.split.split import input_ranks
from flax_mesh.mpmd.split.trace import Forward, Layer, ModelLeaf, frozen_copies
from flax_mesh.program.program import Program, Var, flops, is_var, variables
from flax_mesh.text import bytes_text
from flax_mesh.tree import num_bytes

# The cost of a byte of a stage boundary activation: accelerators compute 400 to 10,000 FLOPs while it is transferred.
_FLOPS_PER_BYTE = 1000


def copies_beside(program: Program, leaves: Sequence[ModelLeaf], ranks: Mapping[Layer, int]) -> dict[str, Layer]:
    """The `frozen_copies`, if they can be computed beside their layers: no equation of a layer waits for a later one.

    A layer that uses the results of a copy on the same batch would otherwise be in the last stage.
    """
    copies = {path: layer for path, layer in frozen_copies(leaves).items() if layer in ranks}
    if not copies:
        return {}
    alone, beside = (label(program, input_ranks(program, leaves, ranks, known), len(ranks)) for known in ({}, copies))
    return copies if all(a in (b, OUTSIDE, VARIABLES) for a, b in zip(alone, beside, strict=True)) else {}


def layer_order(program: Program, layer_of: Mapping[Var, Layer], data: Iterable[Var]) -> list[Layer]:
    """The layers in the order of their first use: the first equation on a layer and the batch.

    Equations on parameters alone are not a use, because a loss may compute the norm of all weights before it calls the
    model. Layers that are never combined with the batch come last.
    """
    mixed = set(data)
    layers: dict[Var, frozenset[Layer]] = {v: frozenset([layer]) for v, layer in layer_of.items()}
    order: dict[Layer, None] = {}
    for eqn in program.eqns:
        inputs = variables(eqn.invars)
        among = frozenset[Layer]().union(*(layers.get(v, ()) for v in inputs))
        if mixed.isdisjoint(inputs):
            layers |= dict.fromkeys(eqn.outvars, among)
        else:
            order |= dict.fromkeys(sorted(among))
            mixed |= set(eqn.outvars)
    used = {layers[v] for eqn in program.eqns for v in eqn.invars if is_var(v) and v in layer_of}
    return list(order | dict.fromkeys(sorted(frozenset[Layer]().union(*used))))


def rank_costs(program: Program, labels: Sequence[int], num_ranks: int) -> list[int]:
    """FLOPs of the forward pass per rank. The first rank includes equations before the layers, the last those after."""
    totals = [0] * num_ranks
    for eqn, rank in zip(program.eqns, labels, strict=True):
        totals[max(rank, 0)] += flops(eqn)
    return totals


def boundary_bytes(opened: Forward, labels: Sequence[int], num_ranks: int) -> list[int]:
    """The bytes that a stage receives for one microbatch if it begins at each rank; 0 for the first.

    The split has one stage per rank.
    """
    program, labels = drop_marks(opened.program, labels)
    program = program._replace(outputs=program.outputs[: len(opened.names)])  # without new values of variables
    is_data = [at >= len(opened.leaves) for at in range(len(program.inputs))]
    settled, targets = settle(program, labels, num_ranks, {})
    stages = stage_programs(program, settled, targets, num_ranks, is_data)
    sender = {v: k for k, stage in enumerate(stages) for v in stage.sent}
    last = {v: k for k, stage in enumerate(stages) for v in stage.received}
    totals = [0] * num_ranks
    for v, end in last.items():
        for rank in range(sender[v] + 1, end + 1):
            totals[rank] += num_bytes(v.aval)
    return totals


def balanced(weights: Sequence[int], num_stages: int, entries: Sequence[int] = ()) -> list[int]:
    """Boundaries [0, ..., len(weights)] of `num_stages` non-empty ranges that minimize the weight of the heaviest one.

    The weight of a range is the sum of its `weights` and the entry of its first rank. Exact, by dynamic programming
    over (stages, layers): best[end] is the minimum for the first `stage` stages when they contain the first `end`
    layers.
    """
    total, entries = [*accumulate(weights, initial=0)], entries or [0] * len(weights)
    best = {0: (0, [0])}
    for stage in range(1, num_stages + 1):
        # Each later stage needs at least one layer, and the last stage must end at the last layer.
        ends = range(stage, len(weights) - (num_stages - stage) + 1) if stage < num_stages else [len(weights)]
        best = {
            end: min(
                (max(heaviest, total[end] - total[start] + entries[start]), [*bounds, end])
                for start, (heaviest, bounds) in best.items()
                if start < end
            )
            for end in ends
        }
    return best[len(weights)][1]


def bounds_of(
    costs: Sequence[int],
    num_stages: int,
    cuts: Sequence[int] | None,
    balance: str,
    measure_boundaries: Callable[[], list[int]],
) -> tuple[tuple[int, ...], str]:
    """(boundaries of the stages, why the stages do not have equal FLOPs)."""
    if cuts is not None:
        bounds = (0, *cuts, len(costs))
        if len(cuts) != num_stages - 1 or any(a >= b for a, b in pairwise(bounds)):
            raise CutError(
                f"cuts={list(cuts)} (in a recipe pipeline.cut) must be {num_stages - 1} increasing numbers between 1 "
                f"and {len(costs) - 1}: the first layer of every stage but the first, of {len(costs)} layers."
            )
        return bounds, ""
    if balance not in ("flops", "count"):
        raise CutError(f"balance must be 'flops' or 'count', got {balance!r}.")
    if balance == "count" or num_stages in (1, len(costs)):
        return tuple(balanced([1] * len(costs), num_stages)), ""
    sizes = measure_boundaries()
    # Bytes that no choice avoids do not count: stages of equal layers are balanced by their FLOPs alone.
    free = 2 * min(sizes[1:], default=0)
    entries = [_FLOPS_PER_BYTE * max(0, size - free) for size in sizes]
    equal, by_bytes = (tuple(balanced(costs, num_stages, x)) for x in ((), entries))
    if by_bytes == equal:
        return by_bytes, ""
    before, after = (bytes_text(sum(sizes[at] for at in bounds[1:-1])) for bounds in (equal, by_bytes))
    return by_bytes, (
        f"cuts={list(by_bytes[1:-1])}: activations of {after} at the boundaries; for equal FLOPs alone, "
        f"cuts={list(equal[1:-1])}: {before}"
    )
