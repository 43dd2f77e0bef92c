"""Copies of arrays from one group to another within this process, with the same layout.

For short actions, most of the host's time is spent in `jax.device_put`: for every array, its Python checks find that
only the devices change, which takes ten times as long as the runtime's copy that it then calls. Here the check is made
once for each pair of shardings, and the runtime's copy is called directly.
"""

from collections.abc import Callable
from functools import lru_cache

import jax
from jax.sharding import NamedSharding, Sharding

from flax_mesh.jax_compat import device_copy


def move(x: jax.Array, sharding: Sharding) -> jax.Array:
    """`jax.device_put(x, sharding)`, faster if `x` has the same layout on other devices."""
    return mover(x.sharding, sharding)(x)


@lru_cache(maxsize=4096)
def mover(source: Sharding, target: Sharding) -> Callable[[jax.Array], jax.Array]:
    """`move` for arrays with sharding `source`."""
    copy = device_copy(target) if _differ_in_devices_only(source, target) else None
    return copy or (lambda x: jax.device_put(x, target))


def _differ_in_devices_only(source: Sharding, target: Sharding) -> bool:
    """Whether shard k has the same slices in both shardings, on different devices of this process."""
    if not (isinstance(source, NamedSharding) and isinstance(target, NamedSharding)):
        return False
    local = source.is_fully_addressable and target.is_fully_addressable
    disjoint = source.device_set.isdisjoint(target.device_set)
    same = source.spec == target.spec and source.memory_kind == target.memory_kind
    return local and disjoint and same and dict(source.mesh.shape) == dict(target.mesh.shape)
