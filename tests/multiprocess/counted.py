"""A CPU model of `jax.device_put` between processes on GPU and TPU, where calls are matched only by their number."""

from typing import Any

import jax
from jax.sharding import NamedSharding, SingleDeviceSharding

from flax_mesh.mpmd.transport.server import transport_of


class CountedMoves:
    """Transfers each shard by the transfer server under the number of the call: the n-th call of one process is matched
    with the n-th call of another, whatever arrays they are for."""

    def __init__(self, calls: int = 0):
        self.calls = calls

    def __call__(self, array: jax.Array, target: NamedSharding) -> jax.Array:
        check_as_jax_does(array, target)
        here, shards = jax.process_index(), {shard.device: shard.data for shard in array.addressable_shards}
        place = jax.ShapeDtypeStruct(target.shard_shape(array.shape), array.dtype)
        transport = transport_of(jax.local_devices()[0].client)
        arrived = []
        sources, targets = (devices_of(sharding) for sharding in (array.sharding, target))
        for device, to in zip(sources, targets, strict=True):
            self.calls += 1
            name = ((), (), "counted", self.calls)
            if device in shards:
                transport.send(name, to.process_index, [shards[device]])
            elif to.process_index == here:
                there = jax.ShapeDtypeStruct(place.shape, place.dtype, sharding=SingleDeviceSharding(to))
                arrived += transport.receive(name, device.process_index, [there])
        return jax.make_array_from_single_device_arrays(array.shape, target, arrived, dtype=array.dtype)


def devices_of(sharding: Any) -> list[Any]:
    return list(sharding.mesh.devices.flat)


def check_as_jax_does(array: jax.Array, target: NamedSharding) -> None:
    """The checks of JAX 0.10.2 before a transfer by the runtime (`_is_supported_cross_host_transfer`), except for the
    backend."""
    source = array.sharding
    assert isinstance(array, jax.Array) and array.committed
    kinds = {device.device_kind for sharding in (source, target) for device in sharding.device_set}
    assert len(kinds) == 1
    layouts = [sharding._to_xla_hlo_sharding(array.ndim) for sharding in (source, target)]
    assert layouts[0] == layouts[1]
    processes = [{device.process_index for device in sharding.device_set} for sharding in (source, target)]
    assert processes[0] != processes[1]
