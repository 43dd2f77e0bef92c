"""Transfers between groups of different processes by the transfer server. They are matched by keys, in any order.

All groups have the same shape, and shard k is sent from device k of one group to device k of the other, so both must
use the same layout. If the compiler chose the layout, only the sender knows it. The sender publishes it once in the
key-value store of jax.distributed. Before the first receive, the receiver compares the published shape, dtype and mesh
with the shape, dtype and mesh that it expects.
"""

import hashlib
import json
import threading
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from flax_mesh.axes import as_tuple
from flax_mesh.errors import ShardingError
from flax_mesh.mpmd.mesh import MpmdMesh
from flax_mesh.mpmd.transport.device_put import copy_to
from flax_mesh.mpmd.transport.server import transport_of
from flax_mesh.processes.agree import get_text, put_text
from flax_mesh.text import processes_text

Key = tuple[str, *tuple[Hashable, ...]]  # see Channel
_LAYOUT_TIMEOUT_S = 3600  # the time to compile the sender's stage; the watchdog detects a dead sender
_DESCRIPTIONS = {  # kind of key -> description of the value
    "F": "the input of F of stage {1}, microbatch {0}",
    "B": "the gradient for B of stage {2}, microbatch {0}, computed by stage {1}",
    "leaf": "{0}",
    "gradient": "the gradient of {0}",
    "update": "scalars of the optimizer's update, phase {0}",
    "sums": "the sums of the loss of group {0}",
    "model": "array {0} of the model",
    "trial": "the test values for jax.device_put",
}


class _Pending(NamedTuple):
    """An array that had not arrived in this process when last checked."""

    key: Key
    sender: int
    receiver: int
    array: jax.Array


class Channel:
    """Asynchronous transfers between the groups of this process and the groups of other processes.

    A key is (kind, run, ...): a kind of _DESCRIPTIONS, the number of the run, and the values of the placeholders.
    Between the same groups each key is used once.
    """

    def __init__(self, mesh: MpmdMesh):
        self.groups = mesh.unstack
        self.local_groups = frozenset(mesh.my_mpmd_axis_indices)
        device = mesh.jax_mesh.local_devices[0]
        self.process = device.process_index
        self.transport = transport_of(device.client)
        # All processes create their pipelines in the same order, so this number is the same in all processes.
        self.pipeline = self.transport.calls.name((), (), "pipeline")[-1]
        self._layouts: dict[Hashable, NamedSharding] = {}
        self._places: dict[Hashable, list[tuple[int, list[jax.ShapeDtypeStruct]]]] = {}
        self.watched = False  # set if `waiting` is called regularly, which removes entries from `_pending`
        self._pending: deque[_Pending] = deque()
        self._requested: str | None = None
        self._lock = threading.Lock()

    def send(self, key: Key, value: jax.Array, sender: int, receiver: int) -> None:
        """Sends `value`, which may still be computing, from group `sender` to group `receiver`.

        `value` must not be donated before it has arrived.
        """
        name = self._name(key, sender, receiver)
        shards = {shard.device: shard.data for shard in value.addressable_shards}
        by_process: dict[int, list[jax.Array]] = {}
        for device, to in zip(self.groups[sender].devices.flat, self.groups[receiver].devices.flat, strict=True):
            if device in shards:
                by_process.setdefault(to.process_index, []).append(shards[device])
        for process, arrays in by_process.items():
            self.transport.send(name, process, arrays)

    def receive(
        self,
        key: Key,
        shape: Sequence[int],
        dtype: np.dtype,
        sharding: NamedSharding,
        sender: int,
        receiver: int,
    ) -> jax.Array:
        """The value that group `sender` sends under `key`, on group `receiver` with `sharding`."""
        name = self._name(key, sender, receiver)
        shards = [
            array
            for process, places in self._places_of(tuple(shape), dtype, sharding, sender, receiver)
            for array in self.transport.receive(name, process, places)
        ]
        value = jax.make_array_from_single_device_arrays(tuple(shape), sharding, shards)
        self.track(key, sender, receiver, value)
        return value

    def track(self, key: Key, sender: int, receiver: int, value: jax.Array) -> None:
        """Include `value` in `waiting` until it has arrived."""
        if self.watched and hasattr(value, "is_ready"):  # arrays of random keys have no is_ready
            with self._lock:
                self._pending.append(_Pending(key, sender, receiver, value))

    def publish_layout(self, key: Hashable, value: jax.Array, sender: int) -> jax.Array:
        """`value` in the layout of the first value with this key, which is published for the receivers."""
        mesh = self.groups[sender]
        layout = self._layouts.get(key)
        if layout is None:
            layout = value.sharding
            if not (isinstance(layout, NamedSharding) and layout.mesh == mesh):
                layout = NamedSharding(mesh, PartitionSpec())
            self.announce(key, value.shape, value.dtype, layout, sender)
        same = mesh.size == 1 or value.sharding == layout
        return value if same else copy_to(layout)(value)

    def announce(
        self, key: Hashable, shape: Sequence[int], dtype: np.dtype, layout: NamedSharding, sender: int
    ) -> None:
        """Publish the layout in which group `sender` sends values with this key."""
        self._layouts[key] = layout
        if self.groups[sender].devices.flat[0].process_index == self.process:  # one representative of a shared group
            put_text(self._store_key(key), _layout_text(shape, dtype, layout.spec, self.groups[sender]))

    def fetch_layout(
        self, key: Hashable, shape: Sequence[int], dtype: np.dtype, sender: int, receiver: int
    ) -> NamedSharding:
        """The published layout of group `sender`, on group `receiver`. Raises a ShardingError if its shape, dtype or
        mesh differ from the values in this process."""
        layout = self._layouts.get((key, receiver))
        if layout is None:
            mesh = self.groups[receiver]
            self._requested = f"the layout of {key!r} from group {sender} ({self._owners(sender)}), which is compiling"
            text = get_text(self._store_key(key), _LAYOUT_TIMEOUT_S)
            self._requested = None
            spec = _spec_of(text)
            expected = _layout_text(shape, dtype, spec, mesh)
            if text != expected:
                raise ShardingError(
                    f"group {sender} ({self._owners(sender)}) sends {text}, group {receiver} expects {expected}. "
                    "All processes must run the same code, recipe, settings and versions."
                )
            layout = self._layouts[key, receiver] = NamedSharding(mesh, spec)
        return layout

    def waiting(self) -> list[str]:
        """Descriptions of the arrays that have not arrived, in the order of use.

        Set `watched` and call it regularly: references to arrays that have arrived are released by the next call.
        """
        with self._lock:
            while self._pending and _has_arrived(self._pending[0].array):
                self._pending.popleft()
            pending = [entry for entry in self._pending if not _has_arrived(entry.array)]
        lines = [self._requested] if self._requested else []
        for (kind, _, *details), sender, receiver, _ in pending:
            description = _DESCRIPTIONS[kind].format(*details)
            lines.append(f"group {receiver} for {description}, from group {sender} ({self._owners(sender)})")
        return lines

    def _places_of(
        self, shape: tuple[int, ...], dtype: np.dtype, sharding: NamedSharding, sender: int, receiver: int
    ) -> list[tuple[int, list[jax.ShapeDtypeStruct]]]:
        """(sending process, the shards that it sends) for the devices of this process."""
        key = shape, dtype, sharding, sender, receiver
        if key not in self._places:
            shard_shape = sharding.shard_shape(shape)
            by_sender: dict[int, list[jax.ShapeDtypeStruct]] = {}
            pairs = zip(self.groups[sender].devices.flat, self.groups[receiver].devices.flat, strict=True)
            for source, to in pairs:
                if to.process_index == self.process:
                    place = jax.ShapeDtypeStruct(shard_shape, dtype, sharding=SingleDeviceSharding(to))
                    by_sender.setdefault(source.process_index, []).append(place)
            self._places[key] = list(by_sender.items())
        return self._places[key]

    def _name(self, key: Key, sender: int, receiver: int) -> Key:
        return ("pipeline", self.pipeline, sender, receiver, *key)

    def _store_key(self, key: Hashable) -> str:
        return f"layout/{self.pipeline}/{hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()}"

    def _owners(self, group: int) -> str:
        return processes_text(device.process_index for device in self.groups[group].devices.flat)


def _has_arrived(array: Any) -> bool:
    """Whether the array has arrived. If its sender died, it is ready with an error, which counts as not arrived."""
    if array.is_deleted():
        return True
    try:
        return array.is_ready() and array.block_until_ready() is array
    except jax.errors.JaxRuntimeError:  # pyright: ignore[reportUnknownMemberType] (of JAX)
        return False


def _layout_text(shape: Sequence[int], dtype: np.dtype, spec: PartitionSpec, mesh: Mesh) -> str:
    entries = [None if entry is None else list(as_tuple(entry)) for entry in spec]
    sizes = {name: size for name, size in mesh.shape.items() if size > 1}
    return json.dumps({"shape": list(shape), "dtype": str(dtype), "spec": entries, "mesh": sizes})


def _spec_of(text: str) -> PartitionSpec:
    entries = json.loads(text)["spec"]
    return PartitionSpec(*(entry and (entry[0] if len(entry) == 1 else tuple(entry)) for entry in entries))
