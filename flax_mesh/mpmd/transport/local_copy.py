"""Arrays from the devices of one group to those of another, all of this process, laid out alike.

The host's cost of a short action of a pipeline is mostly that of `jax.device_put`: for every array it finds out anew
that nothing but the devices changes, in ten times the time of the copy that it then calls. Here that is found out once
for a pair of shardings, and the same copy called.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding
from jaxlib import xla_client

# What `jax.device_put` calls in the end. No public name has it, so nothing may depend on it: None where it is gone.
COPY: Callable[..., Any] | None = getattr(xla_client, "batched_copy_array_to_devices_with_sharding", None)


def move(x: jax.Array, sharding: Sharding) -> jax.Array:
    """`jax.device_put(x, sharding)`, which waits for nothing; faster where `x` lies alike on other devices."""
    return mover(x.sharding, sharding)(x)


@lru_cache(maxsize=4096)
def mover(source: Sharding, target: Sharding) -> Callable[[jax.Array], jax.Array]:
    """`move` of arrays that lie by `source`."""
    copy, devices = COPY, getattr(target, "_internal_device_list", None)
    if copy is None or devices is None or not _alike(source, target):
        return lambda x: jax.device_put(x, target)
    there = [devices.addressable_device_list], [target], [xla_client.ArrayCopySemantics.REUSE_INPUT]

    def moved(x: Any) -> jax.Array:
        # Random keys have no buffers of their own; of an array that is deleted the copy would read freed memory.
        if not isinstance(x, xla_client.ArrayImpl) or x.is_deleted():
            return jax.device_put(x, target)
        try:
            return copy([x], *there)[0]
        except jax.errors.JaxRuntimeError:  # jax.transfer_guard takes this for an implicit transfer
            return jax.device_put(x, target)

    return moved


def _alike(source: Sharding, target: Sharding) -> bool:
    """Whether shard k of the one is shard k of the other, on other devices of this process."""
    if not (isinstance(source, NamedSharding) and isinstance(target, NamedSharding)):
        return False
    mine = source.is_fully_addressable and target.is_fully_addressable
    apart = source.device_set.isdisjoint(target.device_set)
    same = source.spec == target.spec and source.memory_kind == target.memory_kind
    return mine and apart and same and dict(source.mesh.shape) == dict(target.mesh.shape)
