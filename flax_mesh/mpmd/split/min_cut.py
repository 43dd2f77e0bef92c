"""The lightest set of nodes of a graph from which others can be made: what crosses between stages, what is kept.

A minimum cut of nodes between what is expensive to make and what is wanted (Ford and Fulkerson 1956), found by
augmenting along shortest paths (Edmonds and Karp 1972). Of several cuts of the same weight it is the one nearest to
what is wanted, so that the least is made again.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

Node = TypeVar("Node", bound=Hashable)
Residual = dict[Any, dict[Any, int]]  # edge -> what may still flow; every edge has its reverse
SOURCE, SINK = "source", "sink"


def cheapest_cut(
    wanted: Iterable[Node], parents: Callable[[Node], Sequence[Node] | None], weight: Callable[[Node], int | None]
) -> set[Node]:
    """The lightest set of nodes from which all that is `wanted` can be made.

    `parents(node)` are all the nodes that it is made of, () for one that is always there, None for one that can be had
    only by being in the set. `weight(node)` is at least 0; None: it must not be in the set. Wanted nodes have weights.
    """
    residual = _network(list(wanted), parents, weight)
    while path := _shortest_path(residual):
        flow = min(residual[a][b] for a, b in path)
        for a, b in path:
            residual[a][b] -= flow
            residual[b][a] += flow
    before = _reaching_sink(residual)
    return {node for node, side in before - {SINK} if side == "out" and (node, "in") not in before}


def to_make(wanted: Iterable[Node], chosen: set[Node], parents: Callable[[Node], Sequence[Node] | None]) -> set[Node]:
    """All that is made of `chosen`, a set from which the `wanted` can be, on the way to them."""
    found: set[Node] = set()
    todo = list(wanted)
    while todo:
        node = todo.pop()
        if node not in chosen and node not in found:
            found.add(node)
            todo += parents(node) or ()
    return found


def _network(wanted: list[Any], parents: Callable[..., Any], weight: Callable[..., int | None]) -> Residual:
    """Every node as two, with its weight between them: one more than it, for a node of weight 0 cuts too."""
    residual: Residual = {SOURCE: {}, SINK: {}}

    def edge(a: Any, b: Any, capacity: int) -> None:
        residual.setdefault(a, {})[b] = capacity
        residual.setdefault(b, {}).setdefault(a, 0)

    made_of, todo = {}, list(wanted)
    while todo:
        node = todo.pop()
        if node not in made_of:
            made_of[node] = parents(node)
            todo += made_of[node] or ()
    weights = {node: weight(node) for node in made_of}
    # Heavier than all together: such an edge is never cut. In units so small that one more never adds up to a byte.
    unit = len(made_of) + 1
    endless = unit * (1 + sum(w for w in weights.values() if w is not None)) + unit
    for node, above in made_of.items():
        own = weights[node]
        edge((node, "in"), (node, "out"), endless if own is None else unit * own + 1)
        if above is None:
            edge(SOURCE, (node, "in"), endless)
        for parent in above or ():
            edge((parent, "out"), (node, "in"), endless)
    for node in wanted:
        edge((node, "out"), SINK, endless)
    return residual


def _shortest_path(residual: Residual) -> list[tuple[Any, Any]]:
    """Edges from the source to the sink along which more may flow; [] for none."""
    came: dict[Any, Any] = {SOURCE: None}
    todo = deque([SOURCE])
    while todo and SINK not in came:
        here = todo.popleft()
        for there, capacity in residual[here].items():
            if capacity and there not in came:
                came[there] = here
                todo.append(there)
    path, here = [], SINK
    while came.get(here) is not None:
        path.append((came[here], here))
        here = came[here]
    return path[::-1]


def _reaching_sink(residual: Residual) -> set[Any]:
    found, todo = {SINK}, [SINK]
    while todo:
        there = todo.pop()
        for here in residual[there]:
            if here not in found and residual[here][there]:
                found.add(here)
                todo.append(here)
    return found
