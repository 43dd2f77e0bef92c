"""mpmd.device_put: arrays from one group of devices to another, within a process or between several.

A transfer moves whole shards: shard k of the result comes from device k of the source. What first has to change, the
layout, changes in a program on the source's devices, so that the host waits for nothing: a `jax.device_put` that
changes the layout itself goes through the host, and blocks until the array is computed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from flax_mesh.mpmd.array import (
    MpmdArray,
    as_jax_array,
    find_mpmd_mesh,
    is_fully_local_sharding,
    is_fully_remote_sharding,
    is_local_device,
    is_weakly_typed,
)
from flax_mesh.mpmd.mesh import current_mpmd_mesh
from flax_mesh.mpmd.transport.local_copy import move
from flax_mesh.mpmd.transport.server import check_key, transport_of


@dataclass(frozen=True)
class Route:
    """How an array goes from one sharding to another.

    `layout` is the one that it takes on the source's devices first. `pairs` says for every device of the target from
    which device its shard comes, and which part of the shard there it is; None for all of it.
    """

    layout: Sharding
    pairs: tuple[tuple[Any, Any, tuple[slice, ...] | None], ...]

    @property
    def cuts(self) -> bool:
        return any(part is not None for _, _, part in self.pairs)


def device_put(x: Any, sharding: Sharding, key: Any = None) -> MpmdArray:
    """`x` laid out by `sharding`, on the same or other devices; every process calls it, and gets an MpmdArray.

    `x` is an MpmdArray, an array of JAX, or what numpy takes for one. If it is committed to devices, a process with
    devices of both moves it there, one with devices of `x` alone sends, one with devices of `sharding` alone receives,
    and any other does nothing. No process waits for another, nor for `x` to be computed. If `x` is not committed
    (a number, a numpy array), every process puts its own, so it must be equal in all.

    Between two groups the n-th call of one process is paired with the n-th call of the other that has the same `key`:
    a string, an integer, a tuple of these, or None. So only calls with equal keys need an order. What arrives is
    never weakly typed.

    Where `x` and `sharding` have different numbers of devices, all of `x` is first gathered on each of its devices.
    ValueError, in every process, where `sharding` does not fit the shape.
    """
    x = _as_array(x)
    _check_fit(x.shape, sharding)
    check_key(key)
    if not (isinstance(x, MpmdArray) or (isinstance(x, jax.Array) and x.committed)):
        moved = _put_everywhere(x, sharding)
    elif is_fully_remote_sharding(x.sharding) and is_fully_remote_sharding(sharding):
        moved = None
    elif _ids(x.sharding, x.shape) == _ids(sharding, x.shape):
        moved = _relayout(_strong(as_jax_array(x)), sharding)
    elif is_fully_local_sharding(x.sharding) and is_fully_local_sharding(sharding):
        moved = _move(_strong(as_jax_array(x)), sharding)
    else:
        moved = _exchange(x, sharding, key)
    mpmd_mesh = find_mpmd_mesh(sharding, getattr(x, "mpmd_mesh", None), current_mpmd_mesh())
    return MpmdArray(x.shape, x.dtype, sharding, moved, mpmd_mesh)


@lru_cache(maxsize=4096)
def find_route(source: Sharding, target: Sharding, shape: tuple[int, ...]) -> Route:
    """The route of an array of `shape`: by the layout of `target` on as many devices, else by all of it on each."""
    sources, targets = source.devices_indices_map(shape), target.devices_indices_map(shape)
    devices, layout = list(sources), None
    if list(sources.values()) == list(targets.values()):
        layout = source
    elif len(sources) == len(targets) and isinstance(target, NamedSharding):
        mesh = target.mesh
        there = Mesh(np.array(devices).reshape(mesh.axis_sizes), mesh.axis_names, axis_types=mesh.axis_types)
        layout = NamedSharding(there, target.spec)
    if layout is not None:
        return Route(layout, tuple((device, to, None) for device, to in zip(devices, targets, strict=True)))
    whole = source if source.is_fully_replicated else NamedSharding(Mesh(np.array(devices), ("all",)), PartitionSpec())
    pairs = []
    for k, (to, part) in enumerate(targets.items()):
        near = [device for device in devices if device.process_index == to.process_index] or devices
        pairs.append((near[k % len(near)], to, part))
    return Route(whole, tuple(pairs))


def _as_array(x: Any) -> Any:
    """`x` if it is of JAX, else a numpy array of the dtype that JAX would give it."""
    if isinstance(x, Tracer):
        raise ValueError(
            "mpmd.device_put was called inside a trace, such as that of jax.jit or jax.grad. It moves arrays between "
            "programs: call it from plain Python. Inside a program write with_sharding_constraint."
        )
    if isinstance(x, MpmdArray | jax.Array):
        return x
    dtype = jax.dtypes.canonicalize_dtype(np.asarray(x).dtype)
    return np.asarray(x, dtype)  # of the number itself, so that one too large for int32 is an OverflowError


def _check_fit(shape: tuple[int, ...], sharding: Sharding) -> None:
    if not isinstance(sharding, Sharding):
        raise ValueError(
            f"sharding must be a Sharding, got {sharding!r}. For a PartitionSpec write "
            "NamedSharding(mpmd_mesh.unstack[i], spec)."
        )
    if isinstance(sharding, NamedSharding) and len(sharding.spec) > len(shape):
        raise ValueError(f"The array has shape {shape}, but {sharding.spec} lays out {len(sharding.spec)} dims.")
    sharding.shard_shape(shape)  # ValueError where a dim does not divide


def _put_everywhere(x: Any, sharding: Sharding) -> jax.Array | None:
    """The part of this process, from its own `x`."""
    if is_fully_remote_sharding(sharding):
        return None
    x = _strong(x)
    if is_fully_local_sharding(sharding):
        return jax.device_put(x, sharding)
    # jax.device_put would first compare x over all processes, also with those that never come here.
    parts = sharding.addressable_devices_indices_map(x.shape)
    return _assemble(x, sharding, jax.device_put([x[part] for part in parts.values()], list(parts)))


def _move(value: jax.Array, sharding: Sharding) -> jax.Array:
    """`value`, which is all on devices of this process, by `sharding`, which is too."""
    route = find_route(value.sharding, sharding, value.shape)
    laid_out = _relayout(value, route.layout)
    if not route.cuts:
        return move(laid_out, sharding)
    pieces = _pieces(laid_out, route)
    return _assemble(value, sharding, jax.device_put(list(pieces.values()), list(pieces)))


def _exchange(x: Any, sharding: Sharding, key: Any) -> jax.Array | None:
    """The part of this process, of which other processes have or get a part too."""
    route = find_route(x.sharding, sharding, x.shape)
    pieces: dict[Any, jax.Array] = {}
    if not is_fully_remote_sharding(x.sharding):
        # A copy in any case: what is sent is read later, when a next program may have taken the buffer by donation.
        pieces = _pieces(copy_to(route.layout)(_strong(as_jax_array(x))), route)
    near: list[Any] = []
    senders: dict[int, list[Any]] = {}  # another process -> devices of this one, whose shards it sends
    receivers: dict[int, list[Any]] = {}  # another process -> its devices, which get shards from here
    for device, to, _ in route.pairs:
        if is_local_device(to):
            (near if to in pieces else senders.setdefault(device.process_index, [])).append(to)
        elif to in pieces:
            receivers.setdefault(to.process_index, []).append(to)
    transport = transport_of(_local_client(x.sharding, sharding))
    name = transport.calls.name(_ids(x.sharding, x.shape), _ids(sharding, x.shape), key)
    for process, devices in receivers.items():
        transport.send(name, process, [pieces[to] for to in devices])
    shards = jax.device_put([pieces[to] for to in near], near)
    shard_shape = sharding.shard_shape(x.shape)
    for process, devices in senders.items():
        places = [jax.ShapeDtypeStruct(shard_shape, x.dtype, sharding=SingleDeviceSharding(to)) for to in devices]
        shards += transport.receive(name, process, places)
    return _assemble(x, sharding, shards) if shards else None


def _pieces(laid_out: jax.Array, route: Route) -> dict[Any, jax.Array]:
    """For every device of the target that gets its shard from a device of this process: the shard, still there."""
    shards = {shard.device: shard.data for shard in laid_out.addressable_shards}
    pairs = [(shards[device], to, part) for device, to, part in route.pairs if device in shards]
    return {to: shard if part is None else shard[part] for shard, to, part in pairs}


def _relayout(value: jax.Array, layout: Sharding) -> jax.Array:
    return value if value.sharding == layout else copy_to(layout)(value)


@lru_cache(maxsize=4096)
def copy_to(layout: Sharding) -> Callable[[jax.Array], jax.Array]:
    """A jitted copy into `layout`, on the same devices."""
    return jax.jit(jnp.copy, out_shardings=layout)


def _strong(x: Any) -> Any:
    """`x` without its weak type, which a transfer between processes would lose."""
    return jax.lax.convert_element_type(x, x.dtype) if is_weakly_typed(x) else x


def _assemble(x: Any, sharding: Sharding, shards: list[jax.Array]) -> jax.Array:
    """An array of the shape of `x` from `shards`, which are on their devices already, in the memory of `sharding`."""
    memory = str(shards[0].sharding.memory_kind)
    array = jax.make_array_from_single_device_arrays(x.shape, sharding.with_memory_kind(memory), shards)
    return array if sharding.memory_kind == memory else jax.device_put(array, sharding)


@lru_cache(maxsize=4096)
def _ids(sharding: Sharding, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(device.id for device in sharding.devices_indices_map(shape))


def _local_client(*shardings: Sharding) -> Any:
    devices = [device for sharding in shardings for device in sharding.device_set]
    return next(device for device in devices if is_local_device(device)).client
