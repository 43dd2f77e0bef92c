"""Placement of a batch: arrays (microbatch, row, ...) on the groups that read them."""

from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_mesh.axes import PartitionAxis
from flax_mesh.mpmd.mesh import MpmdMesh
from flax_mesh.mpmd.transport.layout import on_group, put_host
from flax_mesh.step.batch import microbatch_spec
from flax_mesh.tree import is_key


def place_array(x: Any, count: int, mesh: MpmdMesh, group: int, axes: PartitionAxis) -> jax.Array:
    """Places an array of a batch on a group, split into `count` microbatches.

    An array on the mesh of all groups is already replicated over them; any other is transferred through the host.
    """
    if is_key(x):
        bits = place_array(jax.random.key_data(x), count, mesh, group, axes)
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(x))
    shape = (count, x.shape[0] // count, *x.shape[1:])
    sharding = _sharding(shape, mesh.unstack[group], axes)
    if not isinstance(getattr(x, "sharding", None), NamedSharding) or x.sharding.mesh != mesh.jax_mesh:
        return put_host(np.asarray(x).reshape(shape), sharding)
    return _reshape(shape, sharding)(on_group(x, mesh.unstack[group]))


@lru_cache(maxsize=256)
def _sharding(shape: tuple[int, ...], mesh: Mesh, axes: PartitionAxis) -> NamedSharding:
    """Sharding of an array (microbatch, row, ...) on a group."""
    return NamedSharding(mesh, PartitionSpec(None, *microbatch_spec(shape[1:], mesh, axes)))


@lru_cache(maxsize=256)
def _reshape(shape: tuple[int, ...], sharding: NamedSharding) -> Any:
    return jax.jit(lambda x: x.reshape(shape), out_shardings=sharding)
