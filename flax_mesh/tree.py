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
    found: list[tuple[str, Any]] = []
    root = tree.get_raw_value() if isinstance(tree, nnx.Variable) else tree
    if jax.tree_util.all_leaves([root]):
        return [("", root)]
    _walk("", _CHILDREN.get(type(root), _one_level)(root), dict(_CHILDREN), found)
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


def path_and_start(path: str) -> tuple[str, int]:
    """("layers/q", 2) for "layers/q/from 2", the layers of a scanned stack from 2 on; otherwise (path, 0)."""
    head, _, tail = path.rpartition("/")
    return (head, int(tail.removeprefix("from "))) if tail.startswith("from ") else (path, 0)


def layer_path(path: str, stack: str, index: int) -> str:
    """Path that layer `index` of a scanned stack would have in a list: ("layers/q", "layers", 3) -> "layers/3/q"."""
    return f"{stack}/{index}/{path[len(stack) + 1 :]}"


Children = Callable[[Any], Iterable[tuple[Any, Any]]]  # (name, child) pairs of a node


def _walk(
    prefix: str, pairs: Iterable[tuple[Any, Any]], children: dict[type, Children], found: list[tuple[str, Any]]
) -> None:
    """Append the leaves at and below `pairs`. Ours, for JAX's own walk with key paths takes five times as long."""
    for name, node in pairs:
        kind = type(node)
        if issubclass(kind, nnx.Variable):
            node = node.get_raw_value()
            kind = type(node)
        if kind not in children:  # JAX tells nodes from leaves by their type
            children[kind] = _none if jax.tree_util.all_leaves([node]) else _one_level
        path = f"{prefix}{name}"
        if children[kind] is _none:
            found.append((path, node))
        else:
            _walk(path + "/", children[kind](node), children, found)


def _one_level(node: Any) -> list[tuple[str, Any]]:
    """Children of any node that JAX knows."""
    pairs = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)[0]
    return [(_join(keys), child) for keys, child in pairs]


def _none(leaf: Any) -> list[tuple[str, Any]]:
    return []


def _join(keys: Sequence[Any]) -> str:
    return "/".join([str(getattr(key, _NAME_OF[type(key)]) if type(key) in _NAME_OF else key) for key in keys])


# Key of JAX -> its attribute that appears in a path.
_NAME_OF: dict[type, str] = {DictKey: "key", FlattenedIndexKey: "key", GetAttrKey: "name", SequenceKey: "idx"}

# Children of the nodes that large trees consist of, in JAX's order.
_CHILDREN: dict[type, Children] = {
    dict: lambda node: [(key, node[key]) for key in sorted(node)],
    list: enumerate,
    tuple: enumerate,
    nnx.State: lambda node: sorted(node.raw_mapping.items()),
}
