"""Paths of leaves: the one place that knows the path formats of NNX and JAX. A path is "layers/0/attn/q/kernel"."""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey


def path_of(key_path: Sequence[Any]) -> str:
    """Path of a leaf, from a JAX key path or a tuple of NNX (`nnx.to_flat_state`).

    JAX walks into NNX Variables, so its key paths end in `.value`; that step is no part of the path.
    """
    if key_path and isinstance(key_path[-1], GetAttrKey) and key_path[-1].name == "value":
        key_path = key_path[:-1]
    return _join(key_path)


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """(path, leaf) of every leaf, in the order of `jax.tree.leaves`. Variables are walked into, and leave no trace."""
    found = []
    for key_path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_variable)[0]:
        if isinstance(node, nnx.Variable):  # its own first key is the attribute that holds the value
            inner = jax.tree_util.tree_flatten_with_path(node)[0]
            found += [(_join((*key_path, *rest[1:])), leaf) for rest, leaf in inner]
        else:
            found.append((_join(key_path), node))
    return found


def map_named(fn: Callable[[str, Any], Any], tree: Any) -> Any:
    """A tree of the same structure whose leaves are `fn(path, leaf)`."""
    return jax.tree.unflatten(jax.tree.structure(tree), [fn(path, leaf) for path, leaf in named_leaves(tree)])


def nest(named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Nested dict with string keys, from (path, leaf) pairs."""
    root: dict[str, Any] = {}
    for path, leaf in named:
        *parents, last = path.split("/")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return root


def owner_of(path: str, parameters: Collection[str]) -> str | None:
    """The parameter whose path is the longest tail of `path`: "opt_state/0/mu/layers/0/q" -> "layers/0/q"."""
    parts = path.split("/")
    tails = ("/".join(parts[i:]) for i in range(len(parts)))
    return next((tail for tail in tails if tail in parameters), None)


def in_stack(path: str, layers: Iterable[str]) -> str | None:
    """The scanned stack that `path` lies in, if any: "layers/q/kernel" does, "layers/0/q/kernel" does not.

    `layers` are the paths of layer lists. Below a list stands the layer's number; below a stack there is none,
    and the leaf has a leading layer dim instead.
    """
    for stack in layers:
        if path.startswith(stack + "/") and not re.match(r"\d+(/|$)", path[len(stack) + 1 :]):
            return stack
    return None


def layer_path(path: str, stack: str, index: int) -> str:
    """Path that layer `index` of a scanned stack would have in a list: ("layers/q", "layers", 3) -> "layers/3/q"."""
    return f"{stack}/{index}/{path[len(stack) + 1 :]}"


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _join(keys: Sequence[Any]) -> str:
    return "/".join([_NAME_OF[type(key)](key) if type(key) in _NAME_OF else str(key) for key in keys])


# Key of JAX -> its name. A dict over types, since paths are made for every leaf of large trees.
_NAME_OF: dict[type, Callable[[Any], str]] = {
    DictKey: lambda key: str(key.key),
    FlattenedIndexKey: lambda key: str(key.key),
    GetAttrKey: lambda key: str(key.name),
    SequenceKey: lambda key: str(key.idx),
}
