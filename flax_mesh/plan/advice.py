"""The words of a plan: what does not fit, what is surprising, what limits the run and what would help."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from flax_mesh.plan.forecast import Estimate, seconds_of
from flax_mesh.plan.program.collectives import Exchange
from flax_mesh.plan.program.read import Array, Operation
from flax_mesh.plan.results import Memory, Time, Traffic
from flax_mesh.plan.topology import Topology
from flax_mesh.sharding.rules import Finding


def surprises(one: Estimate, topology: Topology) -> list[Finding]:
    """Loops and kernels that the estimate cannot count, and activations that are gathered."""
    found = []
    for operation, _ in one.program.block.walk():
        place = operation.source or operation.kind
        if operation.kind == "while" and not operation.times_known:
            found.append(
                Finding(place, "the trip count of this loop is not known; one trip is counted", "Use jax.lax.scan")
            )
        if operation.kind == "custom_call" and not _states_flops(operation):
            name = operation.attributes.get("call_target_name", "").strip('"')
            if name.endswith("custom_call") or "kernel" in name:
                repair = "Pass cost_estimate= to pallas_call"
                found.append(Finding(place, f"the FLOPs of this kernel ({name}) are not known; 0 are counted", repair))
    total = math.fsum(seconds_of(e, one.program, topology) * e.times for e in one.exchanges)
    by_place: dict[str, tuple[float, Exchange]] = {}
    for exchange in one.exchanges:
        if exchange.kind not in ("all-gather", "all-to-all") or exchange.array is None or _is_weight(exchange.array):
            continue
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


def _states_flops(operation: Operation) -> bool:
    text = operation.attributes.get("backend_config", "")
    return "flops" in text or "forward" in text or "backward" in text


MOVES = ("convert", "reshape", "transpose", "slice", "dynamic_slice", "reshard", "optimization_barrier")


def _is_weight(array: Array, depth: int = 8) -> bool:
    """Whether a value is an argument, or only moved or cast from one."""
    while array.producer is not None and depth:
        producer = array.producer
        if producer.kind not in MOVES:
            return False
        index = producer.outputs.index(array) if producer.kind == "optimization_barrier" else 0
        array, depth = producer.inputs[index], depth - 1
    return array.producer is None


def memory_findings(memory: Memory, model: Any) -> list[Finding]:
    if memory.fits is not False:
        return []
    problem = f"{memory.missing / 2**30:.1f} GiB more than a device has; most are {memory.largest}"
    return [Finding("memory", problem, REPAIRS[memory.largest](model))]


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
    "optimizer": lambda model: (
        "Raise fsdp in mesh.shape, or set optimizer.shard_over=dp or optimizer.memory=pinned_host"
    ),
    "other state": _more_shards,
    "batch": lambda model: "Reduce data.batch_size",
    "gradients": _more_shards,
    "residuals": _less_activations,
    "boundary": lambda model: "Reduce the rows of a microbatch: raise pipeline.num_microbatches",
    "logits": lambda model: "Set model.loss_chunk, so that the loss computes fewer logits at a time",
    "activations": _less_activations,
    "collectives": lambda model: "Split weights over tp, so that less of them is gathered at a time",
}


def summary(topology: Topology, memory: Memory, time: Time, traffic: Sequence[Traffic], model: Any) -> str:
    """What limits the run, and what would help."""
    if memory.fits is False:
        finding = memory_findings(memory, model)[0]
        return f"It does not fit: {finding.problem}. {finding.repair}."
    weights: dict[str, float] = dict.fromkeys(("compute", "memory", "network", "bubble"), 0.0)
    for part in time.parts:
        weights[part.limit] += part.seconds * part.times
    weights["bubble"] = time.bubble / (1 - time.bubble) * math.fsum(weights.values())
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
