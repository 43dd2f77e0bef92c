"""One pass over a schedule: actions dispatched one after the other, from one thread, without waiting.

Every process dispatches the actions of its own groups. What another process sends is asked for where it is used, what
another process wants is offered where it is made; both by a key, so that no two processes need an order. Where
activations and gradients use the ordered transport, `flax_mesh.mpmd.transport.ordered` makes their order.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from flax_mesh.mpmd.runtime.compile import CompiledPipeline, StageFunctions
from flax_mesh.mpmd.schedules.schedule import Action, Schedule
from flax_mesh.mpmd.split.jaxpr import Var
from flax_mesh.mpmd.transport.keyed import Channel
from flax_mesh.mpmd.transport.ordered import OrderedPass, OrderedTransport

# By (stage, microbatch), from F to B and W: what was received, residuals, leaves as they were before F changed them,
# and from B on cotangents and carry.
Saved = dict[tuple[int, int], tuple[list[Any], list[Any], dict[int, Any], tuple[list[Any], list[Any]] | None]]
Slot = tuple[jax.Array, jax.Array]  # step and microbatch


class ScheduleRun:
    """One pass over a schedule: what is where at the moment, on the groups of this process.

    `held` has the leaves of the model by group, `data` the arrays of the batch that each stage reads, `slots` the
    numbers of the microbatches by group. `number` is of the pass, the same in all processes.
    """

    def __init__(
        self,
        compiled: CompiledPipeline,
        number: int,
        held: dict[int, dict[int, jax.Array]],
        data: list[list[jax.Array]],
        slots: Mapping[int, Sequence[Slot]],
    ):
        self.compiled, self.number, self.held, self.data, self.slots = compiled, number, held, data, slots
        self.stages = list(compiled.stages)
        self.mine, self.num_transfers = compiled.transfers.mine, 0
        # Looked up for every action.
        self._sender, self._receivers, self._trains = compiled.sender, compiled.receivers, compiled.trains
        self._move_to = compiled.transfers.move_to
        self.saved: Saved = {}
        self.values: dict[tuple[Var, int, int], Any] = {}  # (variable, microbatch, receiving stage) -> activation there
        # (variable, microbatch, stage that received it) -> its gradient, where it was sent
        self.cotangents: dict[tuple[Var, int, int], Any] = {}
        self.changed: dict[int, jax.Array] = {}  # leaf -> new value
        self.grads: dict[int, dict[int, jax.Array]] = {}  # by group and leaf
        self.sums: list[list[Any]] = [[None] * len(stage.sums) for stage in self.stages]
        for group, zeros in compiled.zeros.items():
            self.grads[group], sums = zeros()
            for stage, start in zip((s for s in self.stages if s.group == group), sums, strict=True):
                self.sums[stage.stage] = start
        self._pass: OrderedPass | None = None

    def follow(
        self,
        schedule: Schedule,
        actions: Sequence[Action],
        ordered: OrderedTransport | None = None,
        on_action: Callable[[Action, Saved], None] | None = None,
    ) -> None:
        """Dispatch `actions`, those of `schedule` that are of this process; by `ordered` what goes that way."""
        if ordered is not None:
            name = self.compiled.number, schedule.num_microbatches
            self._pass = ordered.start_pass(name, self.number, schedule, self.compiled.sends)
        for action in actions:
            if self._pass is not None:
                self._pass.before(action)
            self.do(action)
            if on_action is not None:
                on_action(action, self.saved)
        if self._pass is not None:
            self._pass.end()

    def do(self, action: Action) -> None:
        kind, k, microbatch = action
        # Not a table of bound methods in `self`: such a circle would keep all arrays of the run until a collection.
        if kind == "F":
            self._forward(self.stages[k], microbatch)
        elif kind == "B":
            self._backward(self.stages[k], microbatch)
        else:
            self._weights(self.stages[k], microbatch)

    def named_sums(self) -> dict[str, tuple[int, Any]]:
        """name -> (group, sum over the microbatches; None where another process holds it)."""
        return {
            self.compiled.names[at]: (stage.group, value)
            for stage in self.stages
            for at, value in zip(stage.sums, self.sums[stage.stage], strict=True)
        }

    def _forward(self, stage: StageFunctions, microbatch: int) -> None:
        k, group, held = stage.stage, stage.group, self.held[stage.group]
        received = [self._value(v, microbatch, k, group) for v in stage.received]
        leaves = [held[at] for at in stage.leaves]
        sent, residuals, new, self.sums[k] = stage.forward(
            leaves, self.data[k], self.slots[group][microbatch], received, self.sums[k]
        )
        if self._trains:
            self.saved[k, microbatch] = (received, residuals, {at: held[at] for at in stage.changed}, None)
        for at, value in zip(stage.changed, new, strict=True):
            held[at] = self.changed[at] = value
        for v, value in zip(stage.sent, sent, strict=True):
            for receiver in self._receivers[v]:
                key = ("F", microbatch, receiver)
                self.values[v, microbatch, receiver] = self._send(key, v, value, group, self.stages[receiver].group)

    def _backward(self, stage: StageFunctions, microbatch: int) -> None:
        k, group, held, summed = stage.stage, stage.group, self.held[stage.group], self.grads[stage.group]
        received, residuals, old, _ = self.saved.pop((k, microbatch))
        cotangents = [self._cotangents(stage.sent[i], microbatch, group) for i in stage.floats_out]
        leaves = [old.get(at, held[at]) for at in stage.leaves]
        grads = [summed[at] for at in stage.trained] if not stage.has_weights else []
        to_inputs, grads, carry = stage.backward(
            leaves, self.data[k], self.slots[group][microbatch], received, residuals, cotangents, grads
        )
        if not stage.has_weights:
            summed.update(zip(stage.trained, grads, strict=True))
        else:
            residuals = [x if i in stage.lasting else None for i, x in enumerate(residuals)]
            self.saved[k, microbatch] = (received, residuals, old, (cotangents, carry))
        for i, gradient in zip(stage.floats_in, to_inputs, strict=True):
            v = stage.received[i]
            maker = self.stages[self._sender[v][0]].group
            self.cotangents[v, microbatch, k] = self._send(("B", microbatch, k), v, gradient, group, maker)

    def _weights(self, stage: StageFunctions, microbatch: int) -> None:
        k, group, held, summed = stage.stage, stage.group, self.held[stage.group], self.grads[stage.group]
        received, residuals, old, from_backward = self.saved.pop((k, microbatch))
        assert from_backward is not None
        cotangents, carry = from_backward
        leaves = [old.get(at, held[at]) for at in stage.leaves]
        grads = [summed[at] for at in stage.trained]
        grads = stage.weights(
            leaves, self.data[k], self.slots[group][microbatch], received, residuals, cotangents, carry, grads
        )
        summed.update(zip(stage.trained, grads, strict=True))

    def _value(self, v: Var, microbatch: int, stage: int, group: int) -> jax.Array:
        value = self.values.pop((v, microbatch, stage), None)
        if value is not None:
            return value
        return self._receive(("F", microbatch, stage), v, group, self._sender[v][0])

    def _cotangents(self, v: Var, microbatch: int, group: int) -> list[jax.Array]:
        """The gradients that come back for `v`, from the last stage that received it to the first."""
        found = []
        for stage in reversed(self._receivers[v]):
            value = self.cotangents.pop((v, microbatch, stage), None)
            found.append(self._receive(("B", microbatch, stage), v, group, stage) if value is None else value)
        return found

    def _send(self, key: tuple[Any, ...], v: Var, value: jax.Array, sender: int, receiver: int) -> jax.Array | None:
        """`value`, which stands for `v`, on the receiving group; None where another process holds that."""
        if sender == receiver:
            return value
        self.num_transfers += 1
        if receiver in self.mine:
            return self._move_to(value, receiver)
        (kind, *rest), name, channel = key, self._sender[v], self._channel
        value = channel.publish_layout(self.compiled.layout_key(kind, v, rest[-1]), value, sender)
        if self._pass is not None and self._pass.includes((*key, *name)):
            return self._pass.offer((*key, *name), value)
        return channel.send((kind, self.number, *rest, *name), value, sender, receiver)

    def _receive(self, key: tuple[Any, ...], v: Var, group: int, stage: int) -> jax.Array:
        """What a stage of another process makes of `v`, on `group`."""
        (kind, *rest), name, sender, aval = key, self._sender[v], self.stages[stage].group, v.aval
        if self._pass is not None and self._pass.includes((*key, *name)):
            return self._pass.take((*key, *name))
        layout_key = self.compiled.layout_key(kind, v, stage)
        sharding = self._channel.fetch_layout(layout_key, aval.shape, aval.dtype, sender, group)
        return self._channel.receive((kind, self.number, *rest, *name), aval.shape, aval.dtype, sharding, sender, group)

    @property
    def _channel(self) -> Channel:
        channel = self.compiled.transfers.channel
        assert channel is not None  # another process has a group
        return channel


def announce_layouts(compiled: CompiledPipeline) -> None:
    """Tell other processes what groups of one device send, whose layout is known before anything is compiled."""
    meshes, mine, channel = compiled.transfers.meshes, compiled.transfers.mine, compiled.transfers.channel
    if channel is None:
        return
    sent = [one for s in compiled.stages for kind in "FB" for one in compiled.sends(Action(kind, s.stage, 0))]
    away = {one.layout: one for one in sent if one.sender in mine and one.receiver not in mine}
    for one in away.values():
        if meshes[one.sender].size == 1:
            layout = NamedSharding(meshes[one.sender], PartitionSpec())
            channel.announce(one.layout, one.aval.shape, one.aval.dtype, layout, one.sender)


def sums_everywhere(run: ScheduleRun) -> dict[str, jax.Array]:
    """The sums of a run by name, on the first group of every process."""
    transfers, named = run.compiled.transfers, run.named_sums()
    here = min(run.mine)
    found: dict[str, jax.Array] = {}
    for owner in sorted({group for group, _ in named.values()}):
        names = [name for name, (group, _) in named.items() if group == owner]
        packed: Any = jax.ShapeDtypeStruct((len(names),), jnp.float32)
        if owner in run.mine:
            packed = _pack([named[name][1] for name in names])
        for group in transfers.mesh.speakers:
            there = NamedSharding(transfers.meshes[group], PartitionSpec())
            came = transfers.transfer(("sums", run.number, owner), packed, there, owner, group)
            if group == here and came is not None:
                found |= zip(names, _unpack(came), strict=True)
    return {name: found[name] for name in named}


@jax.jit
def _pack(values: list[jax.Array]) -> jax.Array:
    return jnp.stack(values)


@jax.jit
def _unpack(packed: jax.Array) -> list[jax.Array]:
    return list(packed)
