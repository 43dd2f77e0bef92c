"""The adapters of a model: for a weight `kernel`, the Variables `kernel_lora_a` and `kernel_lora_b` beside it."""

# JAX and Flax have no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeArgument=false

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer

from flax_mesh.fields import check_types
from flax_mesh.sharding.annotations import FOLLOWS
from flax_mesh.tree import path_of

A, B, SCALE = "_lora_a", "_lora_b", "scale"
Dims = tuple[int | None, ...]  # for each dim of a factor, the dim of the weight that it is; None for the rank


class Adapter(NamedTuple):
    """The factors of a weight: their paths, their dims, and alpha / rank."""

    path_a: str
    path_b: str
    dims_a: Dims
    dims_b: Dims
    scale: float


def adapters_of(state: nnx.State) -> dict[str, Adapter]:
    """The path of each adapted weight in the state of a model -> its adapter."""
    metadata = {path_of(path): x.get_metadata() for path, x in nnx.to_flat_state(state) if isinstance(x, nnx.LoRAParam)}
    adapters = {}
    for path, of_a in metadata.items():
        weight = path.removesuffix(A)
        of_b = metadata.get(weight + B, {})
        if path != weight and SCALE in of_a and SCALE in of_b:
            adapters[weight] = Adapter(path, weight + B, of_a[FOLLOWS][1], of_b[FOLLOWS][1], of_a[SCALE])
    return adapters


def set_adapter(owner: Any, name: str, a: jax.Array, b: jax.Array, dims: tuple[Dims, Dims], scale: float) -> None:
    """Add the factors of the weight `name` to the module that has it."""
    for suffix, x, each in zip((A, B), (a, b), dims, strict=True):
        metadata: dict[str, Any] = {FOLLOWS: (name, each), SCALE: scale}
        setattr(owner, name + suffix, nnx.LoRAParam(x, **metadata))


@check_types
def merge_lora(model: nnx.Pytree) -> Any:
    """The model with the weights W + alpha / rank * A B, in the dtype of W, and without adapters.

    The sums are computed in float32. `model` is changed and returned; each weight keeps its sharding.

    Example:
        >>> from flax_mesh.lora import add_lora, merge_lora
        >>> make = lambda: nnx.Linear(64, 256, rngs=nnx.Rngs(0))
        >>> model = add_lora(make, lambda model, x: model(x).sum(), jnp.ones((8, 64)), rank=4, modules="kernel")()
        >>> sorted(path for path, _ in fm.named_leaves(nnx.state(merge_lora(model))))
        ['bias', 'kernel']
    """
    variables = variables_of(model)
    for path, each in adapters_of(nnx.state(model, graph=True)).items():
        weight, a, b = (variables[name] for name in (path, each.path_a, each.path_b))
        weight[...] = _merged(weight[...], a[...], b[...], each)
        for name in (each.path_a, each.path_b):
            owner, attribute = owner_of(model, name)
            delattr(owner, attribute)
    return model


def _merged(weight: jax.Array, a: jax.Array, b: jax.Array, adapter: Adapter) -> jax.Array:
    def merge(weight: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        out = range(weight.ndim)
        of_a, of_b = ([weight.ndim if d is None else d for d in dims] for dims in (adapter.dims_a, adapter.dims_b))
        change = jnp.einsum(a.astype(jnp.float32), of_a, b.astype(jnp.float32), of_b, out)
        return (weight.astype(jnp.float32) + adapter.scale * change).astype(weight.dtype)

    if isinstance(weight, Tracer):
        return merge(weight, a, b)
    return jax.jit(merge, out_shardings=weight.sharding)(weight, a, b)


def variables_of(model: Any) -> dict[str, nnx.Variable]:
    """path -> Variable, under the first path of each."""
    return {path_of(path): x for path, x in nnx.iter_graph(model, graph=True) if isinstance(x, nnx.Variable)}


def owner_of(model: Any, path: str) -> tuple[Any, str]:
    """The module that has the Variable at a path, and the name of its attribute there."""
    *parents, name = path.split("/")
    at = model
    for part in parents:
        at = at[int(part)] if isinstance(at, Sequence) else at[part] if isinstance(at, Mapping) else getattr(at, part)
    return at, name
