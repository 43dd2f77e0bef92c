"""Placement of a batch: arrays (microbatch, row, ...) on the groups that read them."""

import math
from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_mesh.axes import PartitionAxis
from flax_mesh.mpmd.mesh import MpmdMesh
from flax_mesh.mpmd.transport.layout import on_group, put_host
from flax_mesh.step.batch import microbatch_spec, microbatched_shape
from flax_mesh.tree import is_key


def place_array(x: jax.Array | np.ndarray, count: int, mesh: MpmdMesh, group: int, axes: PartitionAxis) -> jax.Array:
    """Places an array of a batch on a group, split into `count` microbatches; a scalar is repeated for each microbatch.

    The result may use the memory of a numpy array. An array on the mesh of all groups is already replicated over the
    groups; any other array is transferred through the host.
    """
    shape = microbatched_shape(x.shape, count)
    if is_key(x):
        bits = _place(jax.random.key_data(x), (*shape, *jax.random.key_data(x).shape[x.ndim :]), mesh, group, axes)
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(x))
    return _place(x, shape, mesh, group, axes)


def _place(
    x: jax.Array | np.ndarray, shape: tuple[int, ...], mesh: MpmdMesh, group: int, axes: PartitionAxis
) -> jax.Array:
    sharding = _sharding(shape, mesh.unstack[group], axes)
    there = getattr(x, "sharding", None)
    if isinstance(x, jax.Array) and isinstance(there, NamedSharding) and there.mesh == mesh.jax_mesh:
        return _reshape(shape, sharding)(on_group(x, mesh.unstack[group]))
    x = np.asarray(x)
    return put_host(x.reshape(shape) if x.size == math.prod(shape) else np.broadcast_to(x, shape), sharding)


@lru_cache(maxsize=256)
def _sharding(shape: tuple[int, ...], mesh: Mesh, axes: PartitionAxis) -> NamedSharding:
    """Sharding of an array (microbatch, row, ...) on a group."""
    return NamedSharding(mesh, PartitionSpec(None, *microbatch_spec(shape[1:], mesh, axes)))


@lru_cache(maxsize=256)
def _reshape(shape: tuple[int, ...], sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    def reshaped(x: jax.Array) -> jax.Array:
        return x.reshape(shape) if x.size == math.prod(shape) else jnp.broadcast_to(x, shape)

    return jax.jit(reshaped, out_shardings=sharding)
