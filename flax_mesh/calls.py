"""Traced calls of functions whose arguments contain NNX modules: their changes are kept, as by `nnx.jit`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.extend import core as jex

_TAG = "flax_mesh"


def traced_call(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    evaluate: Callable[[jex.ClosedJaxpr, Any], Sequence[Any]],
) -> Any:
    """The result of `fn(*args, **kwargs)`, computed by `evaluate(program, inputs)`.

    `inputs` are (args, kwargs) with the State of each module or Variable in its place, empty for one that is part of
    an earlier one; `evaluate` returns the outputs of the program. Modules may be anywhere in the arguments, and several
    times. The call changes them as it would without a trace.
    """
    with nnx.update_context(_TAG):
        nodes, tree = jax.tree.flatten((tuple(args), dict(kwargs)), is_leaf=_is_node)
        with nnx.split_context(_TAG) as context:
            graphs, states = _split(context, nodes)
        after: list[Any] = []

        def flat(*leaves: Any) -> Any:
            states = jax.tree.unflatten(leaves_tree, leaves)
            with nnx.merge_context(_TAG, True) as context:
                given = _merged(context, graphs, states)
            given_args, given_kwargs = jax.tree.unflatten(tree, given)
            result = fn(*given_args, **given_kwargs)
            with nnx.split_context(_TAG) as context:
                after[:], changed = _split(context, [x for x in given if _is_node(x)])
            return result, changed

        leaves, leaves_tree = jax.tree.flatten(states)
        closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        outputs = evaluate(closed, jax.tree.unflatten(tree, states))
        result, changed = jax.tree.unflatten(jax.tree.structure(shapes), outputs)
        with nnx.merge_context(_TAG, False) as context:
            _merged(context, after, changed)
        return result


def _is_node(x: object) -> bool:
    return isinstance(x, nnx.Pytree | nnx.Variable)


def _split(context: Any, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """(graph definitions, states) of the modules among `values`; None and the value for others."""
    pairs = [context.split(x) if _is_node(x) else (None, x) for x in values]
    return [graph for graph, _ in pairs], [state for _, state in pairs]


def _merged(context: Any, graphs: Sequence[Any], states: Sequence[Any]) -> list[Any]:
    return [x if graph is None else context.merge(graph, x) for graph, x in zip(graphs, states, strict=True)]
