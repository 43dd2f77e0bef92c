"""The hardware of a plan, and how the collectives of each mesh axis travel over it.

A topology is a text: `v5p:4x4x8` (chips along x, y, z), `v5p:16x16x16*2` (two slices), `h100:2x8` (hosts x GPUs),
`cpu:8` or `cpu:2x4` (two hosts), or the name of a slice in the cloud, `v6e-8` or `v5p-128` (mesh/torus/shapes.py).
Nothing is created for single devices, so thousands of them cost no more than eight.

**Placement** follows `create_mesh`. Slices, or NVLink domains, are connected by the slow network; the axes pp, dp
and fsdp are split over them first (mesh/slices.py). Inside a TPU slice `choose_assignment` factors the physical axes of
the torus over the mesh axes (mesh/torus/assign.py); a switch connects the GPUs of a domain and the devices of a CPU
host. The ring orders of small slices are treated as the assignment that they replace.

**Seconds** of a collective over n devices, with the payload P of hlo/collectives.py: the bytes of the result
(all-gather), of the input (reduce-scatter), or of either (all others). The devices form phases of m devices each:

- a part of a physical axis, where `stride` groups share each link: one phase over a line, link / stride;
- all complete physical axes: one phase, all axes concurrently, 2 links for each ring and 1 for each line;
- the two devices of a chip: one phase, over a connection that is as wide as six links;
- the GPUs of an NVLink domain: one phase; slices or domains: one phase over the network.

If a chip is several devices, each has its share of the chip's links and network, since all communicate at once.

- all-gather: phases in a row, slowest first. One that starts with s of the n pieces transfers P s (m - 1) / n bytes
  per device: a ring sends each piece once, P (n - 1) / n in total (Patarasuk and Yuan 2009). A reduce-scatter takes the
  same time in reverse, an all-reduce takes both.
- all-to-all: (k - 1) / k of P is for the devices of the other k - 1 slices or domains. The rest, P / k, is exchanged in
  each phase inside the slice in turn. On a torus the links in the middle are the limit: they transfer P / k times a / 8
  for a ring of a chips, a / 4 for a line. That takes a quarter (half) of the time of an all-gather.
- collective-permute and broadcast: P over the slowest link on the way.

Each phase adds its latency: a hop for each chip on the longest way, half around a ring, and m - 1 times over a switch
or the network. Sources of the formulas: jax-ml.github.io/scaling-book, chapters TPUs, Sharding and GPUs.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from flax_mesh.errors import ConfigError
from flax_mesh.fields import MAX_SIZE, check_types
from flax_mesh.hardware import CHIPS, Chip, chip_of
from flax_mesh.hlo.collectives import ALL_TO_ALL, GATHER, KINDS, POINT_TO_POINT
from flax_mesh.mesh.shape import resolve_dims
from flax_mesh.mesh.slices import find_granules, preferred_splits
from flax_mesh.mesh.torus.assign import CORE_LINKS, choose_assignment
from flax_mesh.mesh.torus.shapes import side_problem, without_cloud_name
from flax_mesh.mesh.torus.torus import Assignment, DeviceLike, Torus, physical_mesh
from flax_mesh.text import count_text, listed, shortened

EXAMPLES = "v5p:4x4x8, v5p:16x16x16*2 (two slices), v6e-8, h100:2x8 (hosts x GPUs) or cpu:8"
TEXT = re.compile(r"([\w.-]+):([0-9]{1,12}(?:x[0-9]{1,12})*)(?:\*([0-9]{1,12}))?")


@dataclass(frozen=True)
class Topology:
    """Devices and their networks.

    Attributes:
        chip: The figures of a device.
        text: As `parse_topology` accepts it.
        num_devices: All JAX devices; a TPU chip of two cores counts twice.
        num_slices: Number of TPU slices; 1 for GPUs and CPUs.
        slice_shape: Sides of the torus in chips, or (hosts, devices per host).
    """

    chip: Chip
    text: str
    num_devices: int
    num_slices: int
    slice_shape: tuple[int, ...]

    @property
    def num_domains(self) -> int:
        """Number of groups of devices that only the slow network connects: slices, NVLink domains, or CPU hosts."""
        if self.chip.torus:
            return self.num_slices
        hosts, per_host = self.slice_shape
        if not self.chip.domain_spans_hosts:
            return hosts
        sizes = range(per_host, self.chip.domain + 1, per_host)
        return self.num_devices // max((size for size in sizes if self.num_devices % size == 0), default=per_host)


class Phase(NamedTuple):
    """A phase of a collective: `size` devices; bandwidths are bytes/s that one device sends."""

    kind: str  # ici, nvlink, host or dcn
    size: int
    bandwidth: float  # of an all-gather
    exchange: float  # of an all-to-all
    shift: float  # to the next device of the phase
    latency: float  # seconds from the first device to the last
    hop: float  # seconds to the next device


@dataclass(frozen=True)
class Network:
    """How collectives over some mesh axes travel: their phases, slowest first; none for a single device."""

    phases: tuple[Phase, ...]

    @property
    def size(self) -> int:
        """Number of devices of a group."""
        return math.prod(phase.size for phase in self.phases)

    def seconds(self, kind: str, payload_bytes: float) -> float:
        """Predicted time of one collective; kinds and payload are as in `hlo.collectives`."""
        if not self.phases:
            return 0.0
        if kind in POINT_TO_POINT:
            return payload_bytes / min(phase.shift for phase in self.phases) + max(phase.hop for phase in self.phases)
        latency = math.fsum(phase.latency for phase in self.phases)
        if kind in ALL_TO_ALL:
            inside = payload_bytes / self._num_domains
            parts = [(payload_bytes if phase.kind == "dcn" else inside, phase) for phase in self.phases]
            return latency + math.fsum(part * (p.size - 1) / p.size / p.exchange for part, p in parts)
        if kind not in GATHER:
            raise ValueError(f"kind must be one of {listed(KINDS)}, got {kind!r}.")
        sent = zip(self._gathered(payload_bytes), self.phases, strict=True)
        once = latency + math.fsum(bytes_sent / phase.bandwidth for bytes_sent, phase in sent)
        return 2 * once if kind == "all-reduce" else once

    def split(self, sent_bytes: float, kind: str = "all-gather") -> tuple[float, float]:
        """(bytes over fast links, bytes over the network) of the bytes that a device sends, on average over devices."""
        k, n = self._num_domains, self.size
        if k == 1:
            share = 0.0
        elif kind in POINT_TO_POINT:
            share = k / n  # of the ring of all devices, k neighbors are in different domains
        elif kind in ALL_TO_ALL:
            share = (n - n // k) / (n - 1)
        else:
            gathered = list(zip(self._gathered(1.0), self.phases, strict=True))
            share = math.fsum(part for part, phase in gathered if phase.kind == "dcn") / math.fsum(
                p for p, _ in gathered
            )
        return sent_bytes * (1 - share), sent_bytes * share

    @property
    def _num_domains(self) -> int:
        return math.prod(phase.size for phase in self.phases if phase.kind == "dcn")

    def _gathered(self, payload_bytes: float) -> list[float]:
        """Bytes that a device sends in each phase of an all-gather."""
        pieces, sent = 1, []
        for phase in self.phases:
            sent.append(payload_bytes * pieces * (phase.size - 1) / self.size)
            pieces *= phase.size
        return sent


@check_types
def parse_topology(text: str, chip: Chip | None = None) -> Topology:
    """The topology of a text such as "v5p:16x16x16*2"; see the module docstring. Names are case-insensitive.

    `chip` (of `run.hardware`) may be named too. Raises a ConfigError with all mistakes of the text in one line.
    """
    shown = repr(shortened(text, 80))
    known = {other.name.lower(): other for other in (*CHIPS, *([chip] if chip else []))}
    match = TEXT.fullmatch(without_cloud_name(text.strip().lower(), known))
    if match is None:
        raise ConfigError(f"topology {shown} must be a chip and its numbers, such as {EXAMPLES}")
    name, dims, slices = match[1], tuple(map(int, match[2].split("x"))), int(match[3] or 1)
    if name not in known:
        raise ConfigError(
            f"topology {shown}: unknown chip {shortened(name, 40)!r}; known: {listed(known)}. "
            "Describe another one in a TOML file: run.hardware=FILE"
        )
    kind = known[name]
    problems = _problems(kind, dims, slices, has_slices=match[3] is not None)
    if problems:
        raise ConfigError(f"topology {shown}: {'; '.join(problems)}")
    return _topology(kind, (1, *dims) if len(dims) == 1 else dims, slices)


def topology_of_devices(devices: Sequence[DeviceLike], chip: Chip | None = None) -> Topology:
    """The topology of the devices that are here. `chip` (of `run.hardware`) replaces the figures of their kind.

    Raises a ConfigError if no figures are known, or the devices do not form equal slices, domains or a torus.
    """
    first = devices[0]
    kind = chip or chip_of(first.device_kind)
    if kind is None:
        raise ConfigError(
            f"no figures are known for {first.device_kind!r}; describe it in a TOML file: run.hardware=FILE"
        )
    if kind.platform != first.platform:
        raise ConfigError(f"{kind.name} is a chip of {kind.platform}, but the devices are {first.platform} devices")
    granules, granule = find_granules(devices)
    sizes = sorted({len(group) for group in granules})
    if len(sizes) > 1:
        raise ConfigError(f"the devices must form {granule}s of equal size, but they have {listed(sizes)} devices")
    if not kind.torus:
        return _topology(kind, (len(granules), sizes[0]), 1)
    try:
        shape = physical_mesh(granules[0])[1].shape
    except ValueError as error:
        raise ConfigError(f"the devices do not form a torus: {error}") from error
    chips = (*shape, 1, 1)[: kind.torus]
    if math.prod(chips) * kind.devices_per_chip != sizes[0]:
        raise ConfigError(
            f"{kind.name} must have {count_text(kind.devices_per_chip, 'device')} per chip, but {sizes[0]} devices "
            f"form a torus of {'x'.join(map(str, shape))}"
        )
    return _topology(kind, chips, len(granules))


def resolve_mesh(topology: Topology, mesh_shape: Mapping[str, int]) -> dict[str, int]:
    """The mesh on the topology: pp is the outermost axis, and -1 is replaced.

    Raises a ConfigError with both numbers and repairs if the sizes do not multiply to the number of devices.
    """
    names = sorted(mesh_shape, key=lambda name: name != "pp")
    try:
        sizes = resolve_dims(
            [mesh_shape[name] for name in names],
            names,
            topology.num_devices,
            what="mesh.shape",
            unit=f"devices of {topology.text}",
            advice="Or use a topology with another number of devices.",
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return dict(zip(names, sizes, strict=True))


def network_of(topology: Topology, mesh_shape: Mapping[str, int], axes: Sequence[str]) -> Network:
    """How a collective over the given axes travels; `mesh_shape` is checked by `resolve_mesh`."""
    mesh = resolve_mesh(topology, mesh_shape)
    if unknown := [axis for axis in axes if axis not in mesh]:
        raise ValueError(f"axes must be axes of the mesh, {listed(mesh)}; got {listed(unknown)}.")
    return _network(topology, tuple(mesh.items()), frozenset(axes))


@lru_cache(maxsize=1024)
def _network(topology: Topology, mesh: tuple[tuple[str, int], ...], axes: frozenset[str]) -> Network:
    chip, (splits, assignment) = topology.chip, placement(topology, mesh)
    chosen = [i for i, (name, _) in enumerate(mesh) if name in axes]
    num_domains = math.prod(splits[i] for i in chosen)
    network = chip.network_bandwidth / chip.devices_per_chip
    phases = [_switched("dcn", num_domains, network, chip.network_latency)]
    if assignment is not None:
        phases += _torus_phases(chip, torus_of(topology), assignment, chosen)
    else:
        inside = math.prod(mesh[i][1] // splits[i] for i in chosen)
        kind = "nvlink" if chip.platform == "gpu" else "host"
        phases.append(_switched(kind, inside, chip.reachable_link, chip.hop_latency))
    return Network(tuple(sorted((p for p in phases if p.size > 1), key=lambda p: (p.bandwidth, p.size))))


@lru_cache(maxsize=64)
def placement(topology: Topology, mesh: tuple[tuple[str, int], ...]) -> tuple[tuple[int, ...], Assignment | None]:
    """How many slices or domains each axis spans, and the assignment of the axes inside a TPU slice."""
    names, sizes = zip(*mesh, strict=True)
    splits = preferred_splits(sizes, names, topology.num_domains)
    if not topology.chip.torus:
        return splits, None
    inner = [size // split for size, split in zip(sizes, splits, strict=True)]
    return splits, choose_assignment(torus_of(topology), inner, allow_split=True)


def torus_of(topology: Topology) -> Torus:
    """As `physical_mesh` reads it from devices: always x, y and z, then the devices of a chip if there are several."""
    chip, shape = topology.chip, topology.slice_shape
    wraps = (*chip.wraps(shape), False, False)[:3]
    shape = (*shape, 1, 1)[:3]
    kind = next(iter(chip.kinds), chip.name)
    if chip.devices_per_chip == 1:
        return Torus(kind, ("x", "y", "z"), shape, wraps)
    return Torus(kind, ("x", "y", "z", "core"), (*shape, chip.devices_per_chip), (*wraps, False))


def _torus_phases(chip: Chip, torus: Torus, assignment: Assignment, chosen: Sequence[int]) -> list[Phase]:
    """The phases inside a slice for a group that spans the `chosen` mesh axes."""
    link, hop = chip.reachable_link / chip.devices_per_chip, chip.hop_latency
    phases, complete = [], []
    for axis, size, ring, row in zip(torus.axes, torus.shape, torus.wraps, assignment, strict=True):
        for factor, stride in _runs(row, chosen):
            if axis == "core":
                phases.append(_switched("ici", factor, CORE_LINKS * chip.reachable_link, hop))
            elif factor < size:
                phases.append(_line(((factor, False),), link / stride, hop * stride))
            else:
                complete.append((size, ring))
    return [*phases, *([_line(complete, link, hop)] if complete else [])]


def _runs(row: Sequence[int], chosen: Sequence[int]) -> list[tuple[int, int]]:
    """(factor, stride) of the chosen mesh axes on one physical axis; neighboring mesh axes are one run.

    Later mesh axes vary faster: the stride of an axis is the product of the factors of all later ones.
    """
    runs: list[tuple[int, int]] = []
    stride = 1
    for axis in reversed(range(len(row))):
        if axis in chosen and row[axis] > 1:
            if runs and math.prod(runs[-1]) == stride:  # the run continues
                factor, inner = runs.pop()
                runs.append((factor * row[axis], inner))
            else:
                runs.append((row[axis], stride))
        stride *= row[axis]
    return runs


def _line(axes: Sequence[tuple[int, bool]], link: float, hop: float) -> Phase:
    """A phase over lines and rings of chips, (size, whether it is a ring) of each, which work concurrently."""
    size = math.prod(length for length, _ in axes)
    links = sum(2 if ring else 1 for _, ring in axes)
    hops = sum(length // 2 if ring else length - 1 for length, ring in axes)
    middle = max(length / (8 if ring else 4) for length, ring in axes)  # payloads over the busiest link
    return Phase("ici", size, link * links, link * (size - 1) / size / middle, link, hop * hops, hop)


def _switched(kind: str, size: int, bandwidth: float, latency: float) -> Phase:
    return Phase(kind, size, bandwidth, bandwidth, bandwidth, (size - 1) * latency, latency)


def _topology(chip: Chip, shape: tuple[int, ...], slices: int) -> Topology:
    count = math.prod(shape) * slices * chip.devices_per_chip
    shown = shape[1:] if chip.platform == "cpu" and shape[0] == 1 else shape
    text = f"{chip.name.lower()}:{'x'.join(map(str, shown))}" + (f"*{slices}" if slices > 1 else "")
    return Topology(chip, text, count, slices, shape)


# Axes of the torus, or platform -> (how many numbers a topology has, their meaning, an example).
_FORMS: dict[int | str, tuple[tuple[int, ...], str, str]] = {
    3: ((3,), "chips along x, y, z", "4x4x8"),
    2: ((2,), "chips along x, y", "4x8"),
    "gpu": ((2,), "hosts x GPUs", "2x8"),
    "cpu": ((1, 2), "devices", "8"),
}


def _problems(chip: Chip, dims: tuple[int, ...], slices: int, *, has_slices: bool) -> list[str]:
    """Everything that is wrong with the numbers of a topology."""
    name, shape = chip.name.lower(), "x".join(map(str, dims))
    counts, what, example = _FORMS[chip.torus or chip.platform]
    if len(dims) not in counts:
        return [f"{name} needs {count_text(counts[0], 'number')} ({what}), such as {name}:{example}; got {shape}"]
    problems = []
    if 0 in (*dims, slices):
        problems.append("all numbers must be at least 1")
    if has_slices and not chip.torus:
        problems.append(f"*{slices} is the number of TPU slices; write more hosts instead")
    if math.prod(dims) * slices * chip.devices_per_chip > MAX_SIZE:
        problems.append(f"at most {MAX_SIZE:,} devices are possible")
    largest = "x".join(map(str, chip.pod))
    too_large = (
        any(a > b for a, b in zip(sorted(dims), sorted(chip.pod), strict=True))
        if chip.wrap == "pod"
        else (chip.torus and math.prod(dims) > math.prod(chip.pod))
    )
    if too_large:
        problems.append(
            f"{shape} is larger than a pod of {name}, {largest} chips; use several slices, such as {name}:{largest}*2"
        )
    elif chip.torus and (problem := side_problem(chip, dims)):
        problems.append(problem)
    if chip.platform == "gpu" and chip.domain and dims[1] and chip.domain % dims[1]:
        sizes = [size for size in range(1, chip.domain + 1) if chip.domain % size == 0]
        problems.append(
            f"{dims[1]} GPUs per host do not divide the {chip.domain} of an NVLink domain; use {listed(sizes)}"
        )
    return problems
