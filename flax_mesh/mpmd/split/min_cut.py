"""Minimum cut of a graph of values: the fewest bytes from which required values can be computed.

Used twice: for the activations that a stage receives (`assign.py`), and for the residuals that the forward pass stores
for the backward pass (`remat.py`). In both cases cheap values are recomputed rather than transferred or stored.

Example: a residual stream in bfloat16 at a stage boundary, followed by a norm in float32.

    x = a @ b                bf16[4,16]   128 B    a matrix product, which must not be repeated
    f = float32(x)            f32[4,16]   256 B    required: the residual connection of the next stage
    r = rsqrt(mean(f * f))    f32[4,1]     16 B
    n = f * r                 f32[4,16]   256 B    required: the input of the next layer

            +--------------------> f required
            |
    x ----> f ----> r ----> n ---> n required
       ^    |               ^
       |    +---------------+
       |
       minimum cut: transfer x, 128 B (f and n would be 512 B, f and r 272 B)

As a flow network, every value is an edge with its bytes as capacity, and every dependency has infinite capacity:

    source ==> (x.in -128-> x.out) ==> (f.in -256-> f.out) ==> ... ==> (n.in -256-> n.out) ==> sink

The source is connected to the values that must not be recomputed, the sink to the required ones. A set of values is
sufficient if every path from the source to the sink contains one of them, so the lightest sufficient set is a minimum
cut (Ford and Fulkerson 1956). It is found by augmenting along shortest paths (Edmonds and Karp 1972).
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

_Node = TypeVar("_Node", bound=Hashable)
Residual = dict[Hashable, dict[Hashable, int]]  # residual capacity of every edge; every edge has a reverse edge
SOURCE, SINK = "source", "sink"


def minimum_cut(
    required: Iterable[_Node], parents: Callable[[_Node], Sequence[_Node] | None], weight: Callable[[_Node], int | None]
) -> set[_Node]:
    """The set of nodes with the smallest total weight from which all `required` nodes can be computed.

    `parents(node)` returns the nodes that it is computed from: () if it is always available, None if it must not be
    computed and so is available only as a member of the set. `weight(node)` is at least 0, or None if the node must not
    be in the set. Required nodes must have a weight. Among sets of equal weight, one with the fewest nodes is returned,
    and among those the one closest to the required nodes, which leaves the least to recompute.
    """
    required = list(required)
    nodes = recomputed(required, set(), parents)
    residual = _network(required, {node: parents(node) for node in nodes}, {node: weight(node) for node in nodes})
    while path := _augmenting_path(residual):
        flow = min(residual[a][b] for a, b in path)
        for a, b in path:
            residual[a][b] -= flow
            residual[b][a] += flow
    # Minimum cuts are not unique: the one with the smallest sink side is closest to the required nodes.
    sink_side = _reaching_sink(residual)
    return {node for node in nodes if (node, "out") in sink_side and (node, "in") not in sink_side}


def recomputed(
    required: Iterable[_Node], chosen: set[_Node], parents: Callable[[_Node], Sequence[_Node] | None]
) -> set[_Node]:
    """The nodes that are computed on the way from `chosen`, a sufficient set, to the `required` nodes."""
    nodes: set[_Node] = set()
    todo = list(required)
    while todo:
        node = todo.pop()
        if node not in chosen and node not in nodes:
            nodes.add(node)
            todo += parents(node) or ()
    return nodes


def _network(
    required: Sequence[_Node], parents: Mapping[_Node, Sequence[_Node] | None], weights: Mapping[_Node, int | None]
) -> Residual:
    residual: Residual = {SOURCE: {}, SINK: {}}

    def edge(a: Hashable, b: Hashable, capacity: int) -> None:
        residual.setdefault(a, {})[b] = capacity
        residual.setdefault(b, {}).setdefault(a, 0)

    # A capacity of unit * weight + 1 minimizes the weight first and the number of nodes second: with fewer nodes than
    # `unit`, the ones never add up to one unit of weight. They also give nodes of weight 0 an edge that can be cut.
    unit = len(parents) + 1
    infinite = unit * (1 + sum(w for w in weights.values() if w is not None)) + unit  # more than all finite edges
    for node, node_parents in parents.items():
        size = weights[node]
        edge((node, "in"), (node, "out"), infinite if size is None else unit * size + 1)
        if node_parents is None:
            edge(SOURCE, (node, "in"), infinite)
        for parent in node_parents or ():
            edge((parent, "out"), (node, "in"), infinite)
    for node in required:
        edge((node, "out"), SINK, infinite)
    return residual


def _augmenting_path(residual: Residual) -> list[tuple[Hashable, Hashable]]:
    """Edges of a shortest path with residual capacity from the source to the sink, or [] if there is none."""
    previous: dict[Hashable, Hashable] = {SOURCE: None}
    todo: deque[Hashable] = deque([SOURCE])
    while todo and SINK not in previous:
        here = todo.popleft()
        for there, capacity in residual[here].items():
            if capacity and there not in previous:
                previous[there] = here
                todo.append(there)
    path: list[tuple[Hashable, Hashable]] = []
    here: Hashable = SINK
    while previous.get(here) is not None:
        path.append((previous[here], here))
        here = previous[here]
    return path[::-1]


def _reaching_sink(residual: Residual) -> set[Hashable]:
    reached: set[Hashable] = {SINK}
    todo: list[Hashable] = [SINK]
    while todo:
        there = todo.pop()
        for here in residual[there]:
            if here not in reached and residual[here][there]:
                reached.add(here)
                todo.append(here)
    return reached
