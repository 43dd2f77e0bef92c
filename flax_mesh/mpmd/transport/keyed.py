"""Arrays from one group of a pipeline to another that belongs to other processes: keyed, so that no order is needed.

Both groups have the same shape, so shard k goes from device k of the one to device k of the other. The layouts must
therefore be equal. Where the compiler has chosen a layout, only the sender knows it: it tells the others once, through
the key-value store of jax.distributed, and nobody receives anything before it has compared.
"""

import hashlib
import json
import threading
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from flax_mesh.axes import as_tuple
from flax_mesh.errors import ShardingError
from flax_mesh.mpmd.mesh import MpmdMesh
from flax_mesh.mpmd.transport.device_put import copy_to
from flax_mesh.mpmd.transport.server import transport_of
from flax_mesh.processes.store import get_text, put_text
from flax_mesh.text import processes_text

LAYOUT_TIMEOUT_S = 3600  # until the sender's stage is compiled; a sender that is dead is found out by other means
WHAT = {  # kind of key -> what is on its way
    "F": "the input of F of stage {1}, microbatch {0}",
    "B": "the gradient for B of stage {2}, microbatch {0}, made by stage {1}",
    "leaf": "{0}",
    "gradient": "the gradient of {0}",
    "update": "scalars of the optimizer's update, phase {0}",
    "sums": "the sums of the loss of group {0}",
    "model": "array {0} of the model",
    "trial": "the numbers that try jax.device_put",
}


class Pending(NamedTuple):
    """An array that is on its way to this process, or was when it was last looked at."""

    key: tuple[Any, ...]
    sender: int
    receiver: int
    array: jax.Array


class Channel:
    """What the groups of this process send to groups of other processes and receive from them; nothing waits.

    A key is (kind, run, ...), a kind of WHAT with what fills its braces; between the same groups it is used once.
    """

    def __init__(self, mesh: MpmdMesh):
        self.groups = mesh.unstack
        self.mine = frozenset(mesh.my_mpmd_axis_indices)
        device = mesh.jax_mesh.local_devices[0]
        self.process = device.process_index
        self.transport = transport_of(device.client)
        # All processes make their pipelines in the same order: this one's number names it everywhere.
        self.pipeline = self.transport.calls.name((), (), "pipeline")[-1]
        self.num_runs = 0
        self._layouts: dict[Hashable, NamedSharding] = {}
        self._places: dict[Hashable, list[tuple[int, list[jax.ShapeDtypeStruct]]]] = {}
        self.watched = False  # whether somebody asks `waiting`, and so keeps `_pending` short
        self._pending: deque[Pending] = deque()
        self._asked: str | None = None
        self._lock = threading.Lock()

    def next_run(self) -> int:
        """The number of this pass over a schedule, the same in all processes."""
        self.num_runs += 1
        return self.num_runs

    def send(self, key: tuple[Any, ...], value: jax.Array, sender: int, receiver: int) -> None:
        """Offer `value`, which lies on group `sender`, to group `receiver`; it may still be computing, and must not be
        donated before it has arrived."""
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
        key: tuple[Any, ...],
        shape: Sequence[int],
        dtype: Any,
        sharding: NamedSharding,
        sender: int,
        receiver: int,
    ) -> jax.Array:
        """What group `sender` sends under `key`, as it arrives on group `receiver`, laid out by `sharding`."""
        name = self._name(key, sender, receiver)
        shards = [
            array
            for process, places in self._places_of(tuple(shape), dtype, sharding, sender, receiver)
            for array in self.transport.receive(name, process, places)
        ]
        value = jax.make_array_from_single_device_arrays(tuple(shape), sharding, shards)
        self.expect(key, sender, receiver, value)
        return value

    def expect(self, key: tuple[Any, ...], sender: int, receiver: int, value: jax.Array) -> None:
        """Let `waiting` name `value` until it has arrived."""
        if self.watched and hasattr(value, "is_ready"):  # arrays of random keys do not tell
            with self._lock:
                self._pending.append(Pending(key, sender, receiver, value))

    def publish_layout(self, key: Hashable, value: jax.Array, sender: int) -> jax.Array:
        """`value` in the layout in which it is sent, that of the first value of this key; tells it to the others."""
        mesh = self.groups[sender]
        layout = self._layouts.get(key)
        if layout is None:
            layout = value.sharding
            if not (isinstance(layout, NamedSharding) and layout.mesh == mesh):
                layout = NamedSharding(mesh, PartitionSpec())
            self.announce(key, value.shape, value.dtype, layout, sender)
        at_home = mesh.size == 1 or value.sharding == layout
        return value if at_home else copy_to(layout)(value)

    def announce(self, key: Hashable, shape: Sequence[int], dtype: Any, layout: NamedSharding, sender: int) -> None:
        """Tell the others in which layout group `sender` will send what has this key."""
        self._layouts[key] = layout
        if self.groups[sender].devices.flat[0].process_index == self.process:  # of a shared group one process speaks
            put_text(self._store_key(key), _layout_text(shape, dtype, layout.spec, self.groups[sender]))

    def learn_layout(
        self, key: Hashable, shape: Sequence[int], dtype: Any, sender: int, receiver: int
    ) -> NamedSharding:
        """The layout in which group `sender` sends, on group `receiver`. ShardingError where shape, dtype or devices
        are not those that are expected here."""
        layout = self._layouts.get((key, receiver))
        if layout is None:
            mesh = self.groups[receiver]
            self._asked = f"the layout of {key!r} from group {sender}, which compiles ({self._owners(sender)})"
            text = get_text(self._store_key(key), LAYOUT_TIMEOUT_S)
            self._asked = None
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
        """What this process is waiting for, in the order in which it will be used; [] for nothing.

        Set `watched` and call it often: what has arrived is held until the next call.
        """
        with self._lock:
            while self._pending and _is_there(self._pending[0].array):
                self._pending.popleft()
            pending = [one for one in self._pending if not _is_there(one.array)]
        found = [self._asked] if self._asked else []
        for (kind, _, *rest), sender, receiver, _ in pending:
            what = WHAT[kind].format(*rest)
            found.append(f"group {receiver} for {what}, from group {sender} ({self._owners(sender)})")
        return found

    def _places_of(
        self, shape: tuple[int, ...], dtype: Any, sharding: NamedSharding, sender: int, receiver: int
    ) -> list[tuple[int, list[jax.ShapeDtypeStruct]]]:
        """(process, the shards that come from it), for the devices of this process."""
        key = shape, dtype, sharding, sender, receiver
        if key not in self._places:
            shard_shape = sharding.shard_shape(shape)
            found: dict[int, list[jax.ShapeDtypeStruct]] = {}
            pairs = zip(self.groups[sender].devices.flat, self.groups[receiver].devices.flat, strict=True)
            for source, to in pairs:
                if to.process_index == self.process:
                    place = jax.ShapeDtypeStruct(shard_shape, dtype, sharding=SingleDeviceSharding(to))
                    found.setdefault(source.process_index, []).append(place)
            self._places[key] = list(found.items())
        return self._places[key]

    def _name(self, key: tuple[Any, ...], sender: int, receiver: int) -> tuple[Any, ...]:
        return ("pipeline", self.pipeline, sender, receiver, *key)

    def _store_key(self, key: Hashable) -> str:
        return f"layout/{self.pipeline}/{hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()}"

    def _owners(self, group: int) -> str:
        return processes_text(device.process_index for device in self.groups[group].devices.flat)


def _is_there(array: Any) -> bool:
    """Whether it has arrived; what never will, its sender being dead, is ready too, as an error."""
    if array.is_deleted():
        return True
    try:
        return array.is_ready() and array.block_until_ready() is array
    except jax.errors.JaxRuntimeError:
        return False


def _layout_text(shape: Sequence[int], dtype: Any, spec: PartitionSpec, mesh: Mesh) -> str:
    entries = [None if entry is None else list(as_tuple(entry)) for entry in spec]
    sizes = {name: size for name, size in mesh.shape.items() if size > 1}
    return json.dumps({"shape": list(shape), "dtype": str(dtype), "spec": entries, "mesh": sizes})


def _spec_of(text: str) -> PartitionSpec:
    entries = json.loads(text)["spec"]
    return PartitionSpec(*(entry and (entry[0] if len(entry) == 1 else tuple(entry)) for entry in entries))
