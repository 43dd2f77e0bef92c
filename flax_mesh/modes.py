"""The modes of NNX, and options of JAX: user code is called in the modes of the user, flax_mesh itself in its own.

A user's code runs in graph mode or in tree mode (`nnx.set_graph_mode`), as it would without flax_mesh. The calls of
`nnx.split`, `nnx.state` and the like in flax_mesh itself are always in graph mode, `graph=True`: a state has the same
structure in both modes, and Variables may be shared. `traced_call` calls a function whose arguments contain modules.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from flax.nnx.filterlib import Filter
from jax.extend import core as jex
from jax.sharding import Sharding
from jax.typing import DTypeLike

from flax_mesh.errors import ConfigError, ShardingError
from flax_mesh.text import lines_of, says
from flax_mesh.tree import PyTree, check_arrays, path_of

_TAG = "flax_mesh"


def array_from(
    shape: Sequence[int], sharding: Sharding, read: Callable[[Any], np.ndarray], dtype: DTypeLike
) -> jax.Array:
    """`jax.make_array_from_callback`: its transfers are intended, also where `jax.transfer_guard` disallows others.

    Each process reads its shards only. It has a dtype for a process without a shard, which cannot infer it; without
    64-bit types, JAX warns about a request for one.
    """
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    with jax.transfer_guard_host_to_device("allow"):
        return jax.make_array_from_callback(tuple(shape), sharding, read, dtype=dtype)


@contextlib.contextmanager
def promotions() -> Iterator[None]:
    """Context, or decorator, for code that promotes ranks and dtypes, also where a user's options refuse that.

    `jax_numpy_rank_promotion` and `jax_numpy_dtype_promotion` are for a user's own code.
    """
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@contextlib.contextmanager
def user_modes() -> Iterator[None]:
    """Context for calls of a user's code in a trace: new Variables contain arrays, and flax_mesh alone shards them.

    Eager sharding would place annotated Variables by their logical axes. `hijax=True` and `ref=True` of
    Variables have no effect: Flax differentiates neither, and returns neither from a trace.

    Raises a ShardingError of one line for a model that shares Variables where the code calls NNX in tree mode.
    """
    try:
        with nnx.use_eager_sharding(False), nnx.var_defaults(hijax=False, ref=False):
            yield
    except ValueError as error:
        # Flax's message contains the values of the Variable and, in separate lines, the paths.
        paths = [match[1] for line in lines_of(error) if (match := re.fullmatch(r"  - \.?(\S+)", line))]
        if not says(error, "Tree mode") or not paths:
            raise
        raise ShardingError(
            f"{' and '.join(paths)} are one Variable, and a call of NNX in tree mode (graph=False) refuses shared "
            "Variables: pass graph=True to that call, as in nnx.Optimizer(model, tx, wrt=nnx.Param, graph=True), or "
            "copy the Variable."
        ) from error


def check_variables(modules: object) -> None:
    """Raises a ShardingError for Variables of modules that were created with `hijax=True` or `ref=True`."""
    nodes = ((path_of(path), node) for path, node in nnx.iter_graph(modules, graph=True))
    variables = [(path, node) for path, node in nodes if isinstance(node, nnx.Variable)]
    hijax = [(path, node) for path, node in variables if not issubclass(type(node), nnx.Variable)]
    check_arrays(hijax or [(path, node.get_raw_value()) for path, node in variables])


def set_eval_mode(model: PyTree) -> None:
    """Calls `model.eval()`. An nnx.Pytree lacks this method: `eval` of the modules in it is called instead."""
    with nnx.set_graph_mode(True):
        for module in [model] if isinstance(model, nnx.Module) else [x for _, x in nnx.iter_modules(model, graph=True)]:
            module.eval()


def optimizer_of(
    model: nnx.Pytree, optimizer: optax.GradientTransformation | nnx.Optimizer, wrt: Filter
) -> nnx.Optimizer:
    """An nnx.Optimizer of a model that may share Variables, in any mode.

    `optimizer` is its transformation, or another nnx.Optimizer that has it. Raises ConfigError for an object of a
    subclass, which may do more than its transformation.
    """
    if not isinstance(optimizer, nnx.Optimizer):
        transformation = optimizer
    elif type(optimizer) is nnx.Optimizer:
        transformation = optimizer.tx
    else:
        raise ConfigError(
            "the optimizer must be an nnx.Optimizer or an optax transformation, got an object of the subclass "
            f"{type(optimizer).__name__}; return it with the model from the function that split_stages takes"
        )
    with nnx.set_graph_mode(True):
        return nnx.Optimizer(model, transformation, wrt=wrt)


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
