"""The estimate of a pipeline: F, B and W of every stage on the mesh of one group, and the groups' memory over time."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from flax_mesh.mpmd.runtime.compile import Jitted, StageFunctions
from flax_mesh.mpmd.schedules.schedule import Action, Schedule
from flax_mesh.mpmd.schedules.simulate import StageCost
from flax_mesh.plan.forecast import Estimate, estimate, memory_of, parts_of, traffic_of
from flax_mesh.plan.program.program import Array
from flax_mesh.plan.results import CATEGORIES, Memory, Moment, Part, Traffic, summed
from flax_mesh.plan.stages import MakeProgram, Stages
from flax_mesh.plan.topology import Topology, network_of
from flax_mesh.tree import PyTree, shard_bytes


class StageEstimate(NamedTuple):
    """F, B and W of one stage, and the bytes that a microbatch stores between them."""

    forward: Estimate
    backward: Estimate
    weights: Estimate | None  # None: B computes all gradients
    received: int
    residuals: int  # from F to B
    lasting: int  # of the residuals that W needs, and of the values that B passes on to W
    sent: int  # bytes of an activation that is sent on
    returned: int  # bytes of the gradients that are sent back
    gradients: int  # bytes of the accumulators

    @property
    def programs(self) -> Mapping[str, Estimate]:
        programs = {"F": self.forward, "B": self.backward}
        return programs if self.weights is None else programs | {"W": self.weights}


def estimate_stages(
    visit: Callable[[MakeProgram[Estimate]], Stages[Estimate]],
    mesh: AbstractMesh,
    shape: Mapping[str, int],
    platform: str,
    **options: bool,
) -> list[StageEstimate]:
    """The estimates of all stages that `visit` calls its argument for, on the `mesh` of one group of `shape`.

    `options` are the options of `estimate`. Equal stages are estimated once. An activation has the sharding that the
    stage that sends it computes it with.
    """

    def make(kind: str, number: int, function: Jitted, arguments: tuple[PyTree, ...]) -> tuple[Estimate, PyTree]:
        estimated = estimate(function, arguments, dict(mesh.shape), platform, **options)
        types, tree = jax.tree.flatten(jax.eval_shape(function, *arguments))
        results = [_abstract(x, t.dtype, mesh) for x, t in zip(estimated.program.block.results, types, strict=True)]
        # The mesh of all groups, for the networks of its axes.
        return replace(estimated, program=replace(estimated.program, axis_sizes=shape)), tree.unflatten(results)

    stages = visit(make)
    return [_stage_estimate(stage, stages) for stage in stages.functions]


def _stage_estimate(stage: StageFunctions, stages: Stages[Estimate]) -> StageEstimate:
    forward, backward = (stages.programs[kind, stage.stage] for kind in "FB")
    *_, received, residuals, _, grads = stages.arguments["B", stage.stage]
    out, back = ([x.bytes for x in estimated.program.block.results] for estimated in (forward, backward))
    stored = out[len(stage.sent) :][: len(residuals)]
    carried = back[len(stage.floats_in) + len(grads) :] if stage.has_weights else []
    return StageEstimate(
        forward,
        backward,
        stages.programs.get(("W", stage.stage)),
        received=sum(map(shard_bytes, received)),
        residuals=sum(stored),
        lasting=sum(carried) + sum(size for i, size in enumerate(stored) if i in stage.lasting),
        sent=sum(out[: len(stage.sent)]),
        returned=sum(back[: len(stage.floats_in)]),
        gradients=sum(map(shard_bytes, grads)),
    )


def _abstract(x: Array, dtype: jax.typing.DTypeLike, mesh: AbstractMesh) -> jax.ShapeDtypeStruct:
    """A result of a program. Parts of axes have no name that a spec could contain."""
    spec = PartitionSpec(*(None if any(":" in axis for axis in axes) else axes or None for axes in x.spec))
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=NamedSharding(mesh, spec))


def _moments(row: Sequence[Action], stages: Sequence[StageEstimate], base: Mapping[str, int]) -> list[Moment]:
    """Bytes on one group during every action of its row of a schedule; `base`: bytes of its state and gradients."""
    residuals = boundary = 0  # of the microbatches that are between F and B; boundary: activations of other stages
    moments = []
    for action in row:
        stage = stages[action.stage]
        program = stage.programs.get(action.kind)
        temporary = program.profile.peak if program is not None else 0
        used = {"residuals": residuals, "boundary": boundary, "activations": temporary}
        kind, number, microbatch = action
        moments.append(Moment(f"{kind} of stage {number}, microbatch {microbatch}", {**base, **used}))
        if kind == "F":
            residuals, boundary = residuals + stage.residuals, boundary + stage.received
        elif kind == "B" and stage.weights is not None:
            residuals += stage.lasting - stage.residuals
        elif kind == "B":
            residuals, boundary = residuals - stage.residuals, boundary - stage.received
        elif kind == "W":
            residuals, boundary = residuals - stage.lasting, boundary - stage.received
    return moments


def pipeline_memory(
    topology: Topology,
    schedule: Schedule,
    stages: Sequence[StageEstimate],
    sizes: Mapping[str, Sequence[int]],
    limit: int | None,
    host: Sequence[int] = (),
) -> Memory:
    """`sizes` has the bytes of every group by category of the state, `host` the bytes in the memory of the host."""
    timelines: list[list[Moment]] = []
    for group, row in enumerate(schedule.rows):
        base = dict.fromkeys(CATEGORIES, 0) | {kind: of[group] for kind, of in sizes.items()}
        members = [stage for k, stage in enumerate(stages) if schedule.stage_to_group[k] == group]
        base["gradients"] = sum(stage.gradients for stage in members)
        timelines.append(_moments(row, stages, base))
    peaks = tuple(max(moment.total for moment in moments) for moments in timelines)
    fullest = peaks.index(max(peaks))
    arguments = sum(of[fullest] for of in sizes.values())
    return memory_of(topology, timelines[fullest], arguments, peaks, limit, max(host, default=0))


def stage_parts(
    topology: Topology, shape: Mapping[str, int], schedule: Schedule, stages: Sequence[StageEstimate]
) -> tuple[list[Part], list[StageCost]]:
    parts, costs = [], []
    link = network_of(topology, shape, ("pp",))
    for number, stage in enumerate(stages):
        seconds = dict.fromkeys("FBW", 0.0)
        for kind, estimated in stage.programs.items():
            (part,) = parts_of(estimated, topology, f"stage {number} {kind}", schedule.num_microbatches)
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

    Arrays in the memory of the host are copied to the devices and back as well. `flops` are the FLOPs of the products
    of the update, as Muon's, on one device, if all devices share them equally.
    """
    totals, copied = [], 2 * max(host)
    for group in range(schedule.num_groups):
        gradients = sum(s.gradients for k, s in enumerate(stages) if schedule.stage_to_group[k] == group)
        totals.append(2 * (sizes["parameters"][group] + sizes["optimizer"][group] + host[group]) + gradients)
    moved = float(max(totals))
    if topology.chip.platform == "cpu":
        copied = 0  # as in the programs of stages
    chip = topology.chip
    compute, memory = flops / chip.peak("float32"), moved / chip.memory_bandwidth
    copies = copied / chip.host_bandwidth
    return Part("update", 1, flops, moved, compute, memory, 0.0, max(compute, memory, copies), copies)


def stage_traffic(
    topology: Topology, shape: Mapping[str, int], schedule: Schedule, stages: Sequence[StageEstimate]
) -> list[Traffic]:
    """Of the busiest group."""
    link, count = network_of(topology, shape, ("pp",)), schedule.num_microbatches
    best: list[Traffic] = []
    for group in range(schedule.num_groups):
        traffic: list[Traffic] = []
        for number, stage in enumerate(stages):
            if schedule.stage_to_group[number] != group:
                continue
            traffic += [x for estimated in stage.programs.values() for x in traffic_of(estimated, topology, count)]
            for size in filter(None, (stage.sent, stage.returned)):
                fast, slow = link.split(size * count, "collective-permute")
                seconds = link.seconds("collective-permute", size) * count
                traffic.append(Traffic("transfer", ("pp",), count, size * count, round(fast), round(slow), seconds))
        total = summed(traffic)
        if math.fsum(x.seconds for x in total) > math.fsum(x.seconds for x in best):
            best = total
    return best
