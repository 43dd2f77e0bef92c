"""One pass over a schedule: actions dispatched one after the other, from one thread, without waiting.

Every process dispatches the actions of its own groups. What another process sends is asked for where it is used, what
another process wants is offered where it is made; both by a key, so that no two processes need an order. Where
activations and gradients use the ordered transport, `flax_mesh.mpmd.transport.ordered` makes their order.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from flax_mesh.errors import ConfigError
from flax_mesh.mpmd.runtime.compile import StageFunctions
from flax_mesh.mpmd.runtime.placement import moved
from flax_mesh.mpmd.schedules.schedule import Action, Schedule
from flax_mesh.mpmd.split.update import SHARED
from flax_mesh.mpmd.transport.local_copy import move
from flax_mesh.mpmd.transport.ordered import OrderedPass, OrderedTransfer
from flax_mesh.step.loss import Batch
from flax_mesh.step.state import TrainState
from flax_mesh.tree import path_of


class Run:
    """One pass over a schedule: what is where at the moment, on the groups of this process."""

    def __init__(self, pipeline: Any, state: TrainState, batch: Batch, count: int, train: bool):
        self.pipeline, self.train = pipeline, train
        self.mine, self.channel = pipeline.mine, pipeline.channel
        self.number = 0 if self.channel is None else self.channel.next_run()
        common, is_new = pipeline.prepare(batch, count, train)
        self.program, self.stages, self.names, self.sender, self.receivers, self.used = common
        self.saved: dict[tuple[int, int], Any] = {}  # (stage, microbatch) -> what B or W will need
        self.values: dict[Any, Any] = {}  # (variable, microbatch, receiving stage) -> activation there
        self.cotangents: dict[Any, Any] = {}  # (variable, microbatch, stage that received it) -> its gradient there
        self.num_transfers = 0
        self.layouts = pipeline.layouts  # (sharding, receiving group) -> the same there
        self.changed: dict[int, Any] = {}  # leaf -> new value
        self.shared: dict[tuple[int, int], Any] = {}  # (leaf of the state, group) -> its copy there
        self.walk: OrderedPass | None = None
        if is_new and self.channel is not None:
            self._announce()
        self._place_leaves(state)
        self._place_batch(batch, count)
        self._zeros()

    def follow(
        self,
        schedule: Schedule,
        actions: Sequence[Action],
        on_action: Callable[[Action, dict[Any, Any]], None] | None = None,
    ) -> None:
        """Dispatch `actions`, those of `schedule` that are of this process."""
        native = self.pipeline.native
        if native is not None:
            name = self.program, schedule.num_microbatches
            self.walk = native.start_pass(name, self.number, schedule, self._sends)
        for action in actions:
            if self.walk is not None:
                self.walk.before(action)
            self.do(action)
            if on_action is not None:
                on_action(action, self.saved)
        if self.walk is not None:
            self.walk.end()

    def do(self, action: Action) -> None:
        """Dispatch one action."""
        stage = self.stages[action.stage]
        {"F": self._forward, "B": self._backward, "W": self._weights}[action.kind](stage, action.microbatch)

    def named_sums(self) -> dict[str, tuple[int, Any]]:
        """name -> (group, sum over the microbatches; None where another process holds it)."""
        return {
            self.names[at]: (self.pipeline.group_of[s.stage], value)
            for s in self.stages
            for at, value in zip(s.sums, self.sums[s.stage], strict=True)
        }

    def _forward(self, stage: StageFunctions, microbatch: int) -> None:
        k, group = stage.stage, self.pipeline.group_of[stage.stage]
        leaves = [self.held[group, at] for at in stage.leaves]
        received = [self._value(v, microbatch, k, group) for v in stage.received]
        data, slot = self.data[k], self._slot(group, microbatch)
        sent, residuals, new, self.sums[k] = stage.forward(leaves, data, slot, received, self.sums[k])
        if self.train:
            old = {at: self.held[group, at] for at in stage.changed}
            self.saved[k, microbatch] = (received, residuals, old, None)
        for at, value in zip(stage.changed, new, strict=True):
            self.held[group, at] = self.changed[at] = value
        for v, value in zip(stage.sent, sent, strict=True):
            for receiver in self.receivers[v]:
                there = self._send(("F", microbatch, receiver), v, value, group, self.pipeline.group_of[receiver])
                self.values[v, microbatch, receiver] = there

    def _backward(self, stage: StageFunctions, microbatch: int) -> None:
        k, group = stage.stage, self.pipeline.group_of[stage.stage]
        received, residuals, old, _ = self.saved.pop((k, microbatch))
        cotangents = [self._cotangents(stage.sent[i], microbatch, group) for i in stage.floats_out]
        leaves = [old.get(at, self.held[group, at]) for at in stage.leaves]
        data, slot = self.data[k], self._slot(group, microbatch)
        grads = [self.grads[group, at] for at in stage.trained] if not stage.has_weights else []
        to_inputs, grads, carry = stage.backward(leaves, data, slot, received, residuals, cotangents, grads)
        if not stage.has_weights:
            self.grads |= {(group, at): g for at, g in zip(stage.trained, grads, strict=True)}
        else:
            residuals = [x if i in stage.lasting else None for i, x in enumerate(residuals)]
            self.saved[k, microbatch] = (received, residuals, old, (cotangents, carry))
        for i, gradient in zip(stage.floats_in, to_inputs, strict=True):
            v = stage.received[i]
            home = self.pipeline.group_of[self.sender[v][0]]
            self.cotangents[v, microbatch, k] = self._send(("B", microbatch, k), v, gradient, group, home)

    def _weights(self, stage: StageFunctions, microbatch: int) -> None:
        k, group = stage.stage, self.pipeline.group_of[stage.stage]
        received, residuals, old, (cotangents, carry) = self.saved.pop((k, microbatch))
        leaves = [old.get(at, self.held[group, at]) for at in stage.leaves]
        grads = [self.grads[group, at] for at in stage.trained]
        data, slot = self.data[k], self._slot(group, microbatch)
        grads = stage.weights(leaves, data, slot, received, residuals, cotangents, carry, grads)
        self.grads |= {(group, at): g for at, g in zip(stage.trained, grads, strict=True)}

    def _value(self, v: Any, microbatch: int, stage: int, group: int) -> jax.Array:
        """The value of `v` for a stage on `group`."""
        value = self.values.pop((v, microbatch, stage), None)
        return self._receive(("F", microbatch, stage), v, group, self.sender[v][0]) if value is None else value

    def _cotangents(self, v: Any, microbatch: int, group: int) -> list[jax.Array]:
        """The gradients that come back for `v`, from the last stage that received it to the first."""
        stages = reversed(self.receivers[v])
        values = {stage: self.cotangents.pop((v, microbatch, stage), None) for stage in stages}
        return [
            self._receive(("B", microbatch, stage), v, group, stage) if value is None else value
            for stage, value in values.items()
        ]

    def _receive(self, key: tuple[Any, ...], v: Any, group: int, stage: int) -> jax.Array:
        """What a stage of another process makes of `v`, on `group`."""
        (kind, *rest), sender, name = key, self.pipeline.group_of[stage], self.sender[v]
        if self.walk is not None and self.walk.carries((*key, *name)):
            return self.walk.take((*key, *name))
        sharding = self.channel.learn_layout(
            self._layout_key(kind, v, stage), v.aval.shape, v.aval.dtype, sender, group
        )
        full = (kind, self.number, *rest, *name)
        return self.channel.receive(full, v.aval.shape, v.aval.dtype, sharding, sender, group)

    def _layout_key(self, kind: str, v: Any, stage: int) -> tuple[Any, ...]:
        """Of what F sends of `v`, the same to all; of its gradient as `stage` gives it."""
        return (self.program, kind, *self.sender[v], *((stage,) if kind == "B" else ()))

    def _sends(self, action: Action) -> list[OrderedTransfer]:
        """What an action of any process sends, in the order in which it does."""
        kind, k, microbatch = action
        stage, group_of = self.stages[k], self.pipeline.group_of
        found: list[tuple[Any, int, int]] = []  # variable, the stage that its key names, group that receives it
        if kind == "F":
            found = [(v, r, group_of[r]) for v in stage.sent for r in self.receivers[v]]
        elif kind == "B":
            received = [stage.received[i] for i in stage.floats_in]
            found = [(v, k, group_of[self.sender[v][0]]) for v in received]
        return [
            OrderedTransfer(
                (kind, microbatch, s, *self.sender[v]), self._layout_key(kind, v, s), v.aval, group_of[k], to
            )
            for v, s, to in found
        ]

    def _announce(self) -> None:
        """Tell what groups of one device send, whose layout is known before anything is compiled."""
        groups, mine = self.pipeline.groups, self.mine
        sent = [one for s in self.stages for kind in "FB" for one in self._sends(Action(kind, s.stage, 0))]
        away = {one.layout: one for one in sent if one.sender in mine and one.receiver not in mine}
        for one in away.values():
            if groups[one.sender].size == 1:
                layout = NamedSharding(groups[one.sender], PartitionSpec())
                self.channel.announce(one.layout, one.aval.shape, one.aval.dtype, layout, one.sender)

    def _send(self, key: tuple[Any, ...], v: Any, value: jax.Array, sender: int, receiver: int) -> jax.Array | None:
        """`value`, which stands for `v`, on the receiving group; None where another process holds that."""
        if sender == receiver:
            return value
        self.num_transfers += 1
        if receiver not in self.mine:
            (kind, *rest), name = key, self.sender[v]
            value = self.channel.publish_layout(self._layout_key(kind, v, rest[-1]), value, sender)
            if self.walk is not None and self.walk.carries((*key, *name)):
                return self.walk.offer((*key, *name), value)
            return self.channel.send((kind, self.number, *rest, *name), value, sender, receiver)
        key = value.sharding, receiver
        if key not in self.layouts:
            self.layouts[key] = moved(value.sharding, self.pipeline.groups[receiver])
        return move(value, self.layouts[key])

    def _slot(self, group: int, microbatch: int) -> tuple[Any, Any]:
        return self.counts[group], self.pipeline.microbatch_index(group, microbatch)

    def _place_leaves(self, state: TrainState) -> None:
        """Every leaf on every group that uses it, and the number of the step on all."""
        pipeline = self.pipeline
        self.held: dict[tuple[int, int], Any] = {}
        for group, at in self.used:
            home = pipeline.leaf_home(at)
            value = state.leaves[pipeline.leaf_homes[at]]
            if group == home.group or not {group, home.group} & self.mine:
                there = value
            else:
                sharding = moved(home.sharding, pipeline.groups[group])
                there = pipeline.carry(
                    ("leaf", self.number, home.path, at), value, sharding, home.group, group, donated=True
                )
            if group in self.mine:
                self.held[group, at] = there
        for at, home in enumerate(pipeline.placement.homes):
            if home.group == SHARED:
                self.shared |= {(at, group): x for group, x in pipeline.parts_of(at, state.leaves[at]).items()}
        step = next(at for at, home in enumerate(pipeline.placement.homes) if home.path == "optimizer/step")
        self.counts = {group: self.shared[step, group] for group in self.mine}

    def _place_batch(self, batch: Batch, count: int) -> None:
        """The batch as (microbatch, row, ...) on every group that reads it."""
        pipeline, first = self.pipeline, len(self.pipeline.staged.leaves)
        arrays = jax.tree.leaves(batch)
        placed: dict[tuple[int, int], Any] = {}
        self.data: list[list[Any]] = []
        for stage in self.stages:
            group = pipeline.group_of[stage.stage]
            wanted = stage.data if group in self.mine else ()
            for at in wanted:
                if (group, at) not in placed:
                    placed[group, at] = pipeline.place_array(arrays[at - first], count, group)
            self.data.append([placed[group, at] for at in wanted])

    def _zeros(self) -> None:
        pipeline = self.pipeline
        self.grads = {}
        self.sums: list[Any] = [[None] * len(s.sums) for s in self.stages]
        for group in self.mine:
            mine = [s for s in self.stages if pipeline.group_of[s.stage] == group]
            trained = tuple(sorted({at for s in mine for at in s.trained})) if self.train else ()
            grads, sums = pipeline.zeros(group, trained, tuple(len(s.sums) for s in mine))
            self.grads |= {(group, at): g for at, g in zip(trained, grads, strict=True)}
            for s, zeros in zip(mine, sums, strict=True):
                self.sums[s.stage] = zeros


def sums_everywhere(run: Run) -> dict[str, jax.Array]:
    """The sums of a run by name, on the first group of every process."""
    pipeline, named = run.pipeline, run.named_sums()
    here = min(run.mine)
    found: dict[str, jax.Array] = {}
    for owner in sorted({group for group, _ in named.values()}):
        names = [name for name, (group, _) in named.items() if group == owner]
        packed: Any = jax.ShapeDtypeStruct((len(names),), jnp.float32)
        if owner in run.mine:
            packed = _pack([named[name][1] for name in names])
        for group in pipeline.speakers:
            there = NamedSharding(pipeline.groups[group], PartitionSpec())
            came = pipeline.carry(("sums", run.number, owner), packed, there, owner, group)
            if group == here:
                found |= zip(names, _unpack(came), strict=True)
    return {name: found[name] for name in named}


@jax.jit
def _pack(values: list[jax.Array]) -> jax.Array:
    return jnp.stack(values)


@jax.jit
def _unpack(packed: jax.Array) -> list[jax.Array]:
    return list(packed)


def check_batch(batch: Batch, count: int) -> Batch:
    """Shapes of one of `count` equal microbatches; ConfigError where the batch cannot be cut so."""
    sizes = {path_of(path): np.shape(x)[:1] for path, x in jax.tree_util.tree_flatten_with_path(batch)[0]}
    if count < 1:
        raise ConfigError(f"the number of microbatches must be at least 1, got {count}")
    problems = [f"batch {path!r} is a scalar; its first dim must be the rows" for path in sizes if not sizes[path]]
    if len(rows := {size[0] for size in sizes.values() if size}) > 1:
        problems.append(f"the arrays of the batch have different numbers of rows, {sorted(rows)}; give all the same")
    for path, size in sizes.items():
        if size and size[0] % count:
            problems.append(f"batch {path!r} has {size[0]} rows, not divisible into {count} microbatches")
    if problems:
        raise ConfigError(problems)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0] // count, *x.shape[1:]), x.dtype), batch)
