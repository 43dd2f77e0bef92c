"""From a traced program to numbers: bytes over time, seconds per phase, collectives.

**Time** of a phase (forward, backward, update): kernels run one after another, each for the time of its roofline.
Collectives use another unit of the chip; the share `overlap_fraction` of the shorter one of both sums is hidden behind
the longer one: seconds = max(kernels, collectives) + (1 - overlap_fraction) min(kernels, collectives). Copies from and
to the memory of the host use a third unit, and are hidden completely: a phase takes at least their time. Slices wait
for the slowest of them: the share `SLICES` of the step for every doubling of their number.
"""

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from flax_mesh.hlo.collectives import ring_bytes
from flax_mesh.jax_compat import kernels_without_devices, lower_without_devices, propagated_module
from flax_mesh.plan.program.collectives import Exchange, find_exchanges
from flax_mesh.plan.program.cost import Cost, costs
from flax_mesh.plan.program.fusion import fuse
from flax_mesh.plan.program.kernels import Buffer, Kernel
from flax_mesh.plan.program.memory import Profile, profile
from flax_mesh.plan.program.normalize import normalize
from flax_mesh.plan.program.program import PHASES, Program
from flax_mesh.plan.program.read import read_program
from flax_mesh.plan.results import CATEGORIES, Memory, Moment, Part, Time, Traffic, summed
from flax_mesh.plan.topology import Topology, network_of
from flax_mesh.tree import PyTree

PLATFORMS = {"tpu": "tpu", "gpu": "cuda", "cpu": "cpu"}  # of a chip -> of JAX's lowering
SMALL = 2**20  # bytes of a collective that is combined with others
MOMENTS = 240  # of a timeline, at most
# Share of the memory that a step cannot use: the runtime, the programs and fragmentation. JAX reserves more on GPUs
# by default.
RESERVE = {"tpu": 0.02, "gpu": 0.06, "cpu": 0.0}
SLICES = 0.02  # fitted to published runs with 1 to 32 slices, as the constants of a chip
Stated = tuple[int | None, float | None]  # tokens and FLOPs per step


@dataclass(frozen=True, eq=False, repr=False)
class Estimate:
    """The kernels and costs of one program: F, B or W of a stage, or an entire step."""

    program: Program
    exchanges: tuple[Exchange, ...]
    kernels: tuple[Kernel, ...]
    profile: Profile
    costs: tuple[Cost, ...]

    @property
    def argument_bytes(self) -> int:
        """Without the arguments in the memory of the host, which are `host_bytes`."""
        return sum(x.bytes for x in self.program.block.arguments)

    @property
    def host_bytes(self) -> int:
        return sum(x.stored_bytes for x in self.program.block.arguments if x.on_host)


def estimate(
    step: Any,
    arguments: Sequence[PyTree],
    axis_sizes: Mapping[str, int],
    platform: str,
    *,
    excess_precision: bool = True,
) -> Estimate:
    """The estimate of a jitted function for abstract arguments on a platform: "tpu", "gpu" or "cpu".

    `excess_precision`: the option xla_allow_excess_precision. If false, values are stored in the dtype of the program.
    """
    with kernels_without_devices():
        traced = step.trace(*arguments)
    meshes = (getattr(getattr(x, "sharding", None), "mesh", None) for x in jax.tree.leaves(arguments))
    has_devices = any(isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == platform for mesh in meshes)
    module = propagated_module(lower_without_devices(traced, PLATFORMS[platform], has_devices), normalize)
    program = read_program(module, axis_sizes, platform, excess_precision)
    exchanges = find_exchanges(program)
    kernels, results = fuse(program, exchanges)
    memory = profile(kernels, results, platform)
    return Estimate(program, tuple(exchanges), tuple(kernels), memory, tuple(costs(kernels, program)))


# Time


def parts_of(estimated: Estimate, topology: Topology, name: str = "", times: int = 1) -> list[Part]:
    """One part per phase; with `name` one part for all of them."""
    groups = [(name, PHASES)] if name else [(phase, (phase,)) for phase in PHASES]
    parts: list[Part] = []
    for title, phases in groups:
        chosen = [cost for cost in estimated.costs if cost.phase in phases]
        exchanges = [x for x in estimated.exchanges if x.operation.phase in phases]
        network = _exchange_seconds(exchanges, estimated.program, topology)
        if chosen or network or name:
            parts.append(_part(title, chosen, network, topology, times))
    return parts


def _part(name: str, chosen: Sequence[Cost], network: float, topology: Topology, times: int) -> Part:
    chip = topology.chip
    compute = memory = kernels = 0.0
    for cost in chosen:
        a, b = cost.seconds(chip)
        compute, memory, kernels = compute + a * cost.times, memory + b * cost.times, kernels + max(a, b) * cost.times
    hidden = chip.overlap_fraction * min(kernels, network)
    host = math.fsum(cost.host_bytes * cost.times for cost in chosen) / chip.host_bandwidth
    return Part(
        name=name,
        times=times,
        flops=math.fsum(cost.flops * cost.times for cost in chosen),
        hbm_bytes=math.fsum(cost.bytes * cost.times for cost in chosen),
        compute_seconds=compute,
        memory_seconds=memory,
        network_seconds=network,
        seconds=max(kernels + network - hidden, host),
        host_seconds=host,
    )


def waiting(topology: Topology, seconds: float) -> list[Part]:
    """The part of a step of so many seconds in which slices wait for one another: stragglers, and a shared network."""
    wait = SLICES * math.log2(topology.num_slices) * seconds
    return [Part("wait for slices", 1, 0.0, 0.0, 0.0, 0.0, wait, wait)] if wait else []


def _exchange_seconds(exchanges: Sequence[Exchange], program: Program, topology: Topology) -> float:
    """Seconds of collectives. XLA combines small ones of one kind over the same devices: they share their latency."""
    seconds, small = 0.0, dict[tuple[str, tuple[str, ...], int], float]()
    for exchange in exchanges:
        if exchange.payload_bytes < SMALL:
            key = exchange.kind, exchange.axes, exchange.times
            small[key] = small.get(key, 0.0) + exchange.payload_bytes
        else:
            seconds += seconds_of(exchange, program, topology) * exchange.times
    for (kind, axes, times), payload in small.items():
        seconds += network_of(topology, program.axis_sizes, axes).seconds(kind, payload) * times
    return seconds


def seconds_of(exchange: Exchange, program: Program, topology: Topology) -> float:
    network = network_of(topology, program.axis_sizes, exchange.axes)
    return network.seconds(exchange.kind, exchange.payload_bytes)


def traffic_of(estimated: Estimate, topology: Topology, times: int = 1) -> list[Traffic]:
    """The collectives of a program by kind and axes."""
    traffic: list[Traffic] = []
    for exchange in estimated.exchanges:
        network = network_of(topology, estimated.program.axis_sizes, exchange.axes)
        sent = ring_bytes(exchange.kind, exchange.payload_bytes, estimated.program.group_size(exchange.axes))
        count = exchange.times * times
        fast, slow = (round(part * count) for part in network.split(sent, exchange.kind))
        seconds = network.seconds(exchange.kind, exchange.payload_bytes) * count
        amounts = count, exchange.operand_bytes * count, fast, slow, seconds
        traffic.append(Traffic(exchange.kind, exchange.axes, *amounts))
    return summed(traffic)


# Memory


@dataclass(frozen=True)
class Roles:
    """The categories of a step's arguments, and how temporary values are recognized."""

    kinds: tuple[str, ...]  # category of every argument
    shapes: frozenset[tuple[int, ...]]  # of parameters, and of one layer of a stack
    vocabulary: int = 0

    def of(self, buffer: Buffer, residuals: Set[int], is_update: bool) -> str:
        """The category of a temporary buffer, during the update or before it; `residuals`: ids of buffers."""
        shape = buffer.array.shape
        if buffer.gathered:
            return "collectives"
        if (producer := buffer.array.producer) is not None and producer.kind == "to_device":
            return "optimizer" if buffer.phase == "update" else "residuals"
        if tuple(sorted(shape)) in self.shapes:
            return "gradients" if is_update or buffer.phase in ("backward", "update") else "collectives"
        if self.vocabulary and shape and shape[-1] == self.vocabulary:
            return "logits"
        if id(buffer) in residuals:
            return "residuals"
        return "activations"


def timeline(estimated: Estimate, roles: Roles) -> list[Moment]:
    """Bytes by category while each kernel runs; one trip of every loop."""
    fixed, given, kinds = dict.fromkeys(CATEGORIES, 0), estimated.program.block.arguments, roles.kinds
    if len(kinds) != len(given):  # JAX drops arguments that a step does not use
        kinds = ["parameters" if index in estimated.program.donated else "batch" for index in range(len(given))]
    for kind, x in zip(kinds, given, strict=True):
        fixed[kind] += x.bytes
    return list(_moments(estimated.profile, roles, fixed)) or [Moment("", fixed)]


def _moments(memory: Profile, roles: Roles, before: Mapping[str, int]) -> Iterator[Moment]:
    """The sums of bytes by category change by the buffers of each kernel; a category may change with the update."""
    later = [
        read.buffer for step in memory.steps if step.kernel.phase != "forward" for read in step.kernel.reads.values()
    ]
    residuals = {id(buffer) for buffer in later if buffer.phase == "forward"}
    sums = {is_update: dict(before) for is_update in (False, True)}
    for step in memory.steps:
        for is_update, now in sums.items():
            for sign, buffers in ((-1, step.freed), (1, step.written)):
                for buffer in buffers:
                    now[roles.of(buffer, residuals, is_update)] += sign * buffer.bytes
        now = sums[step.kernel.phase == "update"]
        if step.body is not None:
            yield from _moments(step.body, roles, now)
        else:
            yield Moment(step.kernel.source or step.kernel.phase, dict(now))


def thinned(moments: Sequence[Moment], most: int = MOMENTS) -> tuple[Moment, ...]:
    """At most so many moments: of each run of neighbors the one with most bytes."""
    size = -(-len(moments) // most)
    runs = (moments[i : i + size] for i in range(0, len(moments), size))
    return tuple(max(run, key=lambda moment: moment.total) for run in runs)


def memory_of(
    topology: Topology,
    moments: Sequence[Moment],
    arguments: int,
    groups: tuple[int, ...],
    limit: int | None = None,
    host: int = 0,
) -> Memory:
    """`groups` are the peaks of the groups of a pipeline, `moments` the moments of the fullest one.

    `limit` is the capacity that the runtime reports, if the devices are here.
    """
    chip = topology.chip
    capacity = limit or round(chip.memory)
    reserve = 0 if limit else round(RESERVE[chip.platform] * capacity)
    highest = max(moments, key=lambda moment: moment.total)
    peak = max(groups)
    at_peak = dict(highest.bytes)
    at_peak["activations"] += max(0, peak - highest.total)  # a moment inside of a kernel
    return Memory(
        capacity=capacity - reserve,
        reserve=reserve,
        arguments=arguments,
        peak=max(peak, highest.total),
        at_peak={name: size for name, size in at_peak.items() if size},
        timeline=thinned(moments),
        groups=groups,
        host=host,
    )


def time_of(topology: Topology, seconds: float, parts: Sequence[Part], stated: Stated) -> Time:
    tokens, flops = stated
    count, peak = topology.num_devices, topology.chip.peak("bfloat16")
    return Time(
        seconds=seconds,
        parts=tuple(parts),
        tokens_per_s=tokens / seconds if tokens and seconds else None,
        mfu=flops / (seconds * count * peak) if flops and seconds else None,
        flops=math.fsum(part.flops * part.times for part in parts),
    )
