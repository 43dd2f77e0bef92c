"""Assignments are never worse than JAX's: by the cost model, and by two measurements independent of it."""

import math
from collections import Counter

import numpy as np
import pytest

from flax_mesh.mesh.torus.assign import (
    AxisCost,
    assignment_cost,
    axis_phases,
    best_assignment,
    choose_assignment,
    gather_seconds,
    is_better,
)
from flax_mesh.mesh.torus.torus import arrange, factorings, known_assignment, mean_hops
from tests.mesh.torus.family import FAMILY, SAMPLE, changes, torus_of


def points_of(torus, assignment):
    """Coordinates in mesh order, computed by arranging a grid of numbers."""
    numbers = arrange(np.arange(math.prod(torus.shape)).reshape(torus.shape), assignment)
    return np.stack(np.unravel_index(numbers, torus.shape), axis=-1)


def most_loaded_link(points, torus):
    """Per mesh axis: the messages over the busiest directed link when all devices send to their next neighbor.

    Messages are routed along x, then y, then z, in the shorter direction.
    """
    loads = []
    for axis in range(points.ndim - 1):
        if points.shape[axis] == 1:
            loads.append(0)
            continue
        links = Counter()
        ends = np.roll(points, -1, axis=axis).reshape(-1, len(torus.shape)).tolist()
        for place, end in zip(points.reshape(-1, len(torus.shape)).tolist(), ends, strict=True):
            for p, size in enumerate(torus.shape):
                distance = end[p] - place[p]
                if torus.wraps[p] and abs(distance) > size - abs(distance):
                    distance -= size if distance > 0 else -size
                for _ in range(abs(distance)):
                    links[(*place, p, distance > 0)] += 1
                    place[p] = (place[p] + (1 if distance > 0 else -1)) % size
        loads.append(max(links.values()))
    return tuple(loads)


def check_never_worse(family):
    """Hops and link loads are measured on the finished mesh and compared lexicographically, busiest axis first."""
    better = []
    for torus, mesh_shape, known, ours in changes(family):
        before, after = points_of(torus, known), points_of(torus, ours)
        case = (torus.kind, torus.shape, mesh_shape)
        hops = [np.round(mean_hops(points, torus)[::-1], 9).tolist() for points in (after, before)]
        assert hops[0] <= hops[1], case
        loads = [most_loaded_link(points, torus)[::-1] for points in (after, before)]
        assert loads[0] <= loads[1], case
        assert is_better(assignment_cost(torus, ours), assignment_cost(torus, known)), case
        better.append(case)
    return better


def test_never_worse_than_jax_and_sometimes_better():
    better = check_never_worse(SAMPLE[1:])
    assert ("TPU v4", (4, 8, 8), (4, 4, 16)) in better
    assert ("TPU v5 lite", (8, 16, 1), (4, 8, 4)) in better


@pytest.mark.slow
def test_never_worse_than_jax_on_the_entire_family():
    assert len(check_never_worse(FAMILY)) >= 80


def test_the_check_detects_a_worse_assignment(monkeypatch):
    """Mutation test: an assignment that is not strictly better must fail the check above."""
    worse = ((1, 2, 2), (4, 2, 1), (1, 1, 8))
    torus = torus_of("TPU v4", (4, 8, 8))
    known = known_assignment(torus.shape, (4, 4, 16), allow_split=True)
    monkeypatch.setattr(f"{__name__}.changes", lambda family: [(torus, (4, 4, 16), worse, known)])
    with pytest.raises(AssertionError):
        check_never_worse(SAMPLE)


@pytest.mark.parametrize(("shape", "mesh_shape"), [((4, 4, 16), (4, 4, 16)), ((2, 2, 4), (2, 2, 4))])
def test_complete_axes_are_found_if_the_greedy_choice_fails(shape, mesh_shape):
    with pytest.raises(NotImplementedError):
        known_assignment(shape, mesh_shape, allow_split=False)
    ours = choose_assignment(torus_of("TPU v4", shape), mesh_shape, allow_split=False)
    assert np.array(ours).prod(axis=0).tolist() == list(mesh_shape)
    assert all(factor in (1, size) for row, size in zip(ours, shape, strict=True) for factor in row)


@pytest.mark.parametrize("mesh_shape", [(4, 4, 2), (2, 16), (2, 2, 8), (32,), (8, 4)])
def test_the_search_is_exact(mesh_shape):
    """Compared with a brute-force search over all matrices of factors."""
    torus = torus_of("TPU v5 lite", (4, 8, 1))
    columns = [list(factorings(size, torus.shape)) for size in mesh_shape]
    matrices = [[]]
    for options in columns:
        matrices = [[*chosen, option] for chosen in matrices for option in options]
    valid = [tuple(zip(*each, strict=True)) for each in matrices if (np.array(each).prod(axis=0) == torus.shape).all()]
    found = best_assignment(torus, mesh_shape, allow_split=True)

    def key(assignment):
        costs = assignment_cost(torus, assignment)[::-1]
        return [round(c.seconds * 1e9) for c in costs], [round(c.hops, 9) for c in costs]

    assert found in valid
    assert key(found) == min(map(key, valid))


def test_gather_seconds_follow_from_the_bandwidth_of_the_links():
    torus = torus_of("TPU v4", (4, 4, 8))
    gib = 2.0**30
    ring = gather_seconds(axis_phases(torus, (1, 1, 8), (1, 1, 1)), gib)
    assert ring == pytest.approx(gib * 7 / 8 / (2 * 4.5e10))
    plane = gather_seconds(axis_phases(torus, (4, 4, 1), (1, 1, 1)), gib)
    assert plane == pytest.approx(gib * 15 / 16 / (4 * 4.5e10))
    part = gather_seconds(axis_phases(torus, (1, 1, 2), (1, 1, 4)), gib)
    assert part == pytest.approx(gib / 2 / (4.5e10 / 4))
    over_dcn = gather_seconds(axis_phases(torus, (1, 1, 8), (1, 1, 1), num_slices=2), gib)
    assert over_dcn == pytest.approx(gib / 16 / 6.25e9 + gib * 14 / 16 / (2 * 4.5e10))
    assert gather_seconds(axis_phases(torus, (1, 1, 1), (1, 1, 1)), gib) == 0


def test_better_requires_a_faster_axis_and_no_worse_axis():
    old = [AxisCost(2.0, 1.0), AxisCost(1.0, 1.0)]
    assert is_better([AxisCost(1.0, 1.0), AxisCost(1.0, 1.0)], old)
    assert not is_better([AxisCost(2.0, 0.5), AxisCost(1.0, 1.0)], old)  # hops alone
    assert not is_better([AxisCost(1.0, 2.0), AxisCost(1.0, 1.0)], old)  # faster, with more hops
    assert not is_better([AxisCost(1.0, 1.0), AxisCost(1.1, 1.0)], old)  # another axis is slower
