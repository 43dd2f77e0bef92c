"""Activations and gradients between processes by `jax.device_put`, which takes NCCL or ICI: all calls in one order.

The runtime has no names for transfers. The n-th call of one process meets the n-th of another, so every process makes
every call, without shards where it has no part in it; and on GPU the transfers of a device wait for each other in the
order of the calls. The order is that of the schedule in time: a call comes when what it sends is made, each action
follows what it needs, and so nothing waits in a circle.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from flax_mesh.errors import ConfigError, ShardingError
from flax_mesh.jax_compat import supports_cross_host_transfers, transfers_over_dcn_are_forced
from flax_mesh.mpmd.mesh import MpmdMesh
from flax_mesh.mpmd.schedules.schedule import Action, Schedule
from flax_mesh.mpmd.transport.keyed import Channel
from flax_mesh.mpmd.transport.layout import put_host
from flax_mesh.processes.store import call_number, get_text, put_text
from flax_mesh.text import processes_text

TRANSPORTS = ("auto", "server", "native")
TOLD_TIMEOUT_S = 600  # for the slowest process to make the same pipeline
TRIAL_LIMIT_S = 300  # NCCL connects first
REPAIR = 'Use transport="server" (in a recipe pipeline.transport=server)'

Move = Callable[[jax.Array, NamedSharding], jax.Array]


class OrderedTransfer(NamedTuple):
    """An activation or gradient that an action sends to another group."""

    key: tuple[Any, ...]  # as in Channel, without the number of the pass
    layout: Hashable  # the key under which its layout is published
    aval: Any
    sender: int  # groups
    receiver: int


class TransferOrder(NamedTuple):
    """The order of a pass, the same in all processes."""

    place: Mapping[Action, int]
    transfers: tuple[tuple[int, OrderedTransfer], ...]  # with the number of actions that come before it
    keys: frozenset[tuple[Any, ...]]


def order_transfers(schedule: Schedule, sends: Callable[[Action], Sequence[OrderedTransfer]]) -> TransferOrder:
    """Every transfer after the actions that start before its value is computed; `sends` returns those of an action."""
    times = schedule.unit_times()
    starts = [start for start, _ in times.values()]
    made = sorted(times, key=lambda action: times[action][1])  # stable
    transfers = tuple((bisect_left(starts, times[action][1]), one) for action in made for one in sends(action))
    place = {action: i for i, action in enumerate(times)}
    return TransferOrder(place, transfers, frozenset(one.key for _, one in transfers))


class OrderedPass:
    """The transfers of one pass over a schedule. A process calls `before` for each action of its own, then `end`.

    `call(transfer, value)` makes a call, with the value if this process offered one, and returns what arrives here.
    """

    def __init__(self, order: TransferOrder, call: Callable[[OrderedTransfer, Any], Any]):
        self._order, self._call, self._done = order, call, 0
        self._offered: dict[tuple[Any, ...], Any] = {}
        self._arrived: dict[tuple[Any, ...], Any] = {}

    def carries(self, key: tuple[Any, ...]) -> bool:
        return key in self._order.keys

    def before(self, action: Action) -> None:
        self._until(self._order.place[action])

    def end(self) -> None:
        self._until(len(self._order.place))

    def offer(self, key: tuple[Any, ...], value: Any) -> None:
        self._offered[key] = value

    def take(self, key: tuple[Any, ...]) -> Any:
        """What has arrived, or is on its way."""
        return self._arrived.pop(key)

    def _until(self, place: int) -> None:
        transfers = self._order.transfers
        while self._done < len(transfers) and transfers[self._done][0] <= place:
            transfer = transfers[self._done][1]
            arrived = self._call(transfer, self._offered.pop(transfer.key, None))
            if arrived is not None:
                self._arrived[transfer.key] = arrived
            self._done += 1


class OrderedTransport:
    """The ordered transport of one pipeline. `move(array, sharding)` is the call that all processes make alike."""

    def __init__(self, channel: Channel, move: Move = jax.device_put, trial_limit_s: float = TRIAL_LIMIT_S):
        self.channel, self.move, self.trial_limit_s = channel, move, trial_limit_s
        self._processes = [{device.process_index for device in mesh.devices.flat} for mesh in channel.groups]
        self._orders: dict[Hashable, TransferOrder] = {}
        self._tried: set[tuple[int, int]] = set()

    def start_pass(
        self, name: Hashable, number: int, schedule: Schedule, sends: Callable[[Action], Sequence[OrderedTransfer]]
    ) -> OrderedPass:
        """The transfers of pass `number` over `schedule`; `name` identifies the schedule and what it sends.

        ShardingError, in all processes, if a pair of groups that is used for the first time receives other values.
        """
        if name not in self._orders:
            order = order_transfers(schedule, lambda action: [one for one in sends(action) if self._takes(one)])
            self._try([(one.sender, one.receiver) for _, one in order.transfers])
            self._orders[name] = order
        return OrderedPass(self._orders[name], lambda one, value: self._transfer(number, one, value))

    def _takes(self, one: OrderedTransfer) -> bool:
        """Whether it is transferred here: between processes, and not empty or of random keys."""
        apart = self._processes[one.sender] != self._processes[one.receiver]
        return bool(apart and one.aval.size and not jnp.issubdtype(one.aval.dtype, jax.dtypes.prng_key))

    def _transfer(self, number: int, one: OrderedTransfer, value: Any) -> jax.Array | None:
        shape, dtype = one.aval.shape, one.aval.dtype
        there = self.channel.learn_layout(one.layout, shape, dtype, one.sender, one.receiver)
        kind, *rest = one.key
        return self._moved((kind, number, *rest), value, shape, dtype, there, one.sender, one.receiver)

    def _moved(
        self, key: tuple[Any, ...], value: Any, shape: Any, dtype: Any, there: NamedSharding, sender: int, receiver: int
    ) -> jax.Array | None:
        """`value`, None where another process has it, as it arrives; None where another process receives it."""
        here = NamedSharding(self.channel.groups[sender], there.spec)
        shards = [shard.data for shard in value.addressable_shards] if sender in self.channel.mine else []
        moved = self.move(jax.make_array_from_single_device_arrays(shape, here, shards, dtype=dtype), there)
        if receiver not in self.channel.mine:
            return None
        self.channel.expect(key, sender, receiver, moved)
        return moved

    def _try(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Move known numbers over every pair that is new, and compare."""
        new = [pair for pair in dict.fromkeys(pairs) if pair not in self._tried]
        came = {pair: self._trial(*pair) for pair in new}  # all calls, before anybody waits
        end = time.monotonic() + self.trial_limit_s
        arrived = [(pair, array) for pair, array in came.items() if array is not None]
        found = [self._difference(*pair, array, end) for pair, array in arrived]
        if new:
            told = _hear(self.channel, _tell(self.channel, "trial", "\n".join(filter(None, found))))
            if problems := sorted({line for text in told.values() for line in text.splitlines()}):
                raise ShardingError("\n".join([*problems, f"{REPAIR}."]))
        self._tried.update(new)

    def _trial(self, sender: int, receiver: int) -> jax.Array | None:
        groups, numbers = self.channel.groups, self._numbers(sender, receiver)
        there = NamedSharding(groups[receiver], PartitionSpec(groups[receiver].axis_names))
        value = put_host(numbers, NamedSharding(groups[sender], there.spec)) if sender in self.channel.mine else None
        return self._moved(("trial", 0), value, numbers.shape, numbers.dtype, there, sender, receiver)

    def _numbers(self, sender: int, receiver: int) -> np.ndarray:
        """One number for every device, of which no two transfers have the same."""
        groups = self.channel.groups
        pair, size = sender * len(groups) + receiver, groups[receiver].size
        return np.arange(pair * size, (pair + 1) * size, dtype=np.int32)

    def _difference(self, sender: int, receiver: int, array: jax.Array, end: float) -> str:
        """What is wrong with what has come here, "" for nothing."""
        places = array.sharding.addressable_devices_indices_map(array.shape)
        wanted = {device: int(self._numbers(sender, receiver)[place][0]) for device, place in places.items()}
        came = _numbers_of(array, end)
        if came == wanted:
            return ""
        if isinstance(came, dict):
            came = f"{[came[device] for device in wanted]} came, not {list(wanted.values())}"
        who = [processes_text(self._processes[group]) for group in (sender, receiver)]
        return f"jax.device_put from group {sender} ({who[0]}) to group {receiver} ({who[1]}) was tried: {came}"


def _numbers_of(array: Any, end: float) -> dict[Any, int] | str:
    """The first number on each device; a text where they have not come by `end`, in monotonic time."""
    while not array.is_ready():
        if time.monotonic() > end:
            return "nothing came in time"
        time.sleep(0.01)
    try:
        return {shard.device: int(np.asarray(shard.data)[0]) for shard in array.addressable_shards}
    except jax.errors.JaxRuntimeError as error:
        return str(error).split("\n")[0]


def ordered_transport_of(channel: Channel | None, mesh: MpmdMesh, transport: str) -> OrderedTransport | None:
    """Ordered transport if every process of the mesh supports it and `transport` allows it, else None; in all alike.

    ConfigError for "native" if a process does not support it. Nothing is asked if one process has all groups.
    """
    if channel is None:
        return None
    here = 'it is told transport="server"' if transport == "server" else why_not(mesh)
    folder = _tell(channel, "transport", here)
    if here and transport != "native":
        return None  # whatever the others say, they hear this
    told = {process: text for process, text in _hear(channel, folder).items() if text}
    if told and transport == "native":
        each = [f"process {process}: {text}" for process, text in sorted(told.items())]
        raise ConfigError(['transport="native" cannot be had', *each, f'{REPAIR}, or "auto".'])
    return None if told else OrderedTransport(channel)


def why_not(mesh: MpmdMesh) -> str:
    """Why `jax.device_put` does not move arrays between the processes of `mesh`, as JAX 0.10.2 decides; "": it does."""
    kinds = sorted({device.device_kind for device in mesh.jax_mesh.devices.flat})
    if len(kinds) > 1:
        return f"the mesh has devices of several kinds, {', '.join(kinds)}"
    client = mesh.jax_mesh.local_devices[0].client
    if not supports_cross_host_transfers(client):
        return f"the client of {client.platform} does not say that it supports transfers between processes"
    if transfers_over_dcn_are_forced():
        return "jax_force_dcn_cross_host_transfers is set"
    return ""


def _tell(channel: Channel, name: str, text: str) -> str:
    """Publish a text of this process; returns the folder in which every process publishes its own."""
    folder = f"ordered/{channel.pipeline}/{name}"
    folder = f"{folder}/{call_number(folder)}"
    put_text(f"{folder}/{channel.process}", text)
    return folder


def _hear(channel: Channel, folder: str) -> dict[int, str]:
    """process -> its text, of all processes that have devices of the pipeline."""
    processes = sorted({device.process_index for mesh in channel.groups for device in mesh.devices.flat})
    return {process: get_text(f"{folder}/{process}", TOLD_TIMEOUT_S) for process in processes}
