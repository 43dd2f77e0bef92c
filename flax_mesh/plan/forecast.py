"""From a traced program to numbers: bytes over time, seconds per phase, collectives.

**Time** of a phase (forward, backward, update): kernels run one after another, each as long as its roofline says.
Collectives use another unit of the chip; the share `overlap_fraction` of the shorter one of both sums is hidden behind
the longer one: seconds = max(kernels, collectives) + (1 - overlap_fraction) min(kernels, collectives).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flax_mesh.jax_compat import kernels_without_devices, lower_without_devices, propagated_module
from flax_mesh.plan.program.collectives import Exchange, find_exchanges
from flax_mesh.plan.program.cost import Cost, costs
from flax_mesh.plan.program.fusion import Buffer, Kernel, fuse
from flax_mesh.plan.program.memory import Profile, profile
from flax_mesh.plan.program.normalize import normalize
from flax_mesh.plan.program.read import PHASES, Array, Program, read_program
from flax_mesh.plan.results import CATEGORIES, Moment, Part, Traffic
from flax_mesh.plan.topology import Topology, network_of
from flax_mesh.sharding.rules import Finding

PLATFORMS = {"tpu": "tpu", "gpu": "cuda", "cpu": "cpu"}  # of a chip -> of JAX's lowering
SMALL = 2**20  # bytes of a collective that is combined with others
MOMENTS = 240  # of a timeline, at most


@dataclass(frozen=True, eq=False)
class Estimate:
    """What one program needs: F, B or W of a stage, or an entire step."""

    program: Program
    exchanges: tuple[Exchange, ...]
    kernels: tuple[Kernel, ...]
    profile: Profile
    costs: tuple[Cost, ...]

    @property
    def argument_bytes(self) -> int:
        return sum(x.bytes for x in self.program.block.arguments)


def estimate(step: Any, arguments: Sequence[Any], axis_sizes: Mapping[str, int], platform: str) -> Estimate:
    """The estimate of a jitted function for abstract arguments on a platform: "tpu", "gpu" or "cpu"."""
    with kernels_without_devices():
        traced = step.trace(*arguments)
    module = propagated_module(lower_without_devices(traced, PLATFORMS[platform]), normalize)
    program = read_program(module, axis_sizes, platform)
    exchanges = find_exchanges(program)
    kernels, results = fuse(program, exchanges)
    found = profile(kernels, results, platform)
    return Estimate(program, tuple(exchanges), tuple(kernels), found, tuple(costs(kernels, program)))


# Time


def parts(one: Estimate, topology: Topology, name: str = "", times: int = 1) -> list[Part]:
    """One part per phase; with `name` one part for all of them."""
    groups = [(name, PHASES)] if name else [(phase, (phase,)) for phase in PHASES]
    found = []
    for title, phases in groups:
        chosen = [cost for cost in one.costs if cost.phase in phases]
        network = exchange_seconds([x for x in one.exchanges if x.phase in phases], one.program, topology)
        if chosen or network or name:
            found.append(_part(title, chosen, network, topology, times))
    return found


def _part(name: str, chosen: Sequence[Cost], network: float, topology: Topology, times: int) -> Part:
    chip = topology.chip
    compute = memory = kernels = 0.0
    for cost in chosen:
        a, b = cost.seconds(chip)
        compute, memory, kernels = compute + a * cost.times, memory + b * cost.times, kernels + max(a, b) * cost.times
    hidden = chip.overlap_fraction * min(kernels, network)
    return Part(
        name=name,
        times=times,
        flops=math.fsum(cost.flops * cost.times for cost in chosen),
        hbm_bytes=math.fsum(cost.bytes * cost.times for cost in chosen),
        compute_seconds=compute,
        memory_seconds=memory,
        network_seconds=network,
        seconds=kernels + network - hidden,
    )


def exchange_seconds(found: Sequence[Exchange], program: Program, topology: Topology) -> float:
    """Seconds of collectives. XLA combines small ones of one kind over the same devices: they share their latency."""
    seconds, small = 0.0, dict[tuple[str, tuple[str, ...], int], float]()
    for exchange in found:
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


def traffic(one: Estimate, topology: Topology, times: int = 1) -> list[Traffic]:
    """The collectives of a program by kind and axes."""
    sums: dict[tuple[str, tuple[str, ...]], Traffic] = {}
    for exchange in one.exchanges:
        key = exchange.kind, exchange.axes
        before = sums.get(key, Traffic(*key, 0, 0, 0, 0, 0.0))
        network = network_of(topology, one.program.axis_sizes, exchange.axes)
        size = one.program.group_size(exchange.axes)
        sent = exchange.payload_bytes
        if exchange.kind not in ("collective-permute", "collective-broadcast"):
            sent = sent * (size - 1) // size * (2 if exchange.kind == "all-reduce" else 1)
        count = exchange.times * times
        fast, slow = (round(part * count) for part in network.split(sent, exchange.kind))
        seconds = network.seconds(exchange.kind, exchange.payload_bytes) * count
        sums[key] = Traffic(
            *key,
            before.times + count,
            before.operand_bytes + exchange.operand_bytes * count,
            before.ici_bytes + fast,
            before.dcn_bytes + slow,
            before.seconds + seconds,
        )
    return sorted(sums.values(), key=lambda each: -each.seconds)


# Memory


@dataclass(frozen=True)
class Roles:
    """What the arguments of a step are, and how temporary values are recognized."""

    kinds: tuple[str, ...]  # category of every argument
    shapes: frozenset[tuple[int, ...]]  # of parameters, and of one layer of a stack
    vocabulary: int = 0

    def of(self, buffer: Buffer, phase: str) -> str:
        """The category of a temporary buffer while a kernel of a phase runs."""
        shape = buffer.array.shape
        if buffer.gathered:
            return "collectives"
        if tuple(sorted(shape)) in self.shapes:
            return "gradients" if buffer.phase in ("backward", "update") or phase == "update" else "collectives"
        if self.vocabulary and shape and shape[-1] == self.vocabulary:
            return "logits"
        if buffer.phase == "forward" and phase != "forward":
            return "residuals"
        return "activations"


def timeline(one: Estimate, roles: Roles) -> list[Moment]:
    """Bytes by category while each kernel runs; one trip of every loop."""
    fixed = dict.fromkeys(CATEGORIES, 0)
    for kind, x in zip(roles.kinds, one.program.block.arguments, strict=True):
        fixed[kind] += x.bytes
    found: list[Moment] = []
    _moments(one.profile, one.program.platform, roles, fixed, found)
    return found


def _moments(found: Profile, platform: str, roles: Roles, before: Mapping[str, int], into: list[Moment]) -> None:
    for kernel, _, alive in found.steps:
        now = dict(before)
        for buffer in alive.values():
            now[roles.of(buffer, kernel.phase)] += buffer.bytes
        if kernel.body:
            _moments(profile(kernel.body, kernel.results, platform), platform, roles, now, into)
        else:
            into.append(Moment(kernel.source or kernel.phase, now))


def thinned(moments: Sequence[Moment], most: int = MOMENTS) -> tuple[Moment, ...]:
    """At most so many moments: of each run of neighbors the one with most bytes."""
    size = -(-len(moments) // most)
    runs = (moments[i : i + size] for i in range(0, len(moments), size))
    return tuple(max(run, key=lambda moment: moment.total) for run in runs)


# What is surprising


def surprises(one: Estimate, topology: Topology) -> list[Finding]:
    """Loops and kernels that the estimate cannot count, and activations that are gathered."""
    found = []
    for operation, _ in one.program.block.walk():
        place = operation.source or operation.kind
        if operation.kind == "while" and not operation.times_known:
            found.append(
                Finding(place, "the trip count of this loop is not known; one trip is counted", "Use jax.lax.scan")
            )
        if operation.kind == "custom_call" and not one_has_flops(operation):
            name = operation.attributes.get("call_target_name", "").strip('"')
            if name.endswith("custom_call") or "kernel" in name:
                repair = "Pass cost_estimate= to pallas_call"
                found.append(Finding(place, f"the FLOPs of this kernel ({name}) are not known; 0 are counted", repair))
    total = math.fsum(seconds_of(e, one.program, topology) * e.times for e in one.exchanges)
    by_place: dict[str, tuple[float, Exchange]] = {}
    for exchange in one.exchanges:
        if exchange.kind in ("all-gather", "all-to-all") and exchange.array is not None:
            if not _is_weight(exchange.array):
                place = exchange.operation.source or exchange.operation.kind
                seconds = seconds_of(exchange, one.program, topology) * exchange.times
                before = by_place.get(place, (0.0, exchange))
                by_place[place] = (before[0] + seconds, exchange)
    for place, (seconds, exchange) in sorted(by_place.items(), key=lambda item: -item[1][0])[:4]:
        if seconds > 0.1 * total:
            share = f"{seconds / total:.0%} of the time of all collectives"
            found.append(
                Finding(
                    place,
                    f"an activation is exchanged here ({exchange.kind} over {', '.join(exchange.axes)}): {share}",
                    "Constrain its sharding where it is made",
                )
            )
    return found


def one_has_flops(operation: Any) -> bool:
    text = operation.attributes.get("backend_config", "")
    return "flops" in text or "forward" in text or "backward" in text


def _is_weight(array: Array, depth: int = 8) -> bool:
    """Whether a value is an argument, or only moved or cast from one."""
    while array.producer is not None and depth:
        if array.producer.kind not in (
            "convert",
            "reshape",
            "transpose",
            "dynamic_slice",
            "optimization_barrier",
            "slice",
        ):
            return False
        array, depth = array.producer.inputs[0], depth - 1
    return array.producer is None
