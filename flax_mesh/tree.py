"""Paths of leaves, such as "layers/0/attn/q/kernel", and scanned stacks.

Only this file depends on the key path formats of NNX and JAX.
"""

# JAX and NNX have no types for key paths, tree definitions and the values of Variables.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

import functools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.variablelib import HijaxVariable
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey
from jax.typing import DTypeLike

from flax_mesh.errors import ShardingError
from flax_mesh.text import path_lines, shown

# Any tree of JAX: dicts, lists, modules and states, or a single leaf. JAX has no type for it.
PyTree: TypeAlias = Any
Item = TypeVar("Item")
MODEL, OPTIMIZER = "model/", "optimizer/"  # the paths of a train state begin with one of them


class Constant(nnx.Variable[jax.Array]):
    """A parameter that no step changes and no checkpoint contains, such as one of a teacher."""


class Shaped(Protocol):
    """An array, a ShapeDtypeStruct, or another record of a shape and a dtype."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...


def model_state(state: PyTree) -> PyTree:
    """The state of the model in {"model", "optimizer"}; NNX leaves it out if the model has no variables."""
    return state.get("model", nnx.State({}))


def is_key(x: Shaped) -> bool:
    """Whether `x` is an array of random keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def num_bytes(x: Shaped) -> int:
    """Bytes of an array. A random key counts as 8 bytes, the size of its two uint32 words."""
    return math.prod(x.shape) * (8 if is_key(x) else x.dtype.itemsize)


def check_dtype(dtype: DTypeLike | None) -> None:
    """Raise a TypeError for an argument `dtype` that is neither None nor a dtype of JAX."""
    try:
        parsed = jnp.dtype(jnp.float32 if dtype is None else dtype)
        if jnp.issubdtype(parsed, np.number) or parsed.kind == "b":
            return
    except (TypeError, ValueError, SyntaxError):  # a SyntaxError for a text of thousands of digits
        pass
    raise TypeError(f"dtype must be a dtype of numbers, such as 'bfloat16', got {shown(dtype)}.")


def array_problem(x: object) -> str:
    """Why JAX cannot use `x` as an array without a loss, with the repair; "" if it can."""
    shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
    if not isinstance(shape, tuple) or dtype is None:
        return f"is of type {type(x).__name__}; it must be an array of numbers"
    if isinstance(x, np.ma.MaskedArray):
        return "is a masked array, whose mask JAX drops; pass x.filled(value), and the mask as an array of its own"
    if not isinstance(dtype, np.dtype):  # of random keys
        return ""
    if not dtype.isnative:
        return f"is an array of {dtype.str}, another byte order; pass x.astype(x.dtype.newbyteorder('='))"
    if not (jnp.issubdtype(dtype, np.number) or dtype.kind == "b") or dtype.char in "mgG":  # timedelta64, longdouble
        return f"is an array of {dtype}; it must be an array of numbers that JAX has"
    return ""


def shard_bytes(x: Any) -> int:
    """Bytes of an array, abstract or not, on each of its devices."""
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def in_batches(items: Iterable[Item], bytes_of: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """The items in order, in lists of at most `most` bytes, or of a single item that has more."""
    batch: list[Item] = []
    size = 0
    for item in items:
        if batch and size + bytes_of(item) > most:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += bytes_of(item)
    if batch:
        yield batch


# A stack is below a list of layers, so its path has at least two names.
_PART_OF_STACK = re.compile(r"(.+/.+)/from (0|[1-9][0-9]*)", re.DOTALL)


def path_of(key_path: Sequence[Any]) -> str:
    """Path of a leaf, from a JAX key path or an NNX path tuple (`nnx.to_flat_state`).

    JAX traverses NNX Variables, so its key paths end in `.value`; the path omits that component.
    """
    if key_path and isinstance(key_path[-1], GetAttrKey) and key_path[-1].name == "value":
        key_path = key_path[:-1]
    return _join(key_path)


def named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """(path, leaf) of every leaf, in the order of `jax.tree.leaves`. NNX Variables add no component to the path.

    Example:
        >>> fm.named_leaves({"layers": [{"kernel": 1}, {"kernel": 2}]})
        [('layers/0/kernel', 1), ('layers/1/kernel', 2)]
    """
    named: list[tuple[str, Any]] = []
    root = tree.get_raw_value() if isinstance(tree, nnx.Variable) else tree
    if jax.tree_util.all_leaves([root]):
        return [("", root)]
    children = dict(_CHILDREN)
    _walk("", _CHILDREN.get(type(root), _one_level)(root), children, named)
    if any(issubclass(kind, HijaxVariable | jax.Ref) for kind in children):
        check_arrays(named)
    return named


def check_arrays(named: Iterable[tuple[str, object]]) -> None:
    """Raises a ShardingError for leaves that are hijax Variables or Refs in the place of arrays."""
    wrong = [(path, "hijax" if _is_hijax(x) else "ref") for path, x in named if _is_hijax(x) or isinstance(x, jax.Ref)]
    if wrong:
        modes = " and ".join(f"{mode}=True" for mode in sorted({mode for _, mode in wrong}))
        raise ShardingError(
            f"Variables must contain arrays, but these were created with {modes}, which Flax does not differentiate in "
            "a traced step. Remove the argument; flax_mesh calls make() with nnx.var_defaults(hijax=False, ref=False). "
            "Or convert the model: nnx.with_vars(model, hijax=False, ref=False, allow_duplicates=True).\n"
            + "\n".join(path_lines(f"{path}: {mode}=True" for path, mode in wrong))
        )


def _is_hijax(x: object) -> bool:
    kind = type(x)
    return isinstance(x, nnx.Variable) and not issubclass(kind, nnx.Variable)


def map_named(fn: Callable[[str, Any], object], tree: PyTree) -> PyTree:
    """A tree of the same structure with leaves `fn(path, leaf)`."""
    return jax.tree.unflatten(jax.tree.structure(tree), [fn(path, leaf) for path, leaf in named_leaves(tree)])


def indexed_paths(tree: PyTree) -> list[str]:
    """Paths of the leaves as Python indexes them, such as "['a']['b'][0]". Different leaves have different paths."""
    keys = [key for key, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    return [jax.tree_util.keystr(key).removesuffix(".value") for key in keys]


def nest(named: Iterable[tuple[str, object]]) -> dict[str, Any]:
    """A nested dict with string keys, from (path, leaf) pairs."""
    root: dict[str, Any] = {}
    for path, leaf in named:
        *parents, last = path.split("/")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return root


def owners_of(paths: Collection[str], parameters: Collection[str], *, tails: bool = False) -> dict[str, str]:
    """{path: parameter} for the arrays of an optimizer that belong to a parameter, given all `paths` of its state.

    The parameter is the longest suffix: "opt_state/0/mu/layers/0/q" belongs to "layers/0/q"; with `tails`, so does
    "opt_state/0/mu/layers/0/q/1". An array of the optimizer itself may have the name of a variable at the top level of
    the model, such as "step" or "count". It belongs to this variable only if all arrays beside it belong to variables.
    """

    @functools.cache
    def repeats_the_model(prefix: str) -> bool:
        beside = [path.removeprefix(prefix + "/") for path in paths if path.startswith(prefix + "/")]
        return prefix not in ("", "optimizer") and all(any(h in parameters for h in _heads(path)) for path in beside)

    def owner(path: str) -> str | None:
        for head in _heads(path) if tails else [path]:
            parts = head.split("/")
            for start in range(len(parts)):
                name = "/".join(parts[start:])
                if name in parameters and ("/" in name or repeats_the_model("/".join(parts[:start]))):
                    return name
        return None

    return {path: name for path in paths if (name := owner(path)) is not None}


def _heads(path: str) -> Iterable[str]:
    """The path and the paths of the nodes above it: "a/b/c", "a/b", "a"."""
    parts = path.split("/")
    return ("/".join(parts[:end]) for end in range(len(parts), 0, -1))


def in_stack(path: str, layers: Iterable[str]) -> str | None:
    """The scanned stack that contains `path`, or None: "layers" for "layers/q/kernel", None for "layers/0/q/kernel".

    `layers` are the paths of layer lists. In a list the next path component is the index of the layer. A stack has no
    such component; its leaves have a leading layer dim instead.
    """
    for stack in layers:
        if path.startswith(stack + "/") and not re.match(r"\d+(/|$)", path[len(stack) + 1 :]):
            return stack
    return None


def path_and_start(path: str) -> tuple[str, int]:
    """("layers/q", 2) for "layers/q/from 2", which is the part of a scanned stack from layer 2 on; else (path, 0)."""
    part = _PART_OF_STACK.fullmatch(path)
    return (part[1], int(part[2])) if part else (path, 0)


def layer_path(path: str, stack: str, index: int) -> str:
    """Path of layer `index` of a scanned stack as it would be in a list: ("layers/q", "layers", 3) -> "layers/3/q"."""
    return f"{stack}/{index}/{path[len(stack) + 1 :]}"


_Children = Callable[[Any], Iterable[tuple[object, PyTree]]]  # (name, child) pairs of a node


def _walk(
    prefix: str, pairs: Iterable[tuple[object, PyTree]], children: dict[type, _Children], named: list[tuple[str, Any]]
) -> None:
    """Appends the leaves at and below `pairs`. `jax.tree_util.tree_flatten_with_path` takes five times as long."""
    for name, node in pairs:
        kind = type(node)
        if issubclass(kind, nnx.Variable):
            node = node.get_raw_value()
            kind = type(node)
        if kind not in children:  # JAX distinguishes nodes from leaves by type
            children[kind] = _none if jax.tree_util.all_leaves([node]) else _one_level
        path = f"{prefix}{name}"
        if children[kind] is _none:
            named.append((path, node))
        else:
            _walk(path + "/", children[kind](node), children, named)


def _one_level(node: PyTree) -> list[tuple[str, PyTree]]:
    """Children of any node type that is registered with JAX."""
    pairs = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)[0]
    return [(_join(keys), child) for keys, child in pairs]


def _none(leaf: object) -> list[tuple[str, PyTree]]:
    return []


def _join(keys: Sequence[object]) -> str:
    return "/".join([str(getattr(key, _NAME_OF[type(key)]) if type(key) in _NAME_OF else key) for key in keys])


# JAX key type -> the attribute that appears in a path.
_NAME_OF: dict[type, str] = {DictKey: "key", FlattenedIndexKey: "key", GetAttrKey: "name", SequenceKey: "idx"}

# Children, in JAX's order, of the node types that are common in large trees; others take the slower `_one_level`.
_CHILDREN: dict[type, _Children] = {
    dict: lambda node: [(key, node[key]) for key in sorted(node)],
    list: enumerate,
    tuple: enumerate,
    nnx.State: lambda node: sorted(node.raw_mapping.items()),
}


# Scanned stacks

# Distinguishes the scanned stacks under `layers` from single layers, by shapes and, in a module, by Flax's layers.
#
# A stack, made by nnx.vmap or nnx.scan, has one array per parameter for all of its layers:
#
#     layers/up/kernel (3, 8, 16)    layers/up/bias (3, 16)    a stack of three layers
#     inc/conv/kernel  (3, 3, 1, 8)  inc/conv/bias  (8,)       one layer, a convolution
#     norm/scale       (8,)          norm/bias      (8,)       one layer, since an nnx.LayerNorm has one dim
#
# An nnx.State has no classes, so there the last one counts as a stack of eight.
_EMPTY: Mapping[str, int] = {}
# Number of dims of the variables of Flax's layers. One dim more is the layer dim of nnx.vmap or nnx.scan.
DIMS: dict[type[nnx.Module], dict[str, int]] = {
    nnx.Linear: {"kernel": 2, "bias": 1},
    nnx.Embed: {"embedding": 2},
    nnx.LayerNorm: {"scale": 1, "bias": 1},
    nnx.RMSNorm: {"scale": 1},
    nnx.BatchNorm: {"scale": 1, "bias": 1, "mean": 1, "var": 1},
}


def ranks_of(module: nnx.Module) -> dict[str, int]:
    """Names of the variables of a Flax layer, with their numbers of dims; empty for any other class."""
    if type(module) is nnx.Conv:
        return {"kernel": len(module.kernel_size) + 2, "bias": 1}
    return DIMS.get(type(module), {})


def ranks_in(model: PyTree) -> dict[str, int]:
    """Path of every variable of a Flax layer in the model, with its number of dims outside of a stack."""
    modules = nnx.iter_modules(model, graph=True)
    return {path_of((*at, name)): dims for at, part in modules for name, dims in ranks_of(part).items()}


def without_single_layers(
    layers: Sequence[str], leaves: Sequence[tuple[str, object]], ranks: Mapping[str, int] = _EMPTY
) -> tuple[str, ...]:
    """The paths of `layers` except paths of single layers, modules that are neither a list nor a scanned stack.

    Args:
        layers: Paths of lists, stacks and single layers.
        leaves: (path, leaf) pairs of a model or of a tree of its arrays.
        ranks: `ranks_in` of the model, if it is known.
    """
    return tuple(path for path in layers if not _is_single(path, leaves, ranks))


def module_at(model: PyTree, path: str) -> PyTree:
    """The attribute at a path such as "encoder/layers". Raises AttributeError if the model lacks it."""
    for part in path.split("/"):
        model = model[int(part)] if part.isdigit() and len(part) < 10 else getattr(model, part)
    return model


def is_single_layer(module: object) -> bool:
    """Whether a module is one layer: neither a list nor a scanned stack."""
    if not isinstance(module, nnx.Pytree):
        return False
    return _has_no_layer_dim(
        {path: leaf.shape for path, leaf in named_leaves(nnx.state(module, graph=True))}, ranks_in(module)
    )


def _is_single(top: str, leaves: Iterable[tuple[str, object]], ranks: Mapping[str, int]) -> bool:
    start = len(top) + 1
    shapes = {path[start:]: getattr(leaf, "shape", ()) for path, leaf in leaves if path.startswith(f"{top}/")}
    if any(path_and_start(whole := f"{top}/{path}")[0] != whole for path in shapes):
        return False  # the chunks of a stack in a pipeline
    return _has_no_layer_dim(shapes, {path: ranks[f"{top}/{path}"] for path in shapes if f"{top}/{path}" in ranks})


def _has_no_layer_dim(shapes: Mapping[str, tuple[int, ...]], ranks: Mapping[str, int]) -> bool:
    """Whether a module is one layer, neither a list nor a stack, given the shapes of its arrays by path inside it.

    Scalars prove nothing: a stack may have one counter for all of its layers.
    """
    shapes = {path: shape for path, shape in shapes.items() if not path.split("/")[0].isdigit()}
    sizes = {shape[0] for shape in shapes.values() if shape}
    return bool(shapes) and (len(sizes) != 1 or any(len(shape) == ranks.get(path) for path, shape in shapes.items()))
