"""Where the shards of an array are placed: a sharding on another group, one array from the parts of several groups.

Nothing here copies between devices; `put_host` alone puts numbers of the host on them.
"""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def sharding_on(sharding: Any, mesh: Mesh) -> NamedSharding:
    """The same layout on `mesh`, that of another group; what is no NamedSharding becomes replicated."""
    spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
    return NamedSharding(mesh, spec)


def on_group(x: jax.Array, mesh: Mesh) -> jax.Array:
    """The part of an array, replicated over groups, that is stored on one group; nothing is copied."""
    here = set(mesh.devices.flat)
    shards = [shard.data for shard in x.addressable_shards if shard.device in here]
    return jax.make_array_from_single_device_arrays(x.shape, sharding_on(x.sharding, mesh), shards)


def on_all_groups(parts: Iterable[jax.Array], sharding: NamedSharding) -> jax.Array:
    """The array replicated over all groups, from its equal parts on those of this process; nothing is copied."""
    parts = list(parts)
    shards = [shard.data for part in parts for shard in part.addressable_shards]
    return jax.make_array_from_single_device_arrays(parts[0].shape, sharding, shards)


def put_host(x: Any, sharding: NamedSharding) -> jax.Array:
    """An array of the host, the same in every process that has devices of `sharding`, on those devices."""
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    x = np.asarray(x)  # jax.device_put would compare it over all processes, also those that never come here
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index], dtype=x.dtype)


def remote_array(like: Any) -> jax.Array:
    """An array of which this process has no shard: what other processes hold, known by shape, dtype and sharding."""
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, [], dtype=like.dtype)
