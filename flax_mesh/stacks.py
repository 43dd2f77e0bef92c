"""Distinguishes the scanned stacks under `layers` from single layers, by shapes and, in a module, by Flax's layers.

A stack, made by nnx.vmap or nnx.scan, has one array per parameter for all of its layers:

    layers/up/kernel (3, 8, 16)    layers/up/bias (3, 16)    a stack of three layers
    inc/conv/kernel  (3, 3, 1, 8)  inc/conv/bias  (8,)       one layer, a convolution
    norm/scale       (8,)          norm/bias      (8,)       one layer, since an nnx.LayerNorm has one dim; an nnx.State
                                                             has no classes, so there it counts as a stack of eight
"""

from collections.abc import Iterable, Mapping, Sequence

from flax import nnx

from flax_mesh.tree import PyTree, named_leaves, path_and_start, path_of

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
