"""Ordered transport: activations and gradients between processes by `jax.device_put`, over NCCL or ICI.

The runtime matches transfers by number, so all processes make the same calls in one order that follows from the
schedule; docs/multiprocess.md ("Two transports between processes") has the reasons. 1F1B with two groups, one per
process, and two microbatches has four transfers, a to d:

    time       0   1   2   3   4   5   6   7   8   9
    group 0    0F0 0F1         0B0---- .   0B1----        a, b: activations of 0F0 and 0F1, group 0 -> 1
    group 1        1F0 1B0---- 1F1 1B1----                c, d: gradients of 1B0 and 1B1, group 1 -> 0
    transfers      a   b       c           d

    process 0 dispatches   0F0 a 0F1 b c 0B0 d 0B1
    process 1 dispatches   a 1F0 b 1B0 c 1F1 1B1 d

If each process called only when it needs a value, process 1 would make c before b, and its gradient would be matched
with an activation.
"""

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from flax_mesh.errors import ConfigError, ShardingError
from flax_mesh.jax_compat import supports_cross_host_transfers, transfers_over_dcn_are_forced
from flax_mesh.mpmd.mesh import MpmdMesh
from flax_mesh.mpmd.schedules.schedule import Action, Schedule
from flax_mesh.mpmd.transport.keyed import Channel
from flax_mesh.mpmd.transport.layout import put_host
from flax_mesh.processes.agree import call_number, get_text, put_text
from flax_mesh.text import first_line, processes_text
from flax_mesh.tree import Shaped, is_key

_PUBLISH_TIMEOUT_S = 600  # until the slowest process has created the same pipeline
_TRIAL_TIMEOUT_S = 300  # includes the time in which NCCL connects
REPAIR = 'Use transport="server" (in a recipe pipeline.transport=server)'

_Value = TypeVar("_Value")
Move = Callable[[jax.Array, NamedSharding], jax.Array]


class OrderedTransfer(NamedTuple):
    """An activation or gradient that an action sends to another group."""

    key: tuple[Any, ...]  # as in Channel, without the number of the pass
    layout: Hashable  # key under which the layout is published
    aval: Shaped
    sender: int  # groups
    receiver: int


class _TransferOrder(NamedTuple):
    """The order of the transfers of one pass over a schedule, the same in all processes."""

    place: Mapping[Action, int]  # place of every action of all processes, by start
    transfers: tuple[tuple[int, OrderedTransfer], ...]  # (number of actions that start before it, transfer)
    keys: frozenset[tuple[Hashable, ...]]


def order_transfers(schedule: Schedule, sends: Callable[[Action], Sequence[OrderedTransfer]]) -> _TransferOrder:
    """The order of all transfers; `sends` returns the transfers of one action."""
    times = schedule.unit_times()
    starts = [start for start, _ in times.values()]
    by_end = sorted(times, key=lambda action: times[action][1])  # a stable sort: equal in all processes
    transfers = tuple(
        (bisect_left(starts, times[action][1]), transfer) for action in by_end for transfer in sends(action)
    )
    place = {action: i for i, action in enumerate(times)}
    return _TransferOrder(place, transfers, frozenset(transfer.key for _, transfer in transfers))


class OrderedPass(Generic[_Value]):
    """The transfers of one pass over a schedule. A process calls `before` for each of its actions, then `end`.

    `call(transfer, value)` performs one transfer. `value` is None unless this process sends. It returns the received
    array, or None if another process receives.
    """

    def __init__(self, order: _TransferOrder, call: Callable[[OrderedTransfer, _Value | None], _Value | None]):
        self._order, self._call, self._num_done = order, call, 0
        self._offered: dict[tuple[Hashable, ...], _Value] = {}
        self._arrived: dict[tuple[Hashable, ...], _Value] = {}

    def includes(self, key: tuple[Hashable, ...]) -> bool:
        return key in self._order.keys

    def before(self, action: Action) -> None:
        self._until(self._order.place[action])

    def end(self) -> None:
        self._until(len(self._order.place))

    def offer(self, key: tuple[Hashable, ...], value: _Value) -> None:
        self._offered[key] = value

    def take(self, key: tuple[Hashable, ...]) -> _Value:
        """The received array, which may not have arrived yet."""
        return self._arrived.pop(key)

    def _until(self, place: int) -> None:
        transfers = self._order.transfers
        while self._num_done < len(transfers) and transfers[self._num_done][0] <= place:
            transfer = transfers[self._num_done][1]
            arrived = self._call(transfer, self._offered.pop(transfer.key, None))
            if arrived is not None:
                self._arrived[transfer.key] = arrived
            self._num_done += 1


class OrderedTransport:
    """The ordered transport of one pipeline. `move(array, sharding)` is the call that every process makes."""

    def __init__(self, channel: Channel, move: Move = jax.device_put, trial_timeout_s: float = _TRIAL_TIMEOUT_S):
        self.channel, self.move, self.trial_timeout_s = channel, move, trial_timeout_s
        self._processes = [{device.process_index for device in mesh.devices.flat} for mesh in channel.groups]
        self._orders: dict[Hashable, _TransferOrder] = {}
        self._tested: set[tuple[int, int]] = set()

    def start_pass(
        self, name: Hashable, number: int, schedule: Schedule, sends: Callable[[Action], Sequence[OrderedTransfer]]
    ) -> OrderedPass[jax.Array]:
        """The transfers of pass `number` over `schedule`; `name` identifies the schedule and its compiled pipeline.

        The first use of a pair of groups transfers test values. If they do not arrive, all processes raise a
        ShardingError.
        """
        if name not in self._orders:
            order = order_transfers(schedule, lambda action: list(filter(self._applies_to, sends(action))))
            self._test_pairs([(transfer.sender, transfer.receiver) for _, transfer in order.transfers])
            self._orders[name] = order
        return OrderedPass(self._orders[name], lambda transfer, value: self._transfer(number, transfer, value))

    def _applies_to(self, transfer: OrderedTransfer) -> bool:
        """Whether `transfer` is between processes, not empty and not of random keys. Others use the transfer server."""
        between = self._processes[transfer.sender] != self._processes[transfer.receiver]
        return bool(between and math.prod(transfer.aval.shape) and not is_key(transfer.aval))

    def _transfer(self, number: int, transfer: OrderedTransfer, value: jax.Array | None) -> jax.Array | None:
        shape, dtype = transfer.aval.shape, transfer.aval.dtype
        there = self.channel.fetch_layout(transfer.layout, shape, dtype, transfer.sender, transfer.receiver)
        return self._moved(number, transfer, value, there)

    def _moved(
        self, number: int, transfer: OrderedTransfer, value: jax.Array | None, there: NamedSharding
    ) -> jax.Array | None:
        """The array on the receiver, or None if it is remote. `value` is None if another process sends."""
        (kind, *numbers), _, like, sender, receiver = transfer
        here = NamedSharding(self.channel.groups[sender], there.spec)
        shards = [shard.data for shard in value.addressable_shards] if value is not None else []
        moved = self.move(jax.make_array_from_single_device_arrays(like.shape, here, shards, dtype=like.dtype), there)
        if receiver not in self.channel.local_groups:
            return None
        self.channel.track((kind, number, *numbers), sender, receiver, moved)
        return moved

    def _test_pairs(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Transfer known values between every new pair of groups, and compare.

        The numbering of calls is not documented by JAX. If it differed, training would silently use wrong arrays.
        """
        new = [pair for pair in dict.fromkeys(pairs) if pair not in self._tested]
        received = {pair: self._trial(*pair) for pair in new}  # all calls, before this process blocks
        end = time.monotonic() + self.trial_timeout_s
        arrived = [(pair, array) for pair, array in received.items() if array is not None]
        mismatches = [self._mismatch(*pair, array, end) for pair, array in arrived]
        if new:
            published = _read_all(self.channel, _publish(self.channel, "trial", "\n".join(filter(None, mismatches))))
            if problems := sorted({line for text in published.values() for line in text.splitlines()}):
                raise ShardingError("\n".join([*problems, f"{REPAIR}."]))
        self._tested.update(new)

    def _trial(self, sender: int, receiver: int) -> jax.Array | None:
        groups, numbers = self.channel.groups, self._numbers(sender, receiver)
        there = NamedSharding(groups[receiver], PartitionSpec(groups[receiver].axis_names))
        value = (
            put_host(numbers, NamedSharding(groups[sender], there.spec))
            if sender in self.channel.local_groups
            else None
        )
        return self._moved(0, OrderedTransfer(("trial",), None, numbers, sender, receiver), value, there)

    def _numbers(self, sender: int, receiver: int) -> np.ndarray:
        """One number per device, different for every pair of groups."""
        groups = self.channel.groups
        pair, size = sender * len(groups) + receiver, groups[receiver].size
        return np.arange(pair * size, (pair + 1) * size, dtype=np.int32)

    def _mismatch(self, sender: int, receiver: int, array: jax.Array, end: float) -> str:
        """Description of the difference between the received and the expected values; "" if they are equal."""
        places = array.sharding.addressable_devices_indices_map(array.shape)
        expected = {device: int(self._numbers(sender, receiver)[place][0]) for device, place in places.items()}
        received = _numbers_of(array, end)
        if received == expected:
            return ""
        if isinstance(received, dict):
            received = f"received {[received[device] for device in expected]}, expected {list(expected.values())}"
        owners = [processes_text(self._processes[group]) for group in (sender, receiver)]
        pair = f"from group {sender} ({owners[0]}) to group {receiver} ({owners[1]})"
        return f"test of jax.device_put {pair} failed: {received}"


def _numbers_of(array: Any, end: float) -> dict[object, int] | str:
    """The first number on each device, or an error text if they do not arrive by `end` (of `time.monotonic`)."""
    while not array.is_ready():
        if time.monotonic() > end:
            return "timed out"
        time.sleep(0.01)
    try:
        return {shard.device: int(np.asarray(shard.data)[0]) for shard in array.addressable_shards}
    except jax.errors.JaxRuntimeError as error:
        return first_line(error)


def ordered_transport_of(channel: Channel | None, mesh: MpmdMesh, transport: str) -> OrderedTransport | None:
    """The ordered transport if `transport` allows it and every process of the mesh supports it, else None.

    The result is the same in all processes; None if one process has all groups. Raises a ConfigError if `transport` is
    "ordered" and a process does not support it.
    """
    if channel is None:
        return None
    reason = 'transport="server" is set' if transport == "server" else _unsupported_reason(mesh)
    folder = _publish(channel, "transport", reason)
    if reason and transport != "ordered":
        return None  # no need to read the others: all processes read this reason
    reasons = {process: text for process, text in _read_all(channel, folder).items() if text}
    if reasons and transport == "ordered":
        lines = [f"process {process}: {text}" for process, text in sorted(reasons.items())]
        raise ConfigError(['transport="ordered" is not supported by every process', *lines, f'{REPAIR}, or "auto".'])
    return None if reasons else OrderedTransport(channel)


def _unsupported_reason(mesh: MpmdMesh) -> str:
    """Why `jax.device_put` cannot transfer between the processes of `mesh` (the conditions of JAX 0.10.2), or ""."""
    kinds = sorted({device.device_kind for device in mesh.jax_mesh.devices.flat})
    if len(kinds) > 1:
        return f"the mesh has devices of several kinds, {', '.join(kinds)}"
    client = mesh.jax_mesh.local_devices[0].client
    if not supports_cross_host_transfers(client):
        return f"the {client.platform} client does not support transfers between processes"
    if transfers_over_dcn_are_forced():
        return "jax_force_dcn_cross_host_transfers is set"
    return ""


def _publish(channel: Channel, name: str, text: str) -> str:
    """Publish a text of this process. Returns the folder of the texts of all processes."""
    folder = f"ordered/{channel.pipeline}/{name}"
    folder = f"{folder}/{call_number(folder)}"
    put_text(f"{folder}/{channel.process}", text)
    return folder


def _read_all(channel: Channel, folder: str) -> dict[int, str]:
    """{process: its text} of all processes that have devices of the pipeline."""
    processes = sorted({device.process_index for mesh in channel.groups for device in mesh.devices.flat})
    return {process: get_text(f"{folder}/{process}", _PUBLISH_TIMEOUT_S) for process in processes}
