"""What an assignment costs each logical axis under a stated model of the links, and the exact search under it.

**Seconds** of an all-gather of `num_bytes` over an axis of n devices (a reduce-scatter is its mirror image, an
all-reduce is both). The axis is gathered in phases, slowest links first because they then carry least:

- the slices that the axis joins: one phase, at the DCN bandwidth of a chip;
- each part of a physical axis (a factor smaller than the axis) is a line. Only every `stride`-th chip belongs to one
  group, so `stride` groups share each link: bandwidth = link / stride;
- its whole physical axes work at the same time, as one phase: bandwidth = sum of 2 links for a ring, 1 for a line.

A phase of m devices that starts from s of the n pieces receives `num_bytes * s * (m - 1) / n` at its bandwidth.

**Hops**: ICI links between neighbours of the axis, mean over the closed ring of its devices. They are what a shift
costs (`ppermute`, ring attention, a pipeline).

An assignment is *better* than another if no axis is slower, no axis has more hops, and some axis is faster. Of several
better ones the busiest axis (most bytes; at equal bytes the later one) chooses first, by seconds, then by hops. Hops
alone are no reason to leave an assignment: many permutations of equal physical axes differ in nothing else.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from flax_mesh.hardware import DCN_BANDWIDTH, DEFAULT_DCN, DEFAULT_ICI, ICI_BANDWIDTH
from flax_mesh.mesh.torus.torus import Assignment, Torus, factorings, known_assignment, mean_hops

CORE_LINKS = 6  # two devices of one chip: the die-to-die link of 7x is six ICI links wide
DEFAULT_BYTES = 2.0**26  # bytes gathered along an axis where nothing is known: all alike, so the order of axes decides
SAME = 1e-9  # costs closer than this are equal: the rounding of a sum is no reason to leave JAX's assignment


class AxisCost(NamedTuple):
    """Predicted seconds of a gather, and mean hops between neighbours, of one logical axis."""

    seconds: float
    hops: float


class Phase(NamedTuple):
    """One step of a gather: `size` devices over links of `bandwidth` bytes/s each way."""

    size: int
    bandwidth: float


def axis_phases(torus: Torus, factors: Sequence[int], strides: Sequence[int], num_slices: int = 1) -> list[Phase]:
    """The phases of one logical axis, slowest first.

    `factors` is its column of the assignment, `strides` the chips between neighbours along each physical axis.
    """
    link = ICI_BANDWIDTH.get(torus.kind, DEFAULT_ICI)
    phases = [Phase(num_slices, DCN_BANDWIDTH.get(torus.kind, DEFAULT_DCN))] if num_slices > 1 else []
    whole, links = 1, 0
    for axis, size, wraps, factor, stride in zip(torus.axes, torus.shape, torus.wraps, factors, strides, strict=True):
        width = CORE_LINKS if axis == "core" else 1
        if 1 < factor < size:
            phases.append(Phase(factor, link * width / stride))
        elif factor > 1:
            whole *= factor
            links += 2 if wraps else width
    if whole > 1:
        phases.append(Phase(whole, link * links))
    return sorted(phases, key=lambda phase: (phase.bandwidth, phase.size))


def gather_seconds(phases: Sequence[Phase], num_bytes: float = DEFAULT_BYTES) -> float:
    """Predicted time of the all-gather that the module describes; 0 for an axis of one device."""
    pieces, seconds = 1, []
    total = math.prod(phase.size for phase in phases)
    for phase in phases:
        seconds.append(num_bytes * pieces * (phase.size - 1) / total / phase.bandwidth)
        pieces *= phase.size
    return math.fsum(seconds)


def neighbour_hops(torus: Torus, factors: Sequence[int], strides: Sequence[int]) -> float:
    """Mean ICI hops between ring neighbours of a logical axis laid out by `arrange`."""
    places = np.stack(np.unravel_index(np.arange(math.prod(factors)), tuple(factors)), axis=-1) * np.array(strides)
    return mean_hops(places, torus)[0]


def strides_of(assignment: Assignment) -> Assignment:
    """Chips between neighbours, in the layout of `arrange`: the product of the later logical axes' factors."""
    return tuple(tuple(math.prod(row[i + 1 :]) for i in range(len(row))) for row in assignment)


def assignment_cost(torus: Torus, assignment: Assignment, axis_bytes: Sequence[float] | None = None) -> list[AxisCost]:
    """The cost of each logical axis; `axis_bytes` are the bytes gathered along each, equal by default."""
    sizes = axis_bytes or [DEFAULT_BYTES] * len(assignment[0])
    columns = zip(zip(*assignment, strict=True), zip(*strides_of(assignment), strict=True), sizes, strict=True)
    return [_axis_cost(torus, factors, strides, size) for factors, strides, size in columns]


def is_better(cost: Sequence[AxisCost], other: Sequence[AxisCost]) -> bool:
    """Whether `cost` is strictly better: no axis slower or of more hops, some axis faster."""
    pairs = list(zip(cost, other, strict=True))
    faster = any(new.seconds < old.seconds * (1 - SAME) for new, old in pairs)
    return faster and all(_within(new, old) for new, old in pairs)


def best_assignment(
    torus: Torus,
    mesh_shape: Sequence[int],
    axis_bytes: Sequence[float],
    *,
    allow_split: bool,
    limits: Sequence[AxisCost] | None = None,
) -> Assignment | None:
    """The assignment that the busiest axes choose, among those where no axis costs more than its limit.

    None where there is none. Exact: what the axes 0..i cost depends on what the later axes left of each physical axis
    and on nothing else, so the best of each (i, what is left) is found once; 8x8x16 over six axes takes milliseconds.
    """
    order = sorted(range(len(axis_bytes)), key=lambda axis: (-axis_bytes[axis], -axis))

    @cache
    def axis_cost(axis: int, factors: tuple[int, ...], left: tuple[int, ...]) -> AxisCost:
        strides = [size // rest for size, rest in zip(torus.shape, left, strict=True)]
        return _axis_cost(torus, factors, strides, axis_bytes[axis])

    @cache
    def best(axis: int, left: tuple[int, ...]) -> tuple[tuple[AxisCost, ...], tuple[tuple[int, ...], ...]] | None:
        """Costs and columns of the axes 0..`axis`; `left` is what the later ones leave of each physical axis."""
        if axis < 0:
            return (), ()
        priority = [other for other in order if other <= axis]
        found = None
        for factors in factorings(mesh_shape[axis], left):
            if not allow_split and any(1 < f != size for f, size in zip(factors, torus.shape, strict=True)):
                continue
            cost = axis_cost(axis, factors, left)
            if limits is not None and not _within(cost, limits[axis]):
                continue
            rest = best(axis - 1, tuple(have // f for have, f in zip(left, factors, strict=True)))
            if rest is None:
                continue
            costs = (*rest[0], cost)
            if found is None or _chosen_before(costs, found[0], priority):
                found = (costs, (*rest[1], factors))
        return found

    result = best(len(mesh_shape) - 1, torus.shape)
    return None if result is None else tuple(zip(*result[1], strict=True))


def choose_assignment(
    torus: Torus, mesh_shape: Sequence[int], *, allow_split: bool, axis_bytes: Sequence[float] | None = None
) -> Assignment:
    """JAX's assignment, unless a strictly better one exists, or JAX's greedy choice finds none.

    `mesh_shape` must multiply to the devices of the torus. `axis_bytes` are the bytes gathered along each logical
    axis, equal by default. NotImplementedError where a physical axis would have to be split and `allow_split` is False.
    """
    sizes = axis_bytes or [DEFAULT_BYTES] * len(mesh_shape)
    try:
        known = known_assignment(torus.shape, mesh_shape, allow_split=allow_split)
    except NotImplementedError:
        best = best_assignment(torus, mesh_shape, sizes, allow_split=allow_split)
        if best is None:
            raise
        return best
    limits = assignment_cost(torus, known, sizes)
    best = best_assignment(torus, mesh_shape, sizes, allow_split=allow_split, limits=limits)
    return best if best is not None and is_better(assignment_cost(torus, best, sizes), limits) else known


def _axis_cost(torus: Torus, factors: Sequence[int], strides: Sequence[int], num_bytes: float) -> AxisCost:
    seconds = gather_seconds(axis_phases(torus, factors, strides), num_bytes)
    return AxisCost(seconds, neighbour_hops(torus, factors, strides))


def _within(cost: AxisCost, limit: AxisCost) -> bool:
    return cost.seconds <= limit.seconds * (1 + SAME) and cost.hops <= limit.hops * (1 + SAME)


def _chosen_before(costs: Sequence[AxisCost], others: Sequence[AxisCost], order: Sequence[int]) -> bool:
    """Whether the axes, busiest first, choose `costs`: by seconds, and where all those are equal by hops."""
    for field in (0, 1):
        for axis in order:
            new, old = costs[axis][field], others[axis][field]
            if not math.isclose(new, old, rel_tol=SAME):
                return new < old
    return False
