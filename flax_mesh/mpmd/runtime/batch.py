"""Placement of a batch: arrays (microbatch, row, ...) on the groups that read them."""

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from flax_mesh.axes import PartitionAxis
from flax_mesh.mpmd.mesh import MpmdMesh
from flax_mesh.mpmd.transport.layout import on_group, put_host
from flax_mesh.sharding.rules import fit_spec


def place_array(x: Any, count: int, mesh: MpmdMesh, group: int, axes: PartitionAxis) -> jax.Array:
    """Places an array of a batch on a group, split into `count` microbatches.

    An array on the mesh of all groups is already replicated over them; any other is transferred through the host.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        bits = place_array(jax.random.key_data(x), count, mesh, group, axes)
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(x))
    shape = (count, x.shape[0] // count, *x.shape[1:])
    sharding = _sharding(shape, mesh.unstack[group], axes)
    if not isinstance(getattr(x, "sharding", None), NamedSharding) or x.sharding.mesh != mesh.jax_mesh:
        return put_host(np.asarray(x).reshape(shape), sharding)
    return _reshape(shape, sharding)(on_group(x, mesh.unstack[group]))


@lru_cache(maxsize=256)
def _sharding(shape: tuple[int, ...], mesh: Mesh, axes: PartitionAxis) -> NamedSharding:
    """Sharding of an array (microbatch, row, ...) on a group. The third dim of a 3-D array is the sequence."""
    logical = (None, "batch", "sequence") if len(shape) == 3 else (None, "batch")
    # Rows are sharded if they are divisible; axes that do not divide a dim are dropped.
    spec, _ = fit_spec("batch", shape, axes.resolve(logical), mesh)
    return NamedSharding(mesh, spec)


@lru_cache(maxsize=256)
def _reshape(shape: tuple[int, ...], sharding: NamedSharding) -> Any:
    return jax.jit(lambda x: x.reshape(shape), out_shardings=sharding)
