"""The executor: dispatches the actions of one pass over a schedule, from one thread and without blocking.

Every process dispatches the actions of its groups. For stage k and microbatch m an action does this:

    F   received activations, leaves, batch  ->  stage.forward   ->  sent activations, to each receiving stage
                                                                     residuals, to saved[k, m]
                                                                     sums of the loss; new values of changed leaves
    B   gradients of the sent activations,   ->  stage.backward  ->  gradients of the received activations, each to the
        saved[k, m]                                                  stage that computed the activation
                                                                     weight gradients, added to grads; or, if the
                                                                     schedule has W, its inputs, to saved[k, m]
    W   saved[k, m]                          ->  stage.weights   ->  weight gradients, added to grads

F and B of a stage that sends nothing are one program, stage.both, if the schedule runs them back to back.

A value for another group of this process is copied when it is computed. A value for another process is sent when it is
computed and received when it is used. The transfer server matches sends and receives by key, so the processes need no
common order; the ordered transport (`flax_mesh.mpmd.transport.ordered`) makes all calls in one order.

The compiler chooses the layout of every output, and only the process that compiles a stage knows it. It publishes the
layout under a layout key. Let stage 0 send activation v to stages 1 and 3:

    0 --v--> 1, 3     key (F, v): one array, so one layout for all receivers
    1 --dv--> 0       key (B, v, 1)
    3 --dv--> 0       key (B, v, 3): another program computes this gradient, so its layout may differ
"""

from collections.abc import Callable, Mapping, Sequence, Set

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from flax_mesh.mpmd.runtime.compile import CompiledPipeline, Slot, StageFunctions
from flax_mesh.mpmd.schedules.schedule import Action, Schedule
from flax_mesh.mpmd.transport.keyed import Channel
from flax_mesh.mpmd.transport.ordered import OrderedPass, OrderedTransport
from flax_mesh.program.program import Var
from flax_mesh.tree import PyTree

# {(stage, microbatch): values that B and W need}: received activations, residuals, and changed leaves as they were
# before F; after B, if W follows, also the cotangents and the carry.
_Arrays = list[jax.Array]
Saved = dict[
    tuple[int, int],
    tuple[_Arrays, list[jax.Array | None], dict[int, jax.Array], tuple[list[_Arrays], _Arrays] | None],
]
_Key = tuple[str, int, int]  # kind, microbatch, and stage that receives the activation
_pack, _unpack = jax.jit(jnp.stack), jax.jit(list)  # scalars of several names are sent as one array


class ScheduleRun:
    """The state of one pass over a schedule, on the groups of this process.

    `leaves` has the leaves of the model by group, `data` the arrays of the batch that each stage reads, `slots` (step,
    microbatch) by group and microbatch. `number` identifies the pass and is the same in all processes.
    """

    def __init__(
        self,
        compiled: CompiledPipeline,
        number: int,
        leaves: dict[int, dict[int, jax.Array]],
        data: list[list[jax.Array]],
        slots: Mapping[int, Sequence[Slot]],
    ):
        self.compiled, self.number, self.leaves, self.data, self.slots = compiled, number, leaves, data, slots
        self.stages = list(compiled.stages)
        self.local_groups, self.num_transfers = compiled.transfers.local_groups, 0
        # References to the fields that every action uses, to save attribute lookups.
        self._sender, self._receivers, self._trains = compiled.sender, compiled.receivers, compiled.trains
        self._move_to = compiled.transfers.move_to
        self.saved: Saved = {}
        # (variable, microbatch, receiving stage) -> activation there
        self.values: dict[tuple[Var, int, int], jax.Array | None] = {}
        # (variable, microbatch, stage that received it) -> its gradient on the group that computed the variable
        self.cotangents: dict[tuple[Var, int, int], jax.Array | None] = {}
        self.changed: dict[int, jax.Array] = {}  # leaf -> new value, on the group that stores it
        # (stage, leaf) -> new value. The stages of one group that read a variable are at different microbatches.
        self._current: dict[tuple[int, int], jax.Array] = {}
        self.grads: dict[int, dict[int, jax.Array]] = {}  # by group and leaf
        self.sums: list[list[jax.Array | None]] = [[None] * len(stage.sums) for stage in self.stages]
        for group, zeros in compiled.zeros.items():
            self.grads[group], sums = zeros()
            for stage, start in zip((s for s in self.stages if s.group == group), sums, strict=True):
                self.sums[stage.stage] = start
        self._pass: OrderedPass | None = None
        self._fused: Set[int] = frozenset()

    def follow(
        self,
        schedule: Schedule,
        actions: Sequence[Action],
        ordered: OrderedTransport | None = None,
        on_action: Callable[[Action, Saved], None] | None = None,
        fused: Set[int] = frozenset(),
    ) -> None:
        """Dispatch `actions`, the local ones of `schedule`. `ordered` is None if the transfer server is used.

        For stages in `fused`, F runs in the program of the B that follows it, unless `on_action` observes single
        actions.
        """
        self._fused = frozenset() if on_action is not None else fused
        if ordered is not None:
            name = self.compiled.number, schedule.name, schedule.num_microbatches
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
        if k in self._fused and kind != "W":
            if kind == "B":
                self._both(self.stages[k], microbatch)
            return
        # No table of bound methods in `self`: a reference cycle would keep all arrays until a garbage collection.
        if kind == "F":
            self._forward(self.stages[k], microbatch)
        elif kind == "B":
            self._backward(self.stages[k], microbatch)
        else:
            self._weights(self.stages[k], microbatch)

    def named_sums(self) -> dict[str, tuple[int, PyTree]]:
        """{name: (group, sum over the microbatches or None if it is remote)}."""
        return {
            self.compiled.names[at]: (stage.group, value)
            for stage in self.stages
            for at, value in zip(stage.sums, self.sums[stage.stage], strict=True)
        }

    def _forward(self, stage: StageFunctions, microbatch: int) -> None:
        k, group = stage.stage, stage.group
        received, leaves = self._inputs(stage, microbatch)
        sent, residuals, new, self.sums[k] = stage.forward(
            leaves, self.data[k], self.slots[group][microbatch], received, self.sums[k]
        )
        if self._trains:
            self.saved[k, microbatch] = (received, residuals, _changing(stage, leaves), None)
        self._store_changed(stage, new)
        for v, value in zip(stage.sent, sent, strict=True):
            for receiver in self._receivers[v]:
                key = ("F", microbatch, receiver)
                self.values[v, microbatch, receiver] = self._send(key, v, value, group, self.stages[receiver].group)

    def _backward(self, stage: StageFunctions, microbatch: int) -> None:
        k, group, stored, summed = stage.stage, stage.group, self.leaves[stage.group], self.grads[stage.group]
        received, residuals, old, _ = self.saved.pop((k, microbatch))
        cotangents = [self._cotangents(stage.sent[i], microbatch, group) for i in stage.floats_out]
        leaves = [old.get(at, stored[at]) for at in stage.leaves]
        grads = [summed[at] for at in stage.trained] if not stage.has_weights else []
        to_inputs, grads, carry = stage.backward(
            leaves, self.data[k], self.slots[group][microbatch], received, residuals, cotangents, grads
        )
        if not stage.has_weights:
            summed.update(zip(stage.trained, grads, strict=True))
        else:
            residuals = [x if i in stage.lasting else None for i, x in enumerate(residuals)]
            self.saved[k, microbatch] = (received, residuals, old, (cotangents, carry))
        self._send_gradients(stage, microbatch, to_inputs)

    def _both(self, stage: StageFunctions, microbatch: int) -> None:
        """F and B of a stage that sends nothing."""
        k, group, summed = stage.stage, stage.group, self.grads[stage.group]
        received, leaves = self._inputs(stage, microbatch)
        grads = [summed[at] for at in stage.trained] if not stage.has_weights else []
        assert stage.both is not None
        new, self.sums[k], to_inputs, grads, residuals, carry = stage.both(
            leaves, self.data[k], self.slots[group][microbatch], received, self.sums[k], grads
        )
        if not stage.has_weights:
            summed.update(zip(stage.trained, grads, strict=True))
        else:
            self.saved[k, microbatch] = (received, residuals, _changing(stage, leaves), ([], carry))
        self._store_changed(stage, new)
        self._send_gradients(stage, microbatch, to_inputs)

    def _store_changed(self, stage: StageFunctions, new: Sequence[jax.Array]) -> None:
        for at, value in zip(stage.changed, new, strict=True):
            self._current[stage.stage, at] = value
            if at in stage.stored:
                self.changed[at] = value

    def _send_gradients(self, stage: StageFunctions, microbatch: int, to_inputs: Sequence[jax.Array]) -> None:
        k, group = stage.stage, stage.group
        for i, gradient in zip(stage.floats_in, to_inputs, strict=True):
            v = stage.received[i]
            owner = self.stages[self._sender[v][0]].group
            self.cotangents[v, microbatch, k] = self._send(("B", microbatch, k), v, gradient, group, owner)

    def _weights(self, stage: StageFunctions, microbatch: int) -> None:
        k, group, stored, summed = stage.stage, stage.group, self.leaves[stage.group], self.grads[stage.group]
        received, residuals, old, from_backward = self.saved.pop((k, microbatch))
        assert from_backward is not None
        cotangents, carry = from_backward
        leaves = [old.get(at, stored[at]) for at in stage.leaves]
        grads = [summed[at] for at in stage.trained]
        grads = stage.weights(
            leaves, self.data[k], self.slots[group][microbatch], received, residuals, cotangents, carry, grads
        )
        summed.update(zip(stage.trained, grads, strict=True))

    def _inputs(self, stage: StageFunctions, microbatch: int) -> tuple[_Arrays, _Arrays]:
        """The received values and the leaves for F."""
        k, stored = stage.stage, self.leaves[stage.group]
        received: _Arrays = []
        for v in stage.received:
            value = self.values.pop((v, microbatch, k), None)
            if value is None:
                value = self._receive(("F", microbatch, k), v, stage.group, self._sender[v][0])
            received.append(value)
        return received, [self._current.get((k, at), stored[at]) for at in stage.leaves]

    def _cotangents(self, v: Var, microbatch: int, group: int) -> list[jax.Array]:
        """The gradients of `v` from all stages that received it, the last stage first."""
        gradients = []
        for stage in reversed(self._receivers[v]):
            value = self.cotangents.pop((v, microbatch, stage), None)
            gradients.append(self._receive(("B", microbatch, stage), v, group, stage) if value is None else value)
        return gradients

    def _send(self, key: _Key, v: Var, value: jax.Array, sender: int, receiver: int) -> jax.Array | None:
        """Send `value` of `v`, or its gradient. Returns it on the receiving group, or None if that group is remote."""
        if sender == receiver:
            return value
        self.num_transfers += 1
        if receiver in self.local_groups:
            return self._move_to(value, receiver)
        (kind, *numbers), name, channel = key, self._sender[v], self._channel
        value = channel.publish_layout(self.compiled.layout_key(kind, v, numbers[-1]), value, sender)
        if self._pass is not None and self._pass.includes((*key, *name)):
            return self._pass.offer((*key, *name), value)
        return channel.send((kind, self.number, *numbers, *name), value, sender, receiver)

    def _receive(self, key: _Key, v: Var, group: int, stage: int) -> jax.Array:
        """Receive `v` or its gradient on `group`, computed by `stage` of another process."""
        (kind, *numbers), name, sender, aval = key, self._sender[v], self.stages[stage].group, v.aval
        if self._pass is not None and self._pass.includes((*key, *name)):
            return self._pass.take((*key, *name))
        layout_key = self.compiled.layout_key(kind, v, stage)
        sharding = self._channel.fetch_layout(layout_key, aval.shape, aval.dtype, sender, group)
        return self._channel.receive(
            (kind, self.number, *numbers, *name), aval.shape, aval.dtype, sharding, sender, group
        )

    @property
    def _channel(self) -> Channel:
        channel = self.compiled.transfers.channel
        assert channel is not None  # there are other processes
        return channel


def _changing(stage: StageFunctions, leaves: Sequence[jax.Array]) -> dict[int, jax.Array]:
    """The leaves that F changes, before F. Other variables that change are written, but never read."""
    return {at: x for at, x in zip(stage.leaves, leaves, strict=True) if at in stage.changed}


def announce_layouts(compiled: CompiledPipeline) -> None:
    """Publish the layouts of groups of one device. They are known before compilation, so receivers need not wait."""
    meshes, local, channel = compiled.transfers.meshes, compiled.transfers.local_groups, compiled.transfers.channel
    if channel is None:
        return
    sent = [transfer for s in compiled.stages for kind in "FB" for transfer in compiled.sends(Action(kind, s.stage, 0))]
    to_others = [transfer for transfer in sent if transfer.sender in local and transfer.receiver not in local]
    for transfer in {transfer.layout: transfer for transfer in to_others}.values():  # several receivers share a layout
        if meshes[transfer.sender].size == 1:
            layout = NamedSharding(meshes[transfer.sender], PartitionSpec())
            channel.announce(transfer.layout, transfer.aval.shape, transfer.aval.dtype, layout, transfer.sender)


def sums_everywhere(run: ScheduleRun) -> dict[str, jax.Array]:
    """The sums of a run by name, on the first local group of every process."""
    transfers, named = run.compiled.transfers, run.named_sums()
    first = min(run.local_groups)
    sums: dict[str, jax.Array] = {}
    for owner in sorted({group for group, _ in named.values()}):
        names = [name for name, (group, _) in named.items() if group == owner]
        packed: jax.Array | jax.ShapeDtypeStruct = jax.ShapeDtypeStruct((len(names),), jnp.float32)
        if owner in run.local_groups:
            packed = _pack([named[name][1] for name in names])
        for group in transfers.mesh.representative_groups:
            replicated = NamedSharding(transfers.meshes[group], PartitionSpec())
            received = transfers.transfer(("sums", run.number, owner), packed, replicated, owner, group)
            if group == first and received is not None:
                sums |= zip(names, _unpack(received), strict=True)
    return {name: sums[name] for name in named}
