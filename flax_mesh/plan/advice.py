"""The words of a plan: memory that does not fit, surprises, the limit of the run and changes that would help."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from flax_mesh.plan.forecast import Estimate, seconds_of
from flax_mesh.plan.program.collectives import Exchange
from flax_mesh.plan.program.program import Array, Operation
from flax_mesh.plan.results import Memory, Time, Traffic
from flax_mesh.plan.topology import Topology
from flax_mesh.recipe.config import shard_over
from flax_mesh.recipe.optimizers.config import OptimizerConfig
from flax_mesh.sharding.rules import Finding
from flax_mesh.text import bytes_text


def surprises(estimated: Estimate, topology: Topology) -> list[Finding]:
    """Loops and kernels that the estimate cannot count, and activations that are gathered."""
    findings: list[Finding] = []
    for operation in estimated.program.block.walk():
        place = operation.source or operation.kind
        if operation.kind == "while" and not operation.times_known:
            findings.append(
                Finding(place, "the trip count of this loop is not known; one trip is counted", "Use jax.lax.scan")
            )
        if operation.kind == "custom_call" and not _states_flops(operation):
            name = operation.attributes.get("call_target_name", "").strip('"')
            if name.endswith("custom_call") or "kernel" in name:
                repair = "Pass cost_estimate= to pallas_call"
                findings.append(
                    Finding(place, f"the FLOPs of this kernel ({name}) are not known; 0 are counted", repair)
                )
    total = math.fsum(seconds_of(e, estimated.program, topology) * e.times for e in estimated.exchanges)
    by_place: dict[str, tuple[float, Exchange]] = {}
    for exchange in estimated.exchanges:
        if exchange.kind not in ("all-gather", "all-to-all") or exchange.array is None or _is_weight(exchange.array):
            continue
        place = exchange.operation.source or exchange.operation.kind
        seconds = seconds_of(exchange, estimated.program, topology) * exchange.times
        before = by_place.get(place, (0.0, exchange))
        by_place[place] = (before[0] + seconds, exchange)
    for place, (seconds, exchange) in sorted(by_place.items(), key=lambda item: -item[1][0])[:4]:
        if seconds > 0.1 * total:
            share = f"{seconds / total:.0%} of the time of all collectives"
            findings.append(
                Finding(
                    place,
                    f"an activation is exchanged here ({exchange.kind} over {', '.join(exchange.axes)}): {share}",
                    "Constrain its sharding where it is made",
                )
            )
    return findings


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


# Errors of the step times of runs that no constant was fitted to, by the content of a forecast: the lowest, the highest
# and their number. docs/plan.md has the runs.
ERRORS = {
    "experts": (-0.33, 0.10, 4),
    "several TPU slices": (-0.12, 0.23, 12),
    "dense models on one TPU slice": (-0.19, 0.25, 14),
    "dense models on one H100 or H200": (-0.03, 0.15, 6),
}


def certainty(topology: Topology, time: Time, *, experts: bool) -> str:
    """How far forecasts of this kind were from measured steps."""
    chip = topology.chip
    if time.schedule is not None:
        kind = "pipelines"
    elif chip.platform == "tpu":
        kind = "several TPU slices" if topology.num_slices > 1 else "dense models on one TPU slice"
        kind = "experts" if experts else kind
    elif chip.name in ("H100", "H200") and topology.num_devices == 1 and not experts:
        kind = "dense models on one H100 or H200"
    else:
        others = "CPUs" if chip.platform == "cpu" else f"{topology.num_devices} {chip.name}"
        kind = f"experts on {chip.name}" if experts else others
    if kind not in ERRORS:
        return f"no measured step of {kind} was compared with its forecast"
    low, high, count = ERRORS[kind]
    return f"of {count} measured steps of {kind}, forecasts were off by {low:+.0%} to {high:+.0%}"


HIDDEN = "model.axes.hidden_state_axis"


class Given(NamedTuple):
    """The settings that a plan has already, which are not advised; of a step without a recipe, none are known."""

    model: Any = None
    optimizer: OptimizerConfig | None = None
    mesh: Mapping[str, int] = MappingProxyType({})

    def setting(self, name: str, default: Any = None) -> Any:
        """A field of the model's config."""
        return getattr(self.model, name, default)


def memory_findings(memory: Memory, given: Given) -> list[Finding]:
    if memory.fits is not False:
        return []
    problem = f"{bytes_text(memory.missing)} more than a device has; most are {memory.largest}"
    return [Finding("memory", problem, REPAIRS[memory.largest](given))]


def _less_activations(given: Given) -> str:
    if given.setting("remat", "full") == "none":
        return "Set model.remat=full, or reduce data.batch_size"
    if given.mesh.get("tp", 1) > 1 and getattr(given.setting("axes"), "hidden_state_axis", "tp") is None:
        return f"Set {HIDDEN}=tp: activations between the layers are then split over tp; or reduce data.batch_size"
    if given.setting("attention", "") == "xla":
        return "Use an attention kernel that stores no scores, split heads over tp, or reduce data.batch_size"
    return "Reduce data.batch_size, raise pipeline.num_microbatches, or split the sequence over sp"


def _more_shards(given: Given) -> str:
    if given.mesh and given.mesh.get("fsdp", 1) == math.prod(given.mesh.values()):
        return "Use more devices"
    return "Raise fsdp in mesh.shape"


def _less_optimizer(given: Given) -> str:
    repairs, optimizer = [_more_shards(given)], given.optimizer
    if optimizer is not None and "dp" not in shard_over(optimizer) and given.mesh.get("dp", 1) > 1:
        repairs.append("set optimizer.shard_over=dp")
    if optimizer is not None and optimizer.memory == "device":
        repairs.append("set optimizer.memory=pinned_host")
    return ", or ".join(repairs)


def _fewer_logits(given: Given) -> str:
    if chunk := given.setting("loss_chunk", 0):
        return f"Reduce model.loss_chunk={chunk}, or split the vocabulary over tp"
    return "Set model.loss_chunk, so that the loss computes fewer logits at a time"


REPAIRS: dict[str, Callable[[Given], str]] = {
    "parameters": _more_shards,
    "optimizer": _less_optimizer,
    "other state": _more_shards,
    "batch": lambda given: "Reduce data.batch_size",
    "gradients": _more_shards,
    "residuals": _less_activations,
    "boundary": lambda given: "Reduce the rows of a microbatch: raise pipeline.num_microbatches",
    "logits": _fewer_logits,
    "activations": _less_activations,
    "collectives": lambda given: "Split weights over tp, so that less of them is gathered at a time",
}


def summary(topology: Topology, memory: Memory, time: Time, traffic: Sequence[Traffic], given: Given) -> str:
    """The limit of the run, and changes that would help."""
    if memory.fits is False:
        finding = memory_findings(memory, given)[0]
        return f"It does not fit: {finding.problem}. {finding.repair}."
    weights: dict[str, float] = dict.fromkeys(("compute", "memory", "network", "host", "bubble"), 0.0)
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
            if given.setting("attention", "") == "xla"
            else "fewer and larger operations would help, such as more rows per device."
        )
    if largest == "host":
        return f"The step is limited by copies from and to the host ({share:.0%}); fewer values there would help."
    if largest == "bubble":
        return (
            f"The step is limited by the idle time of the pipeline ({time.bubble:.0%}); more microbatches would help."
        )
    free = (memory.capacity or 0) - memory.peak
    if given.setting("remat", "none") == "full" and free > 0.3 * (memory.capacity or 0):
        return f"The step is limited by compute ({share:.0%}); memory is free for less remat, which would compute less."
    fewer = "" if given.setting("remat", "none") == "none" else " or fewer recomputed layers"
    return f"The step is limited by compute ({share:.0%}); more devices{fewer} would help."
