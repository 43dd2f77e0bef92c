"""The cost of an assignment for each logical axis, from a model of the links, and an exact search for the best one.

**Seconds**: the time of an all-gather of `num_bytes` over an axis of n devices (a reduce-scatter takes the same time,
an all-reduce takes both). The axis is gathered in phases, slowest links first, because early phases transfer the least:

- slices along the axis are one phase, at the DCN bandwidth of a chip;
- a factor smaller than its physical axis is one phase over a line. Only every `stride`-th chip belongs to the same
  group, so `stride` groups share each link: bandwidth = link / stride;
- all complete physical axes are one phase and work concurrently: bandwidth = 2 links per ring + 1 link per line.

A phase of m devices that starts from s of the n pieces receives `num_bytes * s * (m - 1) / n` at its bandwidth.

Example: fsdp:2,tp:8 on a v5e slice of 4x4 (no wraparound, 45 GB/s per link), each chip with its index (fsdp,tp):

    x -->
    0,0  0,2  0,4  0,6  |    tp:    x 4 (complete, a line), 45 GB/s; then y 2 of 4, stride 1, 45 GB/s
    0,1  0,3  0,5  0,7  y    fsdp:  y 2 of 4, stride 2: 0,0 to 1,0 and 0,1 to 1,1 share the link
    1,0  1,2  1,4  1,6  |           between the second and the third row, 45 / 2 GB/s
    1,1  1,3  1,5  1,7  v

**Hops**: ICI links between consecutive devices of the axis, averaged over the closed ring of its devices. They are the
cost of a shift (`ppermute`, ring attention, a pipeline).

An assignment is *better* than another if no axis is slower, no axis has more hops, and some axis is faster. Among
several better ones the busiest axis (most bytes; the later one if equal) chooses first, by seconds, then by hops. Fewer
hops alone do not justify a change: many permutations of equal physical axes differ only in hops.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from flax_mesh.hardware import link_bandwidth, network_bandwidth
from flax_mesh.mesh.torus.torus import Assignment, Torus, factorings, known_assignment, mean_hops

CORE_LINKS = 6  # two devices of one chip: the die-to-die link of 7x is six ICI links wide
DEFAULT_BYTES = 2.0**26  # bytes gathered along an axis if unknown: equal for all, so the order of the axes decides
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


def assignment_cost(torus: Torus, assignment: Assignment, axis_bytes: Sequence[float] | None = None) -> list[AxisCost]:
    """The cost of each logical axis. `axis_bytes` are the bytes gathered along each axis; equal by default."""
    sizes = axis_bytes or [DEFAULT_BYTES] * len(assignment[0])
    columns = zip(zip(*assignment, strict=True), zip(*strides_of(assignment), strict=True), sizes, strict=True)
    return [_axis_cost(torus, factors, strides, size) for factors, strides, size in columns]


def is_better(cost: Sequence[AxisCost], other: Sequence[AxisCost]) -> bool:
    """Whether `cost` is strictly better: no axis is slower or has more hops, and some axis is faster."""
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
    """The best assignment for the busiest axes where no axis costs more than its limit; None if none exists.

    Exact, by dynamic programming: the cost of axes 0..i depends on the later axes only through the sizes that they
    leave of each physical axis, so the best result for each (i, remaining sizes) is computed once. 8x8x16 over six axes
    takes milliseconds.
    """
    order = sorted(range(len(axis_bytes)), key=lambda axis: (-axis_bytes[axis], -axis))

    @cache
    def axis_cost(axis: int, factors: tuple[int, ...], left: tuple[int, ...]) -> AxisCost:
        strides = [size // remaining for size, remaining in zip(torus.shape, left, strict=True)]
        return _axis_cost(torus, factors, strides, axis_bytes[axis])

    @cache
    def best(axis: int, left: tuple[int, ...]) -> tuple[tuple[AxisCost, ...], tuple[tuple[int, ...], ...]] | None:
        """Best costs and columns of axes 0..`axis`; `left` is the size that later axes leave of each physical axis."""
        if axis < 0:
            return (), ()
        # The candidates of one call differ only in axes 0..axis, so only these are compared.
        priority = [other for other in order if other <= axis]
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
            if chosen is None or _chosen_before(costs, chosen[0], priority):
                chosen = (costs, (*earlier[1], factors))
        return chosen

    result = best(len(mesh_shape) - 1, torus.shape)
    return None if result is None else tuple(zip(*result[1], strict=True))


def choose_assignment(
    torus: Torus, mesh_shape: Sequence[int], *, allow_split: bool, axis_bytes: Sequence[float] | None = None
) -> Assignment:
    """JAX's assignment, unless a strictly better one exists or JAX's greedy algorithm finds none.

    The product of `mesh_shape` must be the number of devices of the torus. `axis_bytes` are the bytes gathered along
    each logical axis; equal by default. Raises NotImplementedError if a physical axis would have to be split and
    `allow_split` is False.
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
    # The places of the axis as `arrange` lays it out.
    places = np.stack(np.unravel_index(np.arange(math.prod(factors)), tuple(factors)), axis=-1) * np.array(strides)
    return AxisCost(seconds, mean_hops(places, torus)[0])


def _within(cost: AxisCost, limit: AxisCost) -> bool:
    return cost.seconds <= limit.seconds * (1 + SAME) and cost.hops <= limit.hops * (1 + SAME)


def _chosen_before(costs: Sequence[AxisCost], others: Sequence[AxisCost], order: Sequence[int]) -> bool:
    """Whether `costs` precede `others`: by the seconds of the axes in `order`, then (if all equal) by their hops."""
    for field in (0, 1):
        for axis in order:
            new, old = costs[axis][field], others[axis][field]
            if not math.isclose(new, old, rel_tol=SAME):
                return new < old
    return False
