"""Where the stages begin: the order of the layers, and bounds that balance the costs of the stages."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from flax_mesh.mpmd.split import assign as cut
from flax_mesh.mpmd.split.assign import OUTSIDE, VARIABLES, CutError
from flax_mesh.mpmd.split.split import input_ranks
from flax_mesh.mpmd.split.trace import Forward, Layer, ModelLeaf, frozen_copies
from flax_mesh.program.program import Program
from flax_mesh.text import bytes_text


def copies_beside(program: Program, leaves: Sequence[ModelLeaf], ranks: Mapping[Layer, int]) -> dict[str, Layer]:
    """The `frozen_copies`, if they can be computed beside their layers: no equation of a layer waits for a later one.

    A layer that uses the results of a copy on the same batch would otherwise be in the last stage.
    """
    copies = {path: layer for path, layer in frozen_copies(leaves).items() if layer in ranks}
    if not copies:
        return {}
    alone, beside = (
        cut.label(program, input_ranks(program, leaves, ranks, known), len(ranks)) for known in ({}, copies)
    )
    return copies if all(a in (b, OUTSIDE, VARIABLES) for a, b in zip(alone, beside, strict=True)) else {}


def calls_in_order(program: Program, leaves: Sequence[ModelLeaf]) -> list[Layer]:
    """The layers in the order in which the program calls them."""
    layer_of = {v: leaf.layer for v, leaf in zip(program.inputs, leaves, strict=False) if leaf.layer is not None}
    return cut.layer_order(program, layer_of, program.inputs[len(leaves) :])


def boundary_bytes(opened: Forward, labels: Sequence[int], num_ranks: int) -> list[int]:
    """The bytes that a stage receives for one microbatch if it begins at each rank."""
    program, labels = cut.drop_marks(opened.program, labels)
    program = program._replace(outputs=program.outputs[: len(opened.names)])  # without new values of variables
    is_data = [at >= len(opened.leaves) for at in range(len(program.inputs))]
    return cut.boundary_bytes(program, labels, num_ranks, is_data)


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
        return tuple(cut.balance([1] * len(costs), num_stages)), ""
    sizes = measure_boundaries()
    equal, by_bytes = (tuple(cut.balance(costs, num_stages, x)) for x in ((), cut.entry_costs(sizes)))
    if by_bytes == equal:
        return by_bytes, ""
    before, after = (bytes_text(sum(sizes[at] for at in bounds[1:-1])) for bounds in (equal, by_bytes))
    return by_bytes, (
        f"cuts={list(by_bytes[1:-1])}: activations of {after} at the boundaries; for equal FLOPs alone, "
        f"cuts={list(equal[1:-1])}: {before}"
    )
