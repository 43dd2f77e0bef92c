"""mpmd.device_put: transfers of arrays from one group of devices to another, within and between processes.

A transfer copies entire shards: device k of the target receives the shard of device k of the source. If the layouts
differ, a jitted program first changes the layout on the source's devices. `jax.device_put` alone would change it on the
host and block until the array is computed.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from flax_mesh.mesh.torus.torus import DeviceLike
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
from flax_mesh.tree import Shaped


@dataclass(frozen=True)
class _Route:
    """How to transfer an array from one sharding to another.

    `layout` is the sharding on the source's devices from which shards are copied. `pairs` has (source device, target
    device, slices of the source's shard) for every device of the target. If the slices are None, the entire shard is
    copied.
    """

    layout: Sharding
    pairs: tuple[tuple[DeviceLike, DeviceLike, tuple[slice, ...] | None], ...]

    @property
    def has_slices(self) -> bool:
        return any(part is not None for _, _, part in self.pairs)


def device_put(x: Any, sharding: Sharding, key: Hashable = None) -> MpmdArray:
    """Transfers an array to `sharding`, on the same or other devices. Every process must call it.

    If `x` is committed to devices, a process that has devices of both `x` and `sharding` copies, a process that has
    only devices of `x` sends, a process that has only devices of `sharding` receives, and any other does nothing. The
    call is asynchronous: it blocks neither on other processes nor until `x` is computed. If `x` is not committed (a
    number, a numpy array), every process uses the value that it passes, which must be equal in all processes.

    If `x` and `sharding` have different numbers of devices, `x` is first replicated over its devices.

    Args:
        x: An MpmdArray, a jax.Array, or anything that `numpy.asarray` accepts.
        sharding: The target sharding; its devices may belong to any processes.
        key: A string, an integer, None, or a tuple of these. Between the same two groups, the n-th call with a key in
            one process matches the n-th call with an equal key in the other. Only calls with equal keys need the same
            order in all processes.

    Returns:
        An MpmdArray with `sharding`. It is never weakly typed.

    Raises:
        ValueError: In every process, if `sharding` does not fit the shape, or inside a JAX trace.

    Example:
        >>> from flax_mesh import mpmd
        >>> groups = mpmd.MpmdMesh(fm.create_mesh((2, 4), ("pp", "fsdp")), "pp").unstack
        >>> first, second = (jax.sharding.NamedSharding(group, jax.P("fsdp")) for group in groups)
        >>> x = mpmd.device_put(np.arange(8), first)
        >>> mpmd.device_put(x, second).sharding == second
        True
    """
    x = _as_array(x)
    _check_fit(x.shape, sharding)
    check_key(key)
    if isinstance(x, np.ndarray) or (isinstance(x, jax.Array) and not x.committed):
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
def find_route(source: Sharding, target: Sharding, shape: tuple[int, ...]) -> _Route:
    """Copies entire shards if the numbers of devices are equal, else slices of a replicated array."""
    sources, targets = source.devices_indices_map(shape), target.devices_indices_map(shape)
    devices, layout = list(sources), None  # None: the numbers of devices differ
    if list(sources.values()) == list(targets.values()):
        layout = source
    elif len(sources) == len(targets) and isinstance(target, NamedSharding):
        mesh = target.mesh
        source_mesh = Mesh(np.array(devices).reshape(mesh.axis_sizes), mesh.axis_names, axis_types=mesh.axis_types)
        layout = NamedSharding(source_mesh, target.spec)
    if layout is not None:
        return _Route(layout, tuple((device, to, None) for device, to in zip(devices, targets, strict=True)))
    replicated = (
        source if source.is_fully_replicated else NamedSharding(Mesh(np.array(devices), ("all",)), PartitionSpec())
    )
    pairs = []
    for k, (to, part) in enumerate(targets.items()):
        local = [device for device in devices if device.process_index == to.process_index] or devices
        pairs.append((local[k % len(local)], to, part))
    return _Route(replicated, tuple(pairs))


def _as_array(x: Any) -> jax.Array | np.ndarray | MpmdArray:
    """`x` if it is a jax.Array or MpmdArray, else a numpy array of the dtype that JAX would use."""
    if isinstance(x, Tracer):
        raise ValueError(
            "mpmd.device_put was called inside a trace, such as a function under jax.jit or jax.grad. It transfers "
            "arrays between programs: call it outside of the trace. Inside a program use with_sharding_constraint."
        )
    if isinstance(x, MpmdArray | jax.Array):
        return x
    dtype = jax.dtypes.canonicalize_dtype(np.asarray(x).dtype)
    return np.asarray(x, dtype)  # from `x` itself: an integer that is too large for int32 raises an OverflowError


def _check_fit(shape: tuple[int, ...], sharding: Sharding) -> None:
    if not isinstance(sharding, Sharding):
        raise ValueError(
            f"sharding must be a Sharding, got {sharding!r}. For a PartitionSpec use "
            "NamedSharding(mpmd_mesh.unstack[i], spec)."
        )
    if isinstance(sharding, NamedSharding) and len(sharding.spec) > len(shape):
        raise ValueError(f"The array has shape {shape}, but {sharding.spec} is for {len(sharding.spec)} dims.")
    sharding.shard_shape(shape)  # raises a ValueError if a dim is not divisible


def _put_everywhere(x: jax.Array | np.ndarray, sharding: Sharding) -> jax.Array | None:
    """The local shards, from the value that this process passed."""
    if is_fully_remote_sharding(sharding):
        return None
    x = _strong(x) if isinstance(x, jax.Array) else x
    if is_fully_local_sharding(sharding):
        return jax.device_put(x, sharding)
    # jax.device_put would compare x over all processes, including those that do not make this call.
    parts = sharding.addressable_devices_indices_map(x.shape)
    return _assemble(x, sharding, jax.device_put([x[part] for part in parts.values()], list(parts)))


def _move(value: jax.Array, sharding: Sharding) -> jax.Array:
    """`value` transferred to `sharding`; both have only devices of this process."""
    route = find_route(value.sharding, sharding, value.shape)
    laid_out = _relayout(value, route.layout)
    if not route.has_slices:
        return move(laid_out, sharding)
    pieces = _pieces(laid_out, route)
    return _assemble(value, sharding, jax.device_put(list(pieces.values()), list(pieces)))


def _exchange(x: jax.Array | MpmdArray, sharding: Sharding, key: Hashable) -> jax.Array | None:
    """The local shards of a transfer between processes."""
    route = find_route(x.sharding, sharding, x.shape)
    pieces: dict[DeviceLike, jax.Array] = {}
    if not is_fully_remote_sharding(x.sharding):
        # Always a copy: the buffer is read later, and a program in between may have donated it.
        pieces = _pieces(copy_to(route.layout)(_strong(as_jax_array(x))), route)
    local: list[DeviceLike] = []  # devices whose shards come from this process
    senders: dict[int, list[DeviceLike]] = {}  # other process -> local devices that receive shards from it
    receivers: dict[int, list[DeviceLike]] = {}  # other process -> its devices that receive shards from here
    for device, to, _ in route.pairs:
        if is_local_device(to):
            (local if to in pieces else senders.setdefault(device.process_index, [])).append(to)
        elif to in pieces:
            receivers.setdefault(to.process_index, []).append(to)
    transport = transport_of(next(filter(is_local_device, x.sharding.device_set | sharding.device_set)).client)
    name = transport.calls.name(_ids(x.sharding, x.shape), _ids(sharding, x.shape), key)
    for process, devices in receivers.items():
        transport.send(name, process, [pieces[to] for to in devices])
    shards = jax.device_put([pieces[to] for to in local], local)
    shard_shape = sharding.shard_shape(x.shape)
    for process, devices in senders.items():
        places = [jax.ShapeDtypeStruct(shard_shape, x.dtype, sharding=SingleDeviceSharding(to)) for to in devices]
        shards += transport.receive(name, process, places)
    return _assemble(x, sharding, shards) if shards else None


def _pieces(laid_out: jax.Array, route: _Route) -> dict[DeviceLike, jax.Array]:
    """{target device: its shard, on the source device} for every source device of this process."""
    shards = {shard.device: shard.data for shard in laid_out.addressable_shards}
    pairs = [(shards[device], to, part) for device, to, part in route.pairs if device in shards]
    return {to: shard if part is None else shard[part] for shard, to, part in pairs}


def _relayout(value: jax.Array, layout: Sharding) -> jax.Array:
    return value if value.sharding == layout else copy_to(layout)(value)


@lru_cache(maxsize=4096)
def copy_to(layout: Sharding) -> Callable[[jax.Array], jax.Array]:
    """A jitted copy to `layout`, on the same devices."""
    return jax.jit(jnp.copy, out_shardings=layout)


def _strong(x: jax.Array) -> jax.Array:
    """`x` without weak type, which a transfer between processes could not preserve."""
    return jax.lax.convert_element_type(x, x.dtype) if is_weakly_typed(x) else x


def _assemble(x: Shaped, sharding: Sharding, shards: list[jax.Array]) -> jax.Array:
    """An array like `x` from shards that are on their devices, moved to the memory kind of `sharding`."""
    memory = str(shards[0].sharding.memory_kind)
    array = jax.make_array_from_single_device_arrays(x.shape, sharding.with_memory_kind(memory), shards)
    return array if sharding.memory_kind == memory else jax.device_put(array, sharding)


@lru_cache(maxsize=4096)
def _ids(sharding: Sharding, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(device.id for device in sharding.devices_indices_map(shape))
