"""Minimum cuts: no other sufficient set of values has fewer bytes."""

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_mesh.mpmd import split_stages
from flax_mesh.mpmd.split.min_cut import minimum_cut
from tests.mpmd.zoo.base import squared_loss, vectors
from tests.mpmd.zoo.variables import Half


@st.composite
def graphs(draw) -> tuple[dict[int, list[int] | None], dict[int, int | None], list[int]]:
    """Tuples (parents, weights, required) for up to 7 nodes. Parents have smaller numbers than their nodes."""
    size = draw(st.integers(1, 7))
    parents: dict[int, list[int] | None] = {}
    for node in range(size):
        before = st.lists(st.integers(0, node - 1), max_size=3, unique=True) if node else st.just([])
        parents[node] = draw(st.none() | before)
    weights = {node: draw(st.none() | st.integers(0, 4)) for node in range(size)}
    required = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=3, unique=True))
    return parents, weights | {node: draw(st.integers(0, 4)) for node in required}, required


def is_sufficient(chosen, parents, required) -> bool:
    available: dict[int, bool] = {}
    for node in sorted(parents):
        above = parents[node]
        available[node] = node in chosen or (above is not None and all(available[p] for p in above))
    return all(available[node] for node in required)


@settings(max_examples=100, deadline=None)
@given(graphs())
def test_no_other_sufficient_set_has_less_weight_or_equal_weight_and_fewer_nodes(case):
    parents, weights, required = case
    chosen = minimum_cut(required, parents.__getitem__, weights.__getitem__)
    assert is_sufficient(chosen, parents, required)
    assert all(weights[node] is not None for node in chosen)

    def price(nodes) -> tuple[Any, int]:
        return sum(weights[node] for node in nodes), len(nodes)

    free = [node for node in parents if weights[node] is not None]
    every = (set(nodes) for count in range(len(free) + 1) for nodes in combinations(free, count))
    assert price(chosen) == min(price(nodes) for nodes in every if is_sufficient(nodes, parents, required))


def test_among_equal_cuts_the_closest_to_the_required_nodes_is_returned():
    parents = {0: None, 1: [0], 2: [1], 3: [2], 4: [2]}
    weights = {0: 4, 1: 4, 2: 4, 3: 4, 4: 4}
    assert minimum_cut([3, 4], parents.__getitem__, weights.__getitem__) == {2}
    assert minimum_cut([3], parents.__getitem__, weights.__getitem__) == {3}


def test_a_long_chain_is_cut_quickly():
    parents = {node: [node - 1] if node % 3 else None if node == 0 else [node - 1, -node] for node in range(3000)}
    parents |= {-node: None for node in range(3000)}
    assert minimum_cut([2999], parents.__getitem__, lambda node: 8) == {2999}


def short(v) -> str:
    return v.aval.str_short(short_dtypes=True)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_residual_stream_in_bfloat16_is_sent_once_and_in_bfloat16(num_stages):
    """The next stage recomputes the float32 sum and the values inside the norm."""
    staged = split_stages(squared_loss, Half, vectors(2), num_stages=num_stages)
    received = [list(map(short, stage.received)) for stage in staged.cut(staged.example).stages]
    assert received == [[], *[["bf16[2,16]"]] * (num_stages - 1)]
