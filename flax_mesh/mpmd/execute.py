"""One pass over a schedule: actions dispatched one after the other, from one thread, without waiting."""

from typing import Any

import jax
import numpy as np

from flax_mesh.errors import ConfigError
from flax_mesh.loss import Batch
from flax_mesh.mpmd.placement import moved, on_group
from flax_mesh.mpmd.programs import StageFunctions
from flax_mesh.mpmd.schedules import Action
from flax_mesh.mpmd.update import SHARED
from flax_mesh.state import TrainState
from flax_mesh.tree import path_of


class Run:
    """One pass over a schedule: what is where at the moment."""

    def __init__(self, pipeline: Any, state: TrainState, batch: Batch, count: int, train: bool):
        self.pipeline, self.train = pipeline, train
        microbatch = check_batch(batch, count)
        self.stages = pipeline.functions(microbatch, train)
        self.cut = pipeline.staged.cut(microbatch, seed=pipeline.seed, train=train)
        self.saved: dict[tuple[int, int], Any] = {}  # (stage, microbatch) -> what B or W will need
        self.values: dict[Any, Any] = {}  # (variable, microbatch, receiving stage) -> activation there
        self.cotangents: dict[Any, list[Any]] = {}
        self.num_transfers = 0
        self.layouts = pipeline.layouts  # (sharding, receiving group) -> the same there
        self.changed: dict[int, Any] = {}  # leaf -> new value
        self.shared: dict[tuple[int, int], Any] = {}  # (leaf of the state, group) -> its copy there
        self._place_leaves(state)
        self._place_batch(batch, count)
        self._zeros()
        self.receivers = {v: [s.stage for s in self.stages if v in s.received] for s in self.stages for v in s.sent}
        self.sender = {v: pipeline.group_of[s.stage] for s in self.stages for v in s.sent}

    def do(self, action: Action) -> None:
        """Dispatch one action."""
        stage = self.stages[action.stage]
        {"F": self._forward, "B": self._backward, "W": self._weights}[action.kind](stage, action.microbatch)

    def named_sums(self) -> dict[str, tuple[int, Any]]:
        """name -> (group, sum over the microbatches)."""
        names = self.cut.names
        return {
            names[at]: (self.pipeline.group_of[s.stage], value)
            for s in self.stages
            for at, value in zip(s.sums, self.sums[s.stage], strict=True)
        }

    def _forward(self, stage: StageFunctions, microbatch: int) -> None:
        k, group = stage.stage, self.pipeline.group_of[stage.stage]
        leaves = [self.held[group, at] for at in stage.leaves]
        received = [self.values.pop((v, microbatch, k)) for v in stage.received]
        data, slot = self.data[k], self._slot(group, microbatch)
        sent, residuals, new, self.sums[k] = stage.forward(leaves, data, slot, received, self.sums[k])
        if self.train:
            old = {at: self.held[group, at] for at in stage.changed}
            self.saved[k, microbatch] = (received, residuals, old, None)
        for at, value in zip(stage.changed, new, strict=True):
            self.held[group, at] = self.changed[at] = value
        for v, value in zip(stage.sent, sent, strict=True):
            for receiver in self.receivers[v]:
                self.values[v, microbatch, receiver] = self._send(value, group, self.pipeline.group_of[receiver])

    def _backward(self, stage: StageFunctions, microbatch: int) -> None:
        k, group = stage.stage, self.pipeline.group_of[stage.stage]
        received, residuals, old, _ = self.saved.pop((k, microbatch))
        cotangents = [self.cotangents.pop((stage.sent[i], microbatch)) for i in stage.floats_out]
        leaves = [old.get(at, self.held[group, at]) for at in stage.leaves]
        data, slot = self.data[k], self._slot(group, microbatch)
        grads = [self.grads[group, at] for at in stage.trained] if not stage.has_weights else []
        to_inputs, grads, carry = stage.backward(leaves, data, slot, received, residuals, cotangents, grads)
        if not stage.has_weights:
            self.grads |= {(group, at): g for at, g in zip(stage.trained, grads, strict=True)}
        else:
            self.saved[k, microbatch] = (received, residuals, old, (cotangents, carry))
        for i, gradient in zip(stage.floats_in, to_inputs, strict=True):
            v = stage.received[i]
            self.cotangents.setdefault((v, microbatch), []).append(self._send(gradient, group, self.sender[v]))

    def _weights(self, stage: StageFunctions, microbatch: int) -> None:
        k, group = stage.stage, self.pipeline.group_of[stage.stage]
        received, residuals, old, (cotangents, carry) = self.saved.pop((k, microbatch))
        leaves = [old.get(at, self.held[group, at]) for at in stage.leaves]
        grads = [self.grads[group, at] for at in stage.trained]
        data, slot = self.data[k], self._slot(group, microbatch)
        grads = stage.weights(leaves, data, slot, received, residuals, cotangents, carry, grads)
        self.grads |= {(group, at): g for at, g in zip(stage.trained, grads, strict=True)}

    def _send(self, value: jax.Array, sender: int, receiver: int) -> jax.Array:
        if sender == receiver:
            return value
        self.num_transfers += 1
        key = value.sharding, receiver
        if key not in self.layouts:
            self.layouts[key] = moved(value.sharding, self.pipeline.groups[receiver])
        return jax.device_put(value, self.layouts[key])

    def _slot(self, group: int, microbatch: int) -> tuple[Any, Any]:
        return self.counts[group], self.pipeline.microbatch_index(group, microbatch)

    def _place_leaves(self, state: TrainState) -> None:
        """Every leaf on every group that uses it, and the number of the step on all."""
        pipeline = self.pipeline
        self.held: dict[tuple[int, int], Any] = {}
        # Of these stages, not of those in training: in `eval()` mode a model may read a variable elsewhere.
        for group, at in sorted({(pipeline.group_of[s.stage], at) for s in self.stages for at in s.leaves}):
            home = pipeline.leaf_home(at)
            value = state.leaves[pipeline.leaf_homes[at]]
            there = moved(home.sharding, pipeline.groups[group])
            self.held[group, at] = value if group == home.group else jax.device_put(value, there)
        for at, home in enumerate(pipeline.placement.homes):
            if home.group == SHARED:
                for group, mesh in enumerate(pipeline.groups):
                    self.shared[at, group] = on_group(state.leaves[at], mesh)
        step = next(at for at, home in enumerate(pipeline.placement.homes) if home.path == "optimizer/step")
        self.counts = [self.shared[step, group] for group in range(len(pipeline.groups))]

    def _place_batch(self, batch: Batch, count: int) -> None:
        """The batch as (microbatch, row, ...) on every group that reads it."""
        pipeline, first = self.pipeline, len(self.pipeline.staged.leaves)
        arrays = jax.tree.leaves(batch)
        placed: dict[tuple[int, int], Any] = {}
        self.data: list[list[Any]] = []
        for stage in self.stages:
            group = pipeline.group_of[stage.stage]
            for at in stage.data:
                if (group, at) not in placed:
                    placed[group, at] = pipeline.place_array(arrays[at - first], count, group)
            self.data.append([placed[group, at] for at in stage.data])

    def _zeros(self) -> None:
        pipeline = self.pipeline
        self.grads = {}
        self.sums: list[Any] = [None] * len(self.stages)
        for group in range(len(pipeline.groups)):
            mine = [s for s in self.stages if pipeline.group_of[s.stage] == group]
            trained = tuple(sorted({at for s in mine for at in s.trained})) if self.train else ()
            grads, sums = pipeline.zeros(group, trained, tuple(len(s.sums) for s in mine))
            self.grads |= {(group, at): g for at, g in zip(trained, grads, strict=True)}
            for s, zeros in zip(mine, sums, strict=True):
                self.sums[s.stage] = zeros


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
