"""Shardings and arrays on groups: the same sharding on another group, one array from the parts of several groups.

No function here copies between devices. `put_host` copies from the host.
"""

from collections.abc import Iterable

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding
from jax.typing import ArrayLike

from flax_mesh.modes import array_from
from flax_mesh.sharding.memory import host_kind, placed


def sharding_on(sharding: Sharding | None, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """The same spec and memory on `mesh`, the mesh of another group. Other types of shardings become replicated."""
    if not isinstance(sharding, NamedSharding):
        return NamedSharding(mesh, PartitionSpec())
    return placed(mesh, sharding.spec, host_kind(sharding))


def on_group(x: jax.Array, mesh: Mesh) -> jax.Array:
    """The shards on one group of an array that is replicated over groups, without a copy."""
    here = set(mesh.devices.flat)
    shards = [shard.data for shard in x.addressable_shards if shard.device in here]
    return jax.make_array_from_single_device_arrays(x.shape, sharding_on(x.sharding, mesh), shards)


def on_all_groups(parts: Iterable[jax.Array], sharding: NamedSharding) -> jax.Array:
    """An array replicated over all groups, from its equal parts on the local groups, without a copy."""
    parts = list(parts)
    shards = [shard.data for part in parts for shard in part.addressable_shards]
    return jax.make_array_from_single_device_arrays(parts[0].shape, sharding, shards)


def put_host(x: ArrayLike, sharding: NamedSharding) -> jax.Array:
    """Puts a host array, equal in every process that has devices of `sharding`, on those devices."""
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)  # pyright: ignore[reportUnknownMemberType] (of JAX)
    x = np.asarray(x)  # jax.device_put would compare it over all processes, including those that do not make this call
    return array_from(x.shape, sharding, lambda index: x[index], x.dtype)


def remote_array(like: jax.ShapeDtypeStruct) -> jax.Array:
    """An array whose shards all belong to other processes; its shape, dtype and sharding are known."""
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, [], dtype=like.dtype)
