"""The cost of an assignment for each logical axis, from a model of the links, and an exact search for the best one.

docs/mesh.md ("The cost model") defines the seconds and the hops of an axis, and when an assignment is better.

Example: fsdp:2,tp:8 on a v5e slice of 4x4 (no wraparound, 45 GB/s per link), each chip with its index (fsdp,tp):

    x -->
    0,0  0,2  0,4  0,6  |    tp:    x 4 (complete, a line), 45 GB/s; then y 2 of 4, stride 1, 45 GB/s
    0,1  0,3  0,5  0,7  y    fsdp:  y 2 of 4, stride 2: 0,0 to 1,0 and 0,1 to 1,1 share the link
    1,0  1,2  1,4  1,6  |           between the second and the third row, 45 / 2 GB/s
    1,1  1,3  1,5  1,7  v
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from flax_mesh.hardware import link_bandwidth, network_bandwidth
from flax_mesh.mesh.torus.torus import Assignment, Torus, factorings, known_assignment, mean_hops

CORE_LINKS = 6  # two devices of one chip: the die-to-die link of 7x is six ICI links wide
DEFAULT_BYTES = 2.0**26  # bytes gathered along every axis
SAME = 1e-9  # relative tolerance: rounding errors must not replace JAX's assignment


class AxisCost(NamedTuple):
    """Predicted seconds of a gather along one logical axis, and mean hops between its neighbors."""

    seconds: float
    hops: float


class Phase(NamedTuple):
    """One phase of a gather: `size` devices over links of `bandwidth` bytes/s per direction."""

    size: int
    bandwidth: float


def axis_phases(torus: Torus, factors: Sequence[int], strides: Sequence[int], num_slices: int = 1) -> list[Phase]:
    """The phases of one logical axis, slowest first.

    `factors` is its column of the assignment, `strides` its distance in chips between neighbors on each physical axis.
    """
    link = link_bandwidth(torus.kind)
    phases = [Phase(num_slices, network_bandwidth(torus.kind))] if num_slices > 1 else []
    complete, links = 1, 0
    for axis, size, wraps, factor, stride in zip(torus.axes, torus.shape, torus.wraps, factors, strides, strict=True):
        width = CORE_LINKS if axis == "core" else 1
        if 1 < factor < size:
            phases.append(Phase(factor, link * width / stride))
        elif factor > 1:
            complete *= factor
            links += 2 if wraps else width
    if complete > 1:
        phases.append(Phase(complete, link * links))
    return sorted(phases, key=lambda phase: (phase.bandwidth, phase.size))


def gather_seconds(phases: Sequence[Phase], num_bytes: float = DEFAULT_BYTES) -> float:
    """Predicted time of the all-gather described in the module docstring; 0 for an axis of one device."""
    pieces = 1
    seconds: list[float] = []
    total = math.prod(phase.size for phase in phases)
    for phase in phases:
        seconds.append(num_bytes * pieces * (phase.size - 1) / total / phase.bandwidth)
        pieces *= phase.size
    return math.fsum(seconds)


def strides_of(assignment: Assignment) -> Assignment:
    """Chips between neighbors in the layout of `arrange`: the product of the factors of all later logical axes."""
    return tuple(tuple(math.prod(row[i + 1 :]) for i in range(len(row))) for row in assignment)


def assignment_cost(torus: Torus, assignment: Assignment) -> list[AxisCost]:
    """The cost of each logical axis."""
    columns = zip(zip(*assignment, strict=True), zip(*strides_of(assignment), strict=True), strict=True)
    return [_axis_cost(torus, factors, strides) for factors, strides in columns]


def is_better(cost: Sequence[AxisCost], other: Sequence[AxisCost]) -> bool:
    """Whether `cost` is strictly better: no axis is slower or has more hops, and some axis is faster."""
    pairs = list(zip(cost, other, strict=True))
    faster = any(new.seconds < old.seconds * (1 - SAME) for new, old in pairs)
    return faster and all(_within(new, old) for new, old in pairs)


def best_assignment(
    torus: Torus, mesh_shape: Sequence[int], *, allow_split: bool, limits: Sequence[AxisCost] | None = None
) -> Assignment | None:
    """The best assignment for the last axes where no axis costs more than its limit; None if none exists.

    Exact, by dynamic programming: the cost of axes 0..i depends on the later axes only through the sizes that they
    leave of each physical axis, so the best result for each (i, remaining sizes) is computed once. 8x8x16 over six axes
    takes milliseconds.
    """

    @cache
    def axis_cost(axis: int, factors: tuple[int, ...], left: tuple[int, ...]) -> AxisCost:
        strides = [size // remaining for size, remaining in zip(torus.shape, left, strict=True)]
        return _axis_cost(torus, factors, strides)

    @cache
    def best(axis: int, left: tuple[int, ...]) -> tuple[tuple[AxisCost, ...], tuple[tuple[int, ...], ...]] | None:
        """Best costs and columns of axes 0..`axis`; `left` is the size that later axes leave of each physical axis."""
        if axis < 0:
            return (), ()
        chosen = None
        for factors in factorings(mesh_shape[axis], left):
            if not allow_split and any(1 < f != size for f, size in zip(factors, torus.shape, strict=True)):
                continue
            cost = axis_cost(axis, factors, left)
            if limits is not None and not _within(cost, limits[axis]):
                continue
            earlier = best(axis - 1, tuple(size // f for size, f in zip(left, factors, strict=True)))
            if earlier is None:
                continue
            costs = (*earlier[0], cost)
            if chosen is None or _chosen_before(costs, chosen[0]):
                chosen = (costs, (*earlier[1], factors))
        return chosen

    result = best(len(mesh_shape) - 1, torus.shape)
    return None if result is None else tuple(zip(*result[1], strict=True))


def choose_assignment(torus: Torus, mesh_shape: Sequence[int], *, allow_split: bool) -> Assignment:
    """JAX's assignment, unless a strictly better one exists or JAX's greedy algorithm finds none.

    The product of `mesh_shape` must be the number of devices of the torus. Raises NotImplementedError if a physical
    axis would have to be split and `allow_split` is False.
    """
    try:
        known = known_assignment(torus.shape, mesh_shape, allow_split=allow_split)
    except NotImplementedError:
        best = best_assignment(torus, mesh_shape, allow_split=allow_split)
        if best is None:
            raise
        return best
    limits = assignment_cost(torus, known)
    best = best_assignment(torus, mesh_shape, allow_split=allow_split, limits=limits)
    return best if best is not None and is_better(assignment_cost(torus, best), limits) else known


def _axis_cost(torus: Torus, factors: Sequence[int], strides: Sequence[int]) -> AxisCost:
    seconds = gather_seconds(axis_phases(torus, factors, strides))
    # The places of the axis as `arrange` lays it out.
    places = np.stack(np.unravel_index(np.arange(math.prod(factors)), tuple(factors)), axis=-1) * np.array(strides)
    return AxisCost(seconds, mean_hops(places, torus)[0])


def _within(cost: AxisCost, limit: AxisCost) -> bool:
    return cost.seconds <= limit.seconds * (1 + SAME) and cost.hops <= limit.hops * (1 + SAME)


def _chosen_before(costs: Sequence[AxisCost], others: Sequence[AxisCost]) -> bool:
    """Whether `costs` precede `others`: by the seconds of the axes, the last one first, then by their hops."""
    for field in (0, 1):
        for cost, other in zip(reversed(costs), reversed(others), strict=True):
            new, old = cost[field], other[field]
            if not math.isclose(new, old, rel_tol=SAME):
                return new < old
    return False
