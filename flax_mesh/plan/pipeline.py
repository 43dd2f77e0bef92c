"""The estimate of a pipeline: F, B and W of every stage on the mesh of one group, and the groups' memory over time."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from flax_mesh.mpmd.runtime.compile import StageFunctions, compile_stages
from flax_mesh.mpmd.schedules.schedule import Action, Schedule
from flax_mesh.mpmd.schedules.simulate import StageCost
from flax_mesh.mpmd.split.split import StagedModel
from flax_mesh.plan.forecast import Estimate, estimate, memory_of, parts_of, traffic_of
from flax_mesh.plan.program.read import Array
from flax_mesh.plan.results import CATEGORIES, Memory, Moment, Part, Traffic
from flax_mesh.plan.topology import Topology, network_of
from flax_mesh.step.batch import microbatch_shapes, microbatch_spec


class StageEstimate(NamedTuple):
    """F, B and W of one stage, and the bytes that a microbatch stores between them."""

    forward: Estimate
    backward: Estimate
    weights: Estimate | None  # None: B computes all gradients
    received: int
    residuals: int  # from F to B
    lasting: int  # of the residuals, those that W needs; with what B passes on to W
    sent: int  # bytes of an activation that is sent on
    returned: int  # bytes of the gradients that are sent back
    gradients: int  # bytes of the accumulators

    @property
    def programs(self) -> Mapping[str, Estimate]:
        found = {"F": self.forward, "B": self.backward}
        return found if self.weights is None else found | {"W": self.weights}


@dataclass(frozen=True)
class GroupMoment:
    """Bytes on one group while an action runs, on top of its state."""

    action: Action
    stored: int  # residuals and boundary activations of the microbatches that are between F and B
    boundary: int  # of these, activations of other stages
    temporary: int  # of the action itself


def estimate_stages(
    staged: StagedModel,
    schedule: Schedule,
    batch: Any,
    shardings: Sequence[NamedSharding],
    mesh: AbstractMesh,
    shape: Mapping[str, int],
    axes: Any,
    *,
    remat: str,
    seed: int,
    platform: str,
) -> list[StageEstimate]:
    """The estimates of all stages. `shardings` has one entry per leaf of the staged model, `shape` is the whole mesh.

    Equal stages are estimated once. An activation has the sharding that the stage that sends it computes it with.
    """
    count = schedule.num_microbatches
    forward = staged.cut(microbatch_shapes(batch, count), seed=seed, train=True)
    stages = compile_stages(
        forward,
        schedule.stage_to_group,
        shardings,
        [mesh] * schedule.num_groups,
        train=True,
        remat="full" if staged.needs_full_remat else remat,
        split=schedule.splits_backward,
    )
    made = _Stages(stages, forward.leaves, jax.tree.leaves(batch), count, shardings, mesh, shape, axes, platform)
    for stage in stages:
        made.forward(stage)
    for stage in reversed(stages):
        made.backward(stage)
    return [made.found[stage.stage] for stage in stages]


class _Stages:
    def __init__(
        self,
        stages: Sequence[StageFunctions],
        leaves: Sequence[Any],
        batch: Sequence[Any],
        count: int,
        shardings: Sequence[NamedSharding],
        mesh: AbstractMesh,
        shape: Mapping[str, int],
        axes: Any,
        platform: str,
    ):
        self.stages, self.leaves, self.shardings = stages, leaves, shardings
        self.batch, self.count = batch, count
        self.mesh, self.shape, self.axes, self.platform = mesh, shape, axes, platform
        self.sender = {v: (stage.stage, i) for stage in stages for i, v in enumerate(stage.sent)}
        self.sent: dict[Any, Any] = {}  # variable -> abstract activation
        self.cotangents: dict[Any, list[Any]] = {}  # variable -> abstract gradients of its receivers
        self.arguments: dict[int, tuple[Any, ...]] = {}
        self.residuals: dict[int, list[Any]] = {}
        self.cache: dict[Any, Estimate] = {}
        self.forwards: dict[int, Estimate] = {}
        self.found: dict[int, StageEstimate] = {}

    def forward(self, stage: StageFunctions) -> None:
        leaves = [self._leaf(at, self.leaves[at].dtype) for at in stage.leaves]
        data = [self._data(self.batch[at]) for at in stage.data]
        number = self._abstract((), jnp.int32, ())
        received = [self.sent[v] for v in stage.received]
        sums = [self._abstract((), jnp.float32, ()) for _ in stage.sums]
        self.arguments[stage.stage] = (leaves, data, (number, number), received)
        one = self._estimate(stage, "F", stage.forward, (*self.arguments[stage.stage], sums))
        results = one.program.block.results
        for v, x in zip(stage.sent, results, strict=False):
            self.sent[v] = self._like(x, v.aval.dtype)
        last = len(results) - len(stage.changed) - len(stage.sums)
        types = self._types(stage.forward, (*self.arguments[stage.stage], sums))[1]
        middle = results[len(stage.sent) : last]
        self.residuals[stage.stage] = [self._like(x, t.dtype) for x, t in zip(middle, types, strict=True)]
        self.forwards[stage.stage] = one

    def backward(self, stage: StageFunctions) -> None:
        known, residuals = self.arguments[stage.stage], self.residuals[stage.stage]
        cotangents = [self.cotangents[stage.sent[i]] for i in stage.floats_out]
        grads = [self._leaf(at, jnp.promote_types(self.leaves[at].dtype, jnp.float32)) for at in stage.trained]
        arguments = (*known, residuals, cotangents, grads)
        one = self._estimate(stage, "B", stage.backward, arguments)
        results = one.program.block.results
        for i, x in zip(stage.floats_in, results, strict=False):
            v = stage.received[i]
            self.cotangents.setdefault(v, []).append(self._like(x, v.aval.dtype))
        weights, lasting = None, 0
        if stage.has_weights:
            types = self._types(stage.backward, arguments)[2]
            carried = results[len(stage.floats_in) + len(grads) :]
            carry = [self._like(x, t.dtype) for x, t in zip(carried, types, strict=True)]
            weights = self._estimate(stage, "W", stage.weights, (*known, residuals, cotangents, carry, grads))
            lasting = sum(x.bytes for x in carried)
        forward = self.forwards[stage.stage]
        first = len(stage.sent)
        stored = forward.program.block.results[first : first + len(residuals)]
        lasting += sum(x.bytes for i, x in enumerate(stored) if i in stage.lasting)
        self.found[stage.stage] = StageEstimate(
            forward,
            one,
            weights,
            received=self._bytes(known[3]),
            residuals=sum(x.bytes for x in stored),
            lasting=lasting,
            sent=sum(x.bytes for x in forward.program.block.results[:first]),
            returned=sum(x.bytes for x in results[: len(stage.floats_in)]),
            gradients=self._bytes(grads),
        )

    def _estimate(self, stage: StageFunctions, kind: str, function: Any, arguments: Any) -> Estimate:
        shapes = [(x.shape, str(x.dtype), x.sharding.spec) for x in jax.tree.leaves(arguments)]
        key = (kind, len(stage.sums), len(stage.sent), str(shapes))
        if key not in self.cache:
            one = estimate(function, arguments, dict(self.mesh.shape), self.platform)
            self.cache[key] = replace(one, program=replace(one.program, axis_sizes=self.shape))  # for their networks
        return self.cache[key]

    def _types(self, function: Any, arguments: Any) -> Any:
        return jax.eval_shape(function, *arguments)

    def _leaf(self, at: int, dtype: Any) -> jax.ShapeDtypeStruct:
        return self._abstract(self.leaves[at].shape, dtype, self.shardings[at].spec)

    def _data(self, x: Any) -> jax.ShapeDtypeStruct:
        shape = (self.count, x.shape[0] // self.count, *x.shape[1:])
        return self._abstract(shape, x.dtype, (None, *microbatch_spec(shape[1:], self.mesh, self.axes)))

    def _abstract(self, shape: Iterable[int], dtype: Any, spec: Iterable[Any]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=NamedSharding(self.mesh, PartitionSpec(*spec)))

    def _like(self, x: Array, dtype: Any) -> jax.ShapeDtypeStruct:
        spec = [None if any(":" in axis for axis in axes) else axes or None for axes in x.spec]
        return self._abstract(x.shape, dtype, spec)

    def _bytes(self, values: Sequence[jax.ShapeDtypeStruct]) -> int:
        return sum(
            jnp.dtype(x.dtype).itemsize * math.prod(x.sharding.shard_shape(x.shape))
            for x in values
            if x.sharding is not None
        )


def group_moments(row: Sequence[Action], stages: Sequence[StageEstimate]) -> list[GroupMoment]:
    """Bytes on one group during every action of its row of a schedule."""
    stored = boundary = 0
    found = []
    for action in row:
        stage = stages[action.stage]
        program = stage.programs.get(action.kind)
        temporary = program.profile.peak if program is not None else 0
        found.append(GroupMoment(action, stored + boundary, boundary, temporary))
        if action.kind == "F":
            stored, boundary = stored + stage.residuals, boundary + stage.received
        elif action.kind == "B" and stage.weights is not None:
            stored += stage.lasting - stage.residuals
        elif action.kind == "B":
            stored, boundary = stored - stage.residuals, boundary - stage.received
        elif action.kind == "W":
            stored, boundary = stored - stage.lasting, boundary - stage.received
    return found


def pipeline_memory(
    topology: Topology,
    schedule: Schedule,
    stages: Sequence[StageEstimate],
    sizes: Mapping[str, Sequence[int]],
    limit: int | None,
    host: Sequence[int] = (),
) -> Memory:
    """`sizes` has the bytes of every group by category of the state, `host` those in the memory of the host."""
    found: list[list[Moment]] = []
    for group, row in enumerate(schedule.rows):
        base = dict.fromkeys(CATEGORIES, 0) | {kind: of[group] for kind, of in sizes.items()}
        own = [stage for k, stage in enumerate(stages) if schedule.stage_to_group[k] == group]
        base["gradients"] = sum(stage.gradients for stage in own)
        moments = []
        for moment in group_moments(row, stages):
            now = dict(base)
            now["residuals"] += moment.stored - moment.boundary
            now["boundary"] += moment.boundary
            now["activations"] += moment.temporary
            kind, stage, microbatch = moment.action
            moments.append(Moment(f"{kind} of stage {stage}, microbatch {microbatch}", now))
        found.append(moments)
    peaks = tuple(max(moment.total for moment in moments) for moments in found)
    fullest = peaks.index(max(peaks))
    arguments = sum(of[fullest] for of in sizes.values())
    return memory_of(topology, found[fullest], arguments, peaks, limit, max(host, default=0))


def stage_parts(
    topology: Topology, shape: Mapping[str, int], schedule: Schedule, stages: Sequence[StageEstimate]
) -> tuple[list[Part], list[StageCost]]:
    parts, costs = [], []
    link = network_of(topology, shape, ("pp",))
    for number, stage in enumerate(stages):
        seconds = dict.fromkeys("FBW", 0.0)
        for kind, one in stage.programs.items():
            (part,) = parts_of(one, topology, f"stage {number} {kind}", schedule.num_microbatches)
            parts.append(part)
            seconds[kind] = part.seconds
        transfer = link.seconds("collective-permute", stage.sent) if stage.sent else 0.0
        costs.append(StageCost(seconds["F"], seconds["B"], seconds["W"], transfer))
    return parts, costs


def update_part(
    topology: Topology,
    schedule: Schedule,
    stages: Sequence[StageEstimate],
    sizes: Mapping[str, Sequence[int]],
    host: Sequence[int],
    flops: float,
) -> Part:
    """The optimizer reads the gradients, and reads and writes its state and the parameters of its group once.

    What is in the memory of the host is copied to the devices and back as well. `flops` are those of the products of
    the update, as Muon's, on one device, if all devices share them equally.
    """
    found, copied = [], 2 * max(host)
    for group in range(schedule.num_groups):
        gradients = sum(s.gradients for k, s in enumerate(stages) if schedule.stage_to_group[k] == group)
        found.append(2 * (sizes["parameters"][group] + sizes["optimizer"][group] + host[group]) + gradients)
    moved = float(max(found))
    if topology.chip.platform == "cpu":
        copied = 0  # as in the programs of stages
    memory = moved / topology.chip.memory_bandwidth + copied / topology.chip.host_bandwidth
    compute = flops / topology.chip.peak("float32")
    return Part("update", 1, flops, moved, compute, memory, 0.0, max(compute, memory))


def stage_traffic(
    topology: Topology, shape: Mapping[str, int], schedule: Schedule, stages: Sequence[StageEstimate]
) -> list[Traffic]:
    """Of the busiest group."""
    link, count = network_of(topology, shape, ("pp",)), schedule.num_microbatches
    best: list[Traffic] = []
    for group in range(schedule.num_groups):
        sums: dict[Any, Traffic] = {}
        for number, stage in enumerate(stages):
            if schedule.stage_to_group[number] != group:
                continue
            found = [x for one in stage.programs.values() for x in traffic_of(one, topology, count)]
            for size in filter(None, (stage.sent, stage.returned)):
                fast, slow = link.split(size * count, "collective-permute")
                seconds = link.seconds("collective-permute", size) * count
                found.append(Traffic("transfer", ("pp",), count, size * count, round(fast), round(slow), seconds))
            for each in found:
                before = sums.get(each[:2])
                sums[each[:2]] = each if before is None else before.plus(each)
        listed = sorted(sums.values(), key=lambda each: -each.seconds)
        if math.fsum(x.seconds for x in listed) > math.fsum(x.seconds for x in best):
            best = listed
    return best
