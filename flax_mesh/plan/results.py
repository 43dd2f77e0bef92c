"""The numbers of a plan: bytes over the time of a step, seconds of its parts, traffic per mesh axis."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from flax_mesh.mpmd.schedules.schedule import Schedule
from flax_mesh.text import grouped

# The uses of memory, in the order in which they are drawn.
CATEGORIES: tuple[str, ...] = (
    "parameters",
    "optimizer",
    "other state",  # statistics, random keys, counters
    "batch",
    "gradients",  # and their accumulators
    "residuals",  # of the forward pass, for the backward pass; of all microbatches that a pipeline stores
    "boundary",  # activations and gradients between pipeline stages
    "logits",
    "activations",  # all other values of the operation that runs
    "collectives",  # gathered parameters, and other results of collectives
)


class Moment(NamedTuple):
    """Bytes per category on one device while a part of the step runs."""

    label: str  # operation of the traced function, or action of the pipeline's schedule
    bytes: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


@dataclass(frozen=True)
class Memory:
    """Bytes of one device: of the fullest one, if pipeline stages differ."""

    capacity: int | None  # bytes that the step may use; None if unknown. The reserve is subtracted already
    reserve: int  # bytes that are not available to the step
    arguments: int  # bytes of the arguments of the step, state and batch, without those in the memory of the host
    peak: int
    at_peak: Mapping[str, int]  # category -> bytes
    timeline: tuple[Moment, ...]  # over one step, at most a few hundred moments, in order
    groups: tuple[int, ...]  # peak of every group of a pipeline; one number without a pipeline
    host: int = 0  # bytes of one device in the memory of the host; of a pipeline, on the group with most of them

    @property
    def fits(self) -> bool | None:
        return None if self.capacity is None else self.peak <= self.capacity

    @property
    def missing(self) -> int:
        """Bytes that a device does not have; negative if it has more."""
        return self.peak - (self.capacity or 0)

    @property
    def largest(self) -> str:
        """The category with the most bytes at the peak."""
        return max(self.at_peak, key=lambda name: self.at_peak[name])


class Traffic(NamedTuple):
    """All collectives of one kind over the same mesh axes, per device and step."""

    kind: str  # "all-gather" ...; "transfer" for those between pipeline stages
    axes: tuple[str, ...]
    times: int
    operand_bytes: int  # that one device passes to the collectives
    ici_bytes: int  # that one device sends over fast links: ICI or NVLink
    dcn_bytes: int  # that one device sends over the network between slices or hosts
    seconds: float


def summed(traffic: Iterable[Traffic]) -> list[Traffic]:
    """The sums per kind and axes, those with the most seconds first."""
    sums: list[Traffic] = []
    for (kind, axes), group in grouped(traffic, lambda each: (each.kind, each.axes)).items():
        times, operand, ici, dcn, seconds = (sum(column) for column in list(zip(*group, strict=True))[2:])
        sums.append(Traffic(kind, axes, times, operand, ici, dcn, seconds))
    return sorted(sums, key=lambda each: -each.seconds)


class Part(NamedTuple):
    """One part of a step: the program without a pipeline, or F, B and W of a stage, and the optimizer's update."""

    name: str
    times: int  # per step, on the device that runs it
    flops: float  # per device and execution
    hbm_bytes: float
    compute_seconds: float
    memory_seconds: float
    network_seconds: float
    seconds: float
    host_seconds: float = 0.0  # of copies from and to the memory of the host

    @property
    def limit(self) -> str:
        """The resource that takes most of the time: "compute", "memory", "network" or "host"."""
        seconds = {"compute": self.compute_seconds, "memory": self.memory_seconds}
        seconds |= {"network": self.network_seconds, "host": self.host_seconds}
        return max(seconds, key=lambda name: seconds[name])


@dataclass(frozen=True)
class Time:
    """Time of one step, in seconds."""

    seconds: float
    parts: tuple[Part, ...]
    tokens_per_s: float | None  # of all devices; None if the batch has no known number of tokens
    mfu: float | None  # by the FLOPs that the recipe states; None if it states none or the peak is unknown
    flops: float  # that one device computes per step, recomputation included
    bubble: float = 0.0  # idle fraction of a pipeline
    schedule: Schedule | None = None
