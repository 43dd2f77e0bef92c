"""Values of the rows of a batch, such as the log-probabilities of their tokens."""

# JAX and Flax have no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false, reportMissingTypeArgument=false

from collections.abc import Callable
from functools import lru_cache

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_mesh.axes import DEFAULT_AXES, PartitionAxis
from flax_mesh.fields import check_types
from flax_mesh.step.batch import place_batch
from flax_mesh.tree import PyTree


@check_types
def map_rows(
    function: Callable[..., jax.Array],
    model: nnx.Module,
    batch: PyTree,
    *,
    axes: PartitionAxis = DEFAULT_AXES,
    parts: int = 1,
) -> np.ndarray:
    """The array `function(model, batch)` on the host of every process, whose first dim is the rows of the batch.

    One program is compiled for each function, mesh and shape; pass the same function object again.

    Args:
        function: It must compute each row without the others, such as `flax_mesh.models.token_log_probs`.
        model: A model whose arrays are on a mesh.
        batch: A tree of NumPy arrays with equal numbers of rows, the same in all processes.
        axes: Maps the logical axes "batch" and "sequence" to mesh axes.
        parts: Computes the rows in so many equal parts, one after another. Rows of zeros are added if the mesh does not
            divide a part.

    Example:
        >>> from flax_mesh.models import DecoderConfig, make_decoder, token_log_probs
        >>> from flax_mesh.train import map_rows
        >>> make = lambda: make_decoder(DecoderConfig(num_layers=1), nnx.Rngs(0))
        >>> model = fm.init_model(make, fm.abstract_state(make, fm.create_mesh("fsdp:8")))
        >>> tokens = np.zeros((6, 16), np.int32)
        >>> map_rows(token_log_probs, model, {"inputs": tokens, "targets": tokens}, parts=2).shape
        (6, 16)
    """
    graphdef, state = nnx.split(model, graph=True)
    mesh = jax.tree.leaves(state)[0].sharding.mesh
    count = len(jax.tree.leaves(batch)[0])
    rows, results = -(-count // parts), []
    for first in range(0, count, rows):
        part = jax.tree.map(lambda x, i=first: x[i : i + rows], batch)
        pad = -len(jax.tree.leaves(part)[0]) % mesh.size
        padded = jax.tree.map(lambda x, pad=pad: np.pad(x, [(0, pad), *[(0, 0)] * (x.ndim - 1)]), part)
        with jax.set_mesh(mesh):
            computed = _compiled(function, mesh)(graphdef, state, place_batch(padded, mesh, axes))
        results.append(np.asarray(computed)[: len(computed) - pad])
    return np.concatenate(results)


@lru_cache(maxsize=8)
def _compiled(function: Callable[..., jax.Array], mesh: Mesh) -> Callable[..., jax.Array]:
    def call(graphdef: nnx.GraphDef, state: nnx.State, batch: PyTree) -> jax.Array:
        return function(nnx.merge(graphdef, state), batch)

    everywhere = NamedSharding(mesh, PartitionSpec())  # so that every process can read the result
    return jax.jit(call, static_argnums=0, out_shardings=everywhere)
