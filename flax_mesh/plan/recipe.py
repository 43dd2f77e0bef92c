"""`plan`: the forecast of a recipe on a topology; `plan_step`: that of a step of one's own."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding

from flax_mesh.errors import ConfigError
from flax_mesh.hardware import load_chip
from flax_mesh.jax_compat import kernels_without_devices
from flax_mesh.mesh.create import normalize_axis_types
from flax_mesh.mpmd.runtime.placement import MODEL, OPTIMIZER, bytes_of_groups
from flax_mesh.mpmd.schedules.schedule import Schedule
from flax_mesh.mpmd.schedules.simulate import StageCost, simulate
from flax_mesh.plan import forecast
from flax_mesh.plan.pipeline import StageEstimate, estimate_stages, group_moments
from flax_mesh.plan.plan import Plan
from flax_mesh.plan.results import CATEGORIES, Memory, Moment, Part, Time, Traffic
from flax_mesh.plan.topology import Topology, network_of, parse_topology, resolve_mesh, topology_of_devices
from flax_mesh.sharding.abstract import abstract_state
from flax_mesh.sharding.rules import Finding
from flax_mesh.step.state import TrainState, abstract_train_state
from flax_mesh.train.build import (
    batch_sharding,
    make_modules,
    run_rules,
    split_model,
    train_program,
)
from flax_mesh.train.checks import check_config, check_on_mesh
from flax_mesh.train.config import TrainConfig, mesh_shape, shard_over
from flax_mesh.tree import named_leaves
from flax_mesh.user_code import check_arguments, place_of, user_code

# Share of the memory that a step cannot use: the runtime, the programs and fragmentation. JAX reserves more on GPUs
# unless it is told otherwise.
RESERVE = {"tpu": 0.02, "gpu": 0.06, "cpu": 0.0}


def plan(config: TrainConfig, topology: Topology | str | None = None) -> Plan:
    """Forecast the memory, the time and the traffic of a recipe's training step, without compiling it.

    The step is traced and its shardings are propagated; nothing is allocated, and no device of the topology is needed.

    Args:
        config: A recipe's config.
        topology: A text such as "v5p:4x4x8", or a Topology. None: the devices that are here.

    Returns:
        A `Plan`.

    Raises:
        ConfigError: Settings are invalid, the topology is unknown, or the mesh does not fit it.

    Example:
        >>> from flax_mesh.plan import plan
        >>> from flax_mesh.train import load_recipe
        >>> found = plan(load_recipe("recipes/tiny.py"), "v5e:2x4")
        >>> found.fits
        True
    """
    if problems := check_config(config):
        raise ConfigError(problems)
    found = _topology(topology, config.run.hardware)
    shape = mesh_shape(config)
    num_groups = shape.get("pp", 1)
    if num_groups == 1:
        shape.pop("pp", None)
    shape = resolve_mesh(found, shape)
    sizes = {name: size for name, size in shape.items() if name != "pp"}
    mesh = AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=normalize_axis_types(config.mesh.axis_types, tuple(sizes))
    )
    with kernels_without_devices():
        rules = run_rules(config, mesh)
        if problems := check_on_mesh(config, mesh, rules.axes):
            raise ConfigError(problems)
        if "pp" in shape:
            return _pipelined(config, found, shape, mesh, rules)
        program = train_program(config, mesh, rules)  # pyright: ignore[reportArgumentType] (an abstract mesh)
        rows = jax.ShapeDtypeStruct(
            (config.data.batch_size, config.data.sequence_length),
            jnp.int32,
            sharding=batch_sharding(mesh, rules.axes),  # pyright: ignore[reportArgumentType]
        )
        arguments = (program.layout, {"inputs": rows, "targets": rows})
        check_arguments("loss_fn", config.loss_fn, "model", "batch")
        with user_code("loss_fn", place_of(config.loss_fn)):
            jax.eval_shape(program.step, *arguments)  # `estimate` reuses the trace
        one = forecast.estimate(program.step, arguments, shape, found.chip.platform)
    roles = _roles(arguments, _vocabulary(config))
    return _assemble(found, shape, one, roles, _stated(config, program.num_parameters), config.model)


def plan_step(
    step: Callable[..., Any],
    arguments: Sequence[Any],
    hardware: Topology | str | None = None,
    *,
    tokens: int | None = None,
    flops: float | None = None,
) -> Plan:
    """Forecast a jitted function, such as the step of a training loop of one's own.

    Args:
        step: A function with `trace`, as `jax.jit` returns it.
        arguments: Its arguments as `jax.ShapeDtypeStruct`s whose shardings are NamedShardings on one mesh, which may be
            an AbstractMesh. A `TrainState` is accepted.
        hardware: A topology with as many devices as the mesh. None: the devices that are here.
        tokens: Tokens per step, for tokens per second.
        flops: FLOPs per step of all devices as the model states them, for the MFU.

    Raises:
        ConfigError: The arguments have no mesh, several meshes, or another number of devices than the topology.

    Example:
        >>> from flax_mesh.plan import plan_step
        >>> from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
        >>> mesh = AbstractMesh((8,), ("dp",), axis_types=(AxisType.Auto,))
        >>> split = NamedSharding(mesh, PartitionSpec("dp"))
        >>> x = jax.ShapeDtypeStruct((1024, 1024), np.float32, sharding=split)
        >>> plan_step(jax.jit(lambda x: x @ x.T), (x,), "v5e:2x4").memory.arguments
        524288
    """
    found = _topology(hardware, "")
    leaves = jax.tree.leaves(arguments)
    meshes = {x.sharding.mesh.abstract_mesh for x in leaves if isinstance(getattr(x, "sharding", None), NamedSharding)}
    if len(meshes) != 1:
        raise ConfigError(
            f"the arguments of the step must have NamedShardings on one mesh, but they have {len(meshes)} meshes; pass "
            "jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))"
        )
    (mesh,) = meshes
    sizes = resolve_mesh(found, dict(mesh.shape))
    one = forecast.estimate(step, arguments, dict(mesh.shape), found.chip.platform)
    return _assemble(found, sizes, one, _roles(arguments, 0), (tokens, flops), None)


Stated = tuple[int | None, float | None]  # tokens and FLOPs per step


def _topology(topology: Topology | str | None, hardware: str) -> Topology:
    if isinstance(topology, Topology):
        return topology
    chip = load_chip(hardware) if hardware else None
    return topology_of_devices(jax.devices(), chip) if topology is None else parse_topology(topology, chip)


def _stated(config: TrainConfig, num_parameters: int) -> Stated:
    tokens = config.data.batch_size * config.data.sequence_length
    count = config.flops_per_token
    return tokens, None if count is None else tokens * count(config.model, num_parameters, config.data.sequence_length)


def _vocabulary(config: TrainConfig) -> int:
    return int(getattr(config.model, "vocab_size", 0) or 0)


def _roles(arguments: Any, vocabulary: int) -> forecast.Roles:
    """The category of every argument, in the order of the leaves."""
    kinds: list[str] = []
    shapes: set[tuple[int, ...]] = set()
    for argument in arguments:
        if not isinstance(argument, TrainState):
            kinds += ["batch"] * len(jax.tree.leaves(argument))
            continue
        for path, leaf in named_leaves(argument.to_nnx()):
            kind = _kind(path, leaf)
            kinds.append(kind)
            if kind == "parameters" and math.prod(leaf.shape) > 1:
                shapes |= {
                    tuple(sorted(leaf.shape)),
                    tuple(sorted(leaf.shape[1:])),
                    tuple(sorted((1, *leaf.shape[1:]))),
                }
    if not shapes:  # a loop of one's own: what is as large as a parameter is not known
        state = [x for argument in arguments[:1] for x in jax.tree.leaves(argument)]
        kinds[: len(state)] = ["parameters"] * len(state)
        shapes = {tuple(sorted(x.shape)) for x in state}
    return forecast.Roles(tuple(kinds), frozenset(shapes), vocabulary)


def _kind(path: str, leaf: Any) -> str:
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return "other state"
    if path.startswith(OPTIMIZER):
        return "optimizer"
    return "parameters" if path.startswith(MODEL) else "other state"


def _assemble(
    topology: Topology,
    shape: Mapping[str, int],
    one: forecast.Estimate,
    roles: forecast.Roles,
    stated: Stated,
    model: Any,
) -> Plan:
    moments = forecast.timeline(one, roles)
    memory = _memory(topology, moments, one.argument_bytes, (one.argument_bytes + one.profile.peak,))
    parts = forecast.parts(one, topology)
    seconds = math.fsum(part.seconds for part in parts)
    time = _time(topology, seconds, parts, stated)
    traffic = tuple(forecast.traffic(one, topology))
    findings = (*_memory_findings(memory, model), *forecast.surprises(one, topology))
    return Plan(topology, shape, memory, time, traffic, findings, _summary(topology, memory, time, traffic, model))


def _memory(topology: Topology, moments: Sequence[Moment], arguments: int, groups: tuple[int, ...]) -> Memory:
    chip = topology.chip
    reserve = round(RESERVE[chip.platform] * chip.memory)
    highest = max(moments, key=lambda moment: moment.total)
    peak = max(groups)
    at_peak = dict(highest.bytes)
    at_peak["activations"] += max(0, peak - highest.total)  # a moment inside of a kernel
    return Memory(
        capacity=round(chip.memory) - reserve,
        reserve=reserve,
        arguments=arguments,
        peak=max(peak, highest.total),
        at_peak={name: size for name, size in at_peak.items() if size},
        timeline=forecast.thinned(moments),
        groups=groups,
    )


def _time(topology: Topology, seconds: float, parts: Sequence[Part], stated: Stated, **more: Any) -> Time:
    tokens, flops = stated
    count, peak = topology.num_devices, topology.chip.peak("bfloat16")
    return Time(
        seconds=seconds,
        parts=tuple(parts),
        tokens_per_s=tokens / seconds if tokens and seconds else None,
        mfu=flops / (seconds * count * peak) if flops and seconds else None,
        flops=math.fsum(part.flops * part.times for part in parts),
        **more,
    )


# Pipelines


def _pipelined(
    config: TrainConfig, topology: Topology, shape: Mapping[str, int], mesh: AbstractMesh, rules: Any
) -> Plan:
    num_groups = shape["pp"]
    staged, schedule = split_model(config, rules.layers, num_groups, mesh)
    make = partial(make_modules, config)
    table = rules if rules.table else None
    abstract = abstract_state(make, mesh, table, axes=rules.axes, shard_optimizer_over=shard_over(config))
    state = abstract_train_state(make, abstract)
    named = named_leaves(state.to_nnx())
    model = [leaf for path, leaf in named if path.startswith(MODEL)]
    shardings = [model[leaf.source].sharding for leaf in staged.leaves]
    staged = staged.with_layout(mesh, [x.sharding.spec for x in model], rules.axes)
    rows = jax.ShapeDtypeStruct((config.data.batch_size, config.data.sequence_length), jnp.int32)
    stages = estimate_stages(
        staged,
        schedule,
        {"inputs": rows, "targets": rows},
        shardings,
        mesh,
        shape,
        rules.axes,
        remat=config.pipeline.remat,
        seed=config.run.seed,
        platform=topology.chip.platform,
    )
    sizes: dict[str, list[int]] = {}
    for kind in ("parameters", "optimizer", "other state"):
        leaves = [(path, x, _device_bytes(x) if _kind(path, x) == kind else 0) for path, x in named]
        sizes[kind] = bytes_of_groups(staged, schedule.stage_to_group, leaves)
    memory = _pipeline_memory(topology, schedule, stages, sizes)
    parts, costs = _stage_parts(topology, shape, schedule, stages)
    update = _update_part(topology, schedule, stages, sizes)
    simulated = simulate(schedule, costs)
    count = sum(math.prod(x.shape) for path, x in named if _kind(path, x) == "parameters")
    time = _time(
        topology,
        simulated.makespan + update.seconds,
        [*parts, update],
        _stated(config, count),
        bubble=simulated.bubble,
        schedule=schedule,
        simulation=simulated,
    )
    time = replace(time, flops=math.fsum(part.flops * part.times for part in parts) / num_groups)
    traffic = _stage_traffic(topology, shape, schedule, stages)
    findings = [*_memory_findings(memory, config.model)]
    findings += forecast.surprises(stages[0].backward, topology)
    return Plan(
        topology,
        shape,
        memory,
        time,
        tuple(traffic),
        tuple(findings),
        _summary(topology, memory, time, traffic, config.model),
    )


def _device_bytes(x: Any) -> int:
    return math.prod(x.sharding.shard_shape(x.shape)) * jnp.dtype(x.dtype).itemsize


def _pipeline_memory(
    topology: Topology, schedule: Schedule, stages: Sequence[StageEstimate], sizes: Mapping[str, Sequence[int]]
) -> Memory:
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
    return _memory(topology, found[fullest], arguments, peaks)


def _stage_parts(
    topology: Topology, shape: Mapping[str, int], schedule: Schedule, stages: Sequence[StageEstimate]
) -> tuple[list[Part], list[StageCost]]:
    parts, costs = [], []
    link = network_of(topology, shape, ("pp",))
    for number, stage in enumerate(stages):
        seconds = dict.fromkeys("FBW", 0.0)
        for kind, one in stage.programs.items():
            (part,) = forecast.parts(one, topology, f"stage {number} {kind}", schedule.num_microbatches)
            parts.append(part)
            seconds[kind] = part.seconds
        transfer = link.seconds("collective-permute", stage.sent) if stage.sent else 0.0
        costs.append(StageCost(seconds["F"], seconds["B"], seconds["W"], transfer))
    return parts, costs


def _update_part(
    topology: Topology, schedule: Schedule, stages: Sequence[StageEstimate], sizes: Mapping[str, Sequence[int]]
) -> Part:
    """The optimizer reads the gradients, and reads and writes its state and the parameters of its group once."""
    found = []
    for group in range(schedule.num_groups):
        gradients = sum(s.gradients for k, s in enumerate(stages) if schedule.stage_to_group[k] == group)
        found.append(2 * (sizes["parameters"][group] + sizes["optimizer"][group]) + gradients)
    moved = float(max(found))
    seconds = moved / topology.chip.memory_bandwidth
    return Part("update", 1, 0.0, moved, 0.0, seconds, 0.0, seconds)


def _stage_traffic(
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
            found = [x for one in stage.programs.values() for x in forecast.traffic(one, topology, count)]
            if stage.sent:
                fast, slow = link.split(stage.sent * count, "collective-permute")
                seconds = link.seconds("collective-permute", stage.sent) * count
                found.append(Traffic("transfer", ("pp",), count, stage.sent * count, round(fast), round(slow), seconds))
            for each in found:
                before = sums.get(each[:2])
                numbers = each[2:] if before is None else [a + b for a, b in zip(before[2:], each[2:], strict=True)]
                sums[each[:2]] = Traffic(*each[:2], *numbers)
        listed = sorted(sums.values(), key=lambda each: -each.seconds)
        if math.fsum(x.seconds for x in listed) > math.fsum(x.seconds for x in best):
            best = listed
    return best


# Words


def _memory_findings(memory: Memory, model: Any) -> list[Finding]:
    if memory.fits is not False:
        return []
    largest = max(memory.at_peak, key=lambda name: memory.at_peak[name])
    over = (memory.peak - (memory.capacity or 0)) / 2**30
    return [Finding("memory", f"{over:.1f} GiB more than a device has; most are {largest}", REPAIRS[largest](model))]


def _less_activations(model: Any) -> str:
    if getattr(model, "remat", "full") == "none":
        return "Set model.remat=full, or reduce data.batch_size"
    if getattr(model, "attention", "") == "xla":
        return "Use an attention kernel that stores no scores, split heads over tp, or reduce data.batch_size"
    return "Reduce data.batch_size, raise pipeline.num_microbatches, or split the sequence over sp"


def _more_shards(model: Any) -> str:
    return "Split over more devices: raise fsdp in mesh.shape"


REPAIRS: dict[str, Callable[[Any], str]] = {
    "parameters": _more_shards,
    "optimizer": lambda model: "Raise fsdp in mesh.shape, or set optimizer.shard_over=dp",
    "other state": _more_shards,
    "batch": lambda model: "Reduce data.batch_size",
    "gradients": _more_shards,
    "residuals": _less_activations,
    "boundary": lambda model: "Reduce the rows of a microbatch: raise pipeline.num_microbatches",
    "logits": lambda model: "Set model.loss_chunk, so that the loss computes fewer logits at a time",
    "activations": _less_activations,
    "collectives": lambda model: "Split weights over tp, so that less of them is gathered at a time",
}


def _summary(topology: Topology, memory: Memory, time: Time, traffic: Sequence[Traffic], model: Any) -> str:
    """What limits the run, and what would help."""
    if memory.fits is False:
        finding = _memory_findings(memory, model)[0]
        return f"It does not fit: {finding.problem}. {finding.repair}."
    weights = {
        "compute": math.fsum(p.compute_seconds * p.times for p in time.parts),
        "memory": math.fsum(max(0.0, p.memory_seconds - p.compute_seconds) * p.times for p in time.parts),
        "network": math.fsum(
            max(0.0, p.seconds - max(p.compute_seconds, p.memory_seconds)) * p.times for p in time.parts
        ),
        "bubble": time.bubble * time.seconds * (len(memory.groups) if time.schedule else 1),
    }
    largest = max(weights, key=lambda name: weights[name])
    share = weights[largest] / (math.fsum(weights.values()) or 1.0)
    if largest == "network" and traffic:
        axes = "+".join(traffic[0].axes)
        what = f"the {traffic[0].kind} over {axes}"
        slow = traffic[0].dcn_bytes > traffic[0].ici_bytes
        advice = "more tokens per device would hide it" + (", or an axis inside of a slice" if slow else "")
        return f"The step is limited by the network ({share:.0%}), most by {what}; {advice}."
    if largest == "memory":
        return f"The step is limited by the bandwidth of the memory ({share:.0%}); " + (
            "an attention kernel that stores no scores would help."
            if getattr(model, "attention", "") == "xla"
            else "fewer and larger operations would help, such as more rows per device."
        )
    if largest == "bubble":
        return (
            f"The step is limited by the idle time of the pipeline ({time.bubble:.0%}); more microbatches would help."
        )
    free = (memory.capacity or 0) - memory.peak
    if getattr(model, "remat", "none") == "full" and free > 0.3 * (memory.capacity or 0):
        return f"The step is limited by compute ({share:.0%}); memory is free for less remat, which would compute less."
    return f"The step is limited by compute ({share:.0%}); more devices or fewer recomputed layers would help."
