"""The stacks of layers in a state: those that `layers` names, which are saved layer by layer, and any others."""

import re
from collections.abc import Collection, Sequence
from itertools import accumulate
from posixpath import dirname

import jax
from flax import nnx

from flax_mesh.errors import ConfigError
from flax_mesh.step.state import TrainState
from flax_mesh.text import array_text, path_lines
from flax_mesh.tree import (
    MODEL,
    Constant,
    PyTree,
    in_stack,
    named_leaves,
    path_and_start,
    path_of,
    ranks_of,
    without_single_layers,
)


def tree_of(state: PyTree) -> PyTree:
    """The tree whose leaves have the paths of a checkpoint: of a TrainState without the Constants of its model."""
    return nnx.split_state(state.to_nnx(), Constant, ...)[1] if isinstance(state, TrainState) else state


def with_leaves(state: PyTree, leaves: Sequence[object]) -> PyTree:
    """`state` with `leaves` in the places of the leaves of `tree_of(state)`."""
    tree = jax.tree.unflatten(jax.tree.structure(tree_of(state)), leaves)
    if not isinstance(state, TrainState):
        return tree
    return state.with_state(nnx.merge_state(tree, nnx.filter_state(state.to_nnx(), Constant)))


def layers_of(state: PyTree, layers: Sequence[str] | None, stored: Collection[str] | None = None) -> tuple[str, ...]:
    """`layers`, or by default the layers in the rule table of a TrainState's model, without the names of single layers.

    The paths `stored` in a checkpoint show which stacks were saved layer by layer: in a tree without modules a
    single layer may look like a stack, and flax_mesh 0.1.0 took every module that `layers` names for a stack.
    """
    definition = state.definition if isinstance(state, TrainState) else None
    if layers is None:
        layers = definition.layers if definition else ()
    if not layers:
        return ()
    named = [(path.removeprefix(MODEL), leaf) for path, leaf in named_leaves(tree_of(state))]
    stacked = without_single_layers(layers, named, definition.ranks if definition else {})
    if stored is None:
        return stacked
    heads = {path: re.compile(rf"(?:model/)?{re.escape(path)}/(\d+(?:/|$))?") for path in layers}
    by_layer = {
        path: [bool(match[1]) for name in stored if (match := head.match(name))] for path, head in heads.items()
    }
    return tuple(path for path in layers if (any(by_layer[path]) if by_layer[path] else path in stacked))


def check_stacks_are_named(state: PyTree, layers: Sequence[str]) -> None:
    """Raise one ConfigError that lists the arrays of all stacks that `layers` does not name.

    Finds only stacks that are certain: the chunks of a stack in a pipeline and, in a TrainState, whose modules are
    known, Flax layers with one dim more than their class creates.
    """
    named = dict(named_leaves(tree_of(state)))
    if any(path.startswith(MODEL) for path in named):
        named = {path.removeprefix(MODEL): leaf for path, leaf in named.items() if path.startswith(MODEL)}
    unnamed = {path for path in named if path_and_start(path)[0] != path}
    if isinstance(state, TrainState):
        unnamed |= _unnamed_arrays(state.merge()[0], layers)
    unnamed = sorted(path for path in unnamed if not in_stack(path, layers))
    if not unnamed:
        return
    names = list(dict.fromkeys([*layers, *(_stack_of(path, unnamed, named) for path in unnamed)]))
    raise ConfigError(
        path_lines(f"{path}: {array_text(named[path])}" for path in unnamed),
        head="these arrays are stacks of layers that `layers` does not name. Saved as they are, a model with a list of "
        "layers could not restore them; nothing was written:",
        repair=f"Name the stacks: pass layers={names} to Checkpointer, or to @partitioned of the model's class.",
    )


def _stack_of(path: str, unnamed: Collection[str], named: Collection[str]) -> str:
    """The topmost folder of `path` that contains only arrays of unnamed stacks."""
    folders = accumulate(dirname(path_and_start(path)[0]).split("/"), "{}/{}".format)
    return next(top for top in folders if all(other in unnamed for other in named if other.startswith(f"{top}/")))


def _unnamed_arrays(model: nnx.Module, layers: Sequence[str]) -> set[str]:
    """Paths of the arrays in stacks that nnx.vmap or nnx.scan has created.

    Flax layers below a list are not counted, since a layer of that list may contain a stack of experts; nor are layers
    of a model that was created by one nnx.vmap, such as an ensemble.
    """
    shapes = {path: leaf.shape for path, leaf in named_leaves(nnx.state(model, graph=True))}
    tops: set[tuple[str, tuple[int, ...]]] = set()  # (first name of the path, (number of layers,)) of every stack
    unnamed: set[tuple[str, tuple[int, ...]]] = set()  # the stacks that `layers` does not name
    others = False  # whether any Flax layer is outside of a stack
    for at, module in nnx.iter_modules(model, graph=True):
        ranks = {path: rank for name, rank in ranks_of(module).items() if (path := path_of((*at, name))) in shapes}
        extra = {(len(shapes[path]) - rank, shapes[path][:1]) for path, rank in ranks.items()}
        dims, size = extra.pop() if len(extra) == 1 else (0, ())
        if dims < 1:
            others |= bool(ranks)
            shapes |= dict.fromkeys(ranks, ())  # a leading dim of the same size is not evidence here
        elif dims == 1 and at and not any(str(name).isdecimal() for name in at):
            tops.add((str(at[0]), size))
            unnamed |= {(str(at[0]), size) for path in ranks if not in_stack(path, layers)}
    is_ensemble = not others and len(tops) > 1 == len({size for _, size in tops})
    return set() if is_ensemble else {path for path in shapes if (path.split("/")[0], shapes[path][:1]) in unnamed}
