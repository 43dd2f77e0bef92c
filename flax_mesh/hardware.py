"""The figures of chips: peak FLOP/s, memory, links and networks. docs/plan.md has the source of each.

The cost model of meshes, the MFU of the metrics and the plan of a run read this table; `load_chip` reads a chip that
the table lacks from a TOML file. Figures of compute and memory describe one JAX device: a v7x chip is two devices, and
each device has half of the FLOP/s and half of the memory. Links and networks belong to the chip, whose devices share
them. Bandwidths are one-way, in bytes/s.
"""

import dataclasses
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias, TypeGuard

from flax_mesh.errors import ConfigError
from flax_mesh.fields import check_types, path_problem, read_file
from flax_mesh.text import first_line

GIB = 2**30
MOST = 2**16  # chips along a side of a pod, GPUs of a domain, devices of a chip
LARGEST = 1e30  # limit of any figure, far below the largest float
_MOST_CHIPS = 2**20  # limit of a pod: all factorings of its sides are tried
LANES = 128  # of a tile of the memory of TPUs, in which arrays are stored: also the smallest block of splash attention
CUBE = 4  # chips per side of the cubes that optical switches connect
DEFAULT_LINK, DEFAULT_NETWORK = 4.5e10, 6.25e9  # kinds of TPU without published figures


@dataclass(frozen=True)
class Chip:
    """One kind of chip.

    Attributes:
        name: As in a topology, `v5p:4x4x8`.
        kinds: Values of JAX's `device_kind`; for GPUs, texts that the `device_kind` contains.
        platform: "tpu", "gpu" or "cpu".
        peak_flops: FLOP/s of dense matrix products of one device by dtype, such as "float8"; at least "bfloat16".
        memory: Bytes of one device.
        memory_bandwidth: Bytes/s of one device.
        link_bandwidth: Bytes/s of one link. A chip of a torus has `links` links; other chips have one link, to
            a switch of their domain.
        network_bandwidth: Bytes/s of a chip to other slices or NVLink domains, over the data center network (DCN).
        host_bandwidth: Bytes/s between a device and the memory of its host.
        link_fraction: The part of `link_bandwidth` that collectives reach.
        hop_latency: Seconds from one chip to the next over a link.
        network_latency: Seconds from one chip to another over the network.
        pod: Sides of the largest torus, in chips; () if the chips of a domain are connected by a switch.
        wrap: Which axes of a torus are rings: "cubes": all axes, if all sizes are multiples of 4; "pod": axes as long
            as the side of the pod; "": none.
        domain: The largest number of GPUs that NVLink connects; 0: all devices of a host.
        domain_spans_hosts: Whether NVLink connects hosts, as in a rack of GB200.
        devices_per_chip: Number of JAX devices of a chip.
        matmul_fraction: The part of `peak_flops` that large matrix products reach. Fitted, see docs/plan.md.
        overlap_fraction: The part of the transfers that can overlap with compute. One figure is fitted to all TPUs.
        indexed_fraction: The part of `memory_bandwidth` at which rows at indices are read or added, such as the
            tokens of an expert. One figure is fitted to all TPUs.
        matrix_unit: Rows and columns of the matrix units.
    """

    name: str
    platform: str
    peak_flops: Mapping[str, float] = field(hash=False)
    memory: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    kinds: tuple[str, ...] = ()
    host_bandwidth: float = 1.6e10
    link_fraction: float = 1.0
    hop_latency: float = 1e-6
    network_latency: float = 2e-6
    pod: tuple[int, ...] = ()
    wrap: str = ""
    domain: int = 0
    domain_spans_hosts: bool = False
    devices_per_chip: int = 1
    matmul_fraction: float = 1.0
    overlap_fraction: float = 1.0
    indexed_fraction: float = 1.0
    matrix_unit: int = 128

    @property
    def torus(self) -> int:
        """Number of axes of the torus; 0 for a domain that a switch connects."""
        return len(self.pod)

    @property
    def links(self) -> int:
        """Number of links of a chip."""
        return 2 * self.torus or 1

    @property
    def reachable_link(self) -> float:
        """Bytes/s that collectives reach on one link in one direction."""
        return self.link_bandwidth * self.link_fraction

    def peak(self, dtype: str) -> float:
        """FLOP/s for operands of a dtype; "float8_e4m3fn" is a float8.

        A dtype without a figure is computed like bfloat16, as float32 is on TPU with JAX's default precision.
        """
        return self.peak_flops.get(dtype.partition("_")[0], self.peak_flops["bfloat16"])

    def wraps(self, shape: Sequence[int]) -> tuple[bool, ...]:
        """Which axes of a slice are rings. An axis of two chips has one link, so it is never a ring."""
        if self.wrap == "cubes":
            return (len(shape) == self.torus and all(size % CUBE == 0 for size in shape),) * len(shape)
        return tuple(self.wrap == "pod" and size == self.pod[0] for size in shape)


def _tpu(name: str, **values: Any) -> Chip:
    return Chip(name, "tpu", overlap_fraction=0.4, indexed_fraction=0.2, **values)


def _gpu(name: str, kinds: tuple[str, ...] = (), domain: int = 8, host: float = 6.4e10, **values: Any) -> Chip:
    values |= {"kinds": kinds or (name,), "domain": domain, "host_bandwidth": host}
    return Chip(name, "gpu", matmul_fraction=0.7, overlap_fraction=0.5, link_fraction=370 / 450, **values)


# Of several GPUs whose kinds match, the one with the longest kind is used: "H100 PCIe" before "H100".
# fmt: off
CHIPS = (
    _tpu("v3", kinds=("TPU v3",),
         peak_flops={"bfloat16": 140e12 / 2}, memory=32e9 / 2, memory_bandwidth=900e9 / 2,
         link_bandwidth=100e9, network_bandwidth=6.25e9, pod=(32, 32), wrap="pod", devices_per_chip=2,
         matmul_fraction=0.73),
    _tpu("v4", kinds=("TPU v4",),
         peak_flops={"bfloat16": 275e12, "int8": 275e12}, memory=32 * GIB, memory_bandwidth=1200e9,
         link_bandwidth=45e9, network_bandwidth=6.25e9, pod=(16, 16, 16), wrap="cubes",
         matmul_fraction=0.73),
    _tpu("v5e", kinds=("TPU v5 lite", "TPU v5e"),
         peak_flops={"bfloat16": 197e12, "int8": 393e12}, memory=16e9, memory_bandwidth=819e9,
         link_bandwidth=50e9, link_fraction=0.9, network_bandwidth=3.125e9, pod=(16, 16), wrap="pod",
         matmul_fraction=0.83),
    _tpu("v5p", kinds=("TPU v5", "TPU v5p"),
         peak_flops={"bfloat16": 459e12, "int8": 918e12}, memory=95 * GIB, memory_bandwidth=2765e9,
         link_bandwidth=100e9, link_fraction=0.9, network_bandwidth=6.25e9, pod=(16, 20, 28), wrap="cubes",
         matmul_fraction=0.86),
    _tpu("v6e", kinds=("TPU v6 lite", "TPU v6e"),
         peak_flops={"bfloat16": 918e12, "int8": 1836e12}, memory=32e9, memory_bandwidth=1638e9,
         link_bandwidth=100e9, link_fraction=0.9, network_bandwidth=12.5e9, host_bandwidth=3.2e10, pod=(16, 16),
         wrap="pod", matmul_fraction=0.63, matrix_unit=256),
    _tpu("v7x", kinds=("TPU7x", "TPU7"),
         peak_flops={"bfloat16": 2307e12 / 2, "float8": 4614e12 / 2}, memory=192 * GIB / 2, memory_bandwidth=7380e9 / 2,
         link_bandwidth=100e9, link_fraction=0.9, network_bandwidth=12.5e9, host_bandwidth=3.2e10,
         pod=(16, 24, 24), wrap="cubes", devices_per_chip=2,
         matmul_fraction=0.8, matrix_unit=256),
    _gpu("A100", peak_flops={"bfloat16": 312e12, "int8": 620e12}, memory=80e9, memory_bandwidth=2.0e12,
         link_bandwidth=300e9, network_bandwidth=25e9, host=3.2e10),
    _gpu("H100",
         peak_flops={"bfloat16": 989e12, "float8": 2000e12, "int8": 2000e12}, memory=80e9, memory_bandwidth=2.9e12,
         link_bandwidth=450e9, network_bandwidth=50e9),
    _gpu("H100-PCIe", kinds=("H100 PCIe",),
         peak_flops={"bfloat16": 756e12}, memory=80e9, memory_bandwidth=2.0e12,
         link_bandwidth=64e9, network_bandwidth=50e9),
    _gpu("H200",
         peak_flops={"bfloat16": 989e12, "float8": 2000e12, "int8": 2000e12}, memory=141e9, memory_bandwidth=4.2e12,
         link_bandwidth=450e9, network_bandwidth=50e9),
    _gpu("GH200", peak_flops={"bfloat16": 989e12}, memory=96e9, memory_bandwidth=4.0e12,
         link_bandwidth=450e9, network_bandwidth=50e9, domain=1),
    _gpu("B200",
         peak_flops={"bfloat16": 2250e12, "float8": 4500e12, "int8": 4500e12}, memory=192e9, memory_bandwidth=8.0e12,
         link_bandwidth=900e9, network_bandwidth=50e9),
    _gpu("GB200", peak_flops={"bfloat16": 2500e12}, memory=186e9, memory_bandwidth=8.0e12,
         link_bandwidth=900e9, network_bandwidth=50e9, domain=72, domain_spans_hosts=True),
    Chip("cpu", "cpu", kinds=("cpu",), overlap_fraction=0.0,
          peak_flops={"bfloat16": 5e10, "float32": 5e10}, memory=4e9, memory_bandwidth=1e10,
          link_bandwidth=5e9, network_bandwidth=1e9, host_bandwidth=1e10, hop_latency=2e-5, network_latency=5e-5),
)
# fmt: on


@cache
def chip_of(device_kind: str) -> Chip | None:
    """The chip of a `device_kind`; None if the table lacks it."""
    candidates = [
        (len(kind), chip)
        for chip in CHIPS
        for kind in chip.kinds
        if (kind in device_kind if chip.platform == "gpu" else kind == device_kind)
    ]
    return max(candidates, key=lambda item: item[0])[1] if candidates else None


def peak_flops(device_kind: str, dtype: str = "bfloat16") -> float | None:
    """FLOP/s of dense matrix products of one device; None if they are not known, as for a CPU."""
    chip = chip_of(device_kind)
    return None if chip is None or chip.platform == "cpu" else chip.peak(dtype)


def link_bandwidth(device_kind: str) -> float:
    """Bytes/s that are reached on one ICI link in one direction."""
    chip = chip_of(device_kind)
    return chip.reachable_link if chip is not None and chip.pod else DEFAULT_LINK


def network_bandwidth(device_kind: str) -> float:
    """Bytes/s of one TPU chip over the data center network."""
    chip = chip_of(device_kind)
    return chip.network_bandwidth if chip is not None and chip.pod else DEFAULT_NETWORK


@check_types
def load_chip(path: str | os.PathLike[str]) -> Chip:
    """The chip of a TOML file whose keys are the fields of `Chip`; `base = "v5p"` takes missing fields from a chip of
    the table.

        base = "v5p"
        name = "v5p-slow"
        memory = 90e9
        [peak_flops]
        bfloat16 = 400e12

    Raises a ConfigError that lists all mistakes.

    Example:
        >>> from flax_mesh.plan import load_chip
        >>> with open("slow.toml", "w") as file:
        ...     print('base = "v5p"', 'name = "v5p-slow"', "memory = 90e9", sep=chr(10), file=file)
        >>> load_chip("slow.toml").memory
        90000000000.0
    """
    file = os.fspath(path)
    values = _read_toml(file)
    known, base = {chip.name.lower(): chip for chip in CHIPS}, values.pop("base", None)
    start = known.get(base.lower()) if isinstance(base, str) else None
    problems: list[str] = []
    if base is not None and start is None:
        problems.append(f"base must be one of {', '.join(known)}, got {base!r}")
    elif missing := [name for name in _NEEDED if start is None and name not in values]:
        problems.append(f'{", ".join(missing)} must be set, or base = "v5p" or another chip')
    fields = [item.name for item in dataclasses.fields(Chip)]
    unknown = [key for key in values if key not in fields]
    problems += [f"{key} is not a field of a chip; the fields are {', '.join(fields)}" for key in unknown]
    problems += [f"{key} {problem}" for key in fields if key in values and (problem := _problem(key, values[key]))]
    if not problems:
        chip = _merged(start, values)
        problems = _problems_together(chip)
        if not problems:
            return chip
    raise ConfigError([f"{file}: {problem}" for problem in problems])


def _merged(start: Chip | None, values: Mapping[str, Any]) -> Chip:
    """The chip with the values of a file; other fields are taken from `start`."""
    options: dict[str, Any] = {k: tuple(value) if _is_list(value) else value for k, value in values.items()}
    if start is None:
        return Chip(**options)
    if "peak_flops" in values:
        options["peak_flops"] = {**start.peak_flops, **values["peak_flops"]}
    return dataclasses.replace(start, **options)


_MOST_BYTES = 2**24  # size limit of a TOML file


def _read_toml(path: str) -> dict[str, Any]:
    if problem := path_problem(path):
        raise ConfigError(f"{path[:80]!r} {problem}")
    path = os.path.expanduser(path)
    if not os.path.exists(path):
        raise ConfigError(f"{path}: no such file; it must be a TOML file with the figures of a chip")
    try:
        values = tomllib.loads(read_file(path, _MOST_BYTES).decode())
        repr(values)  # a ValueError if a number has too many digits to be printed in a message
        return values
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a TOML file: {first_line(error)}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < LARGEST


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST


def _is_list(value: object) -> TypeGuard[list[object]]:
    return isinstance(value, list)


def _is_table(value: object) -> TypeGuard[dict[str, object]]:
    return isinstance(value, dict)


_Rule: TypeAlias = tuple[Callable[[Any], bool], str]  # (function that checks a value, description of a valid value)
_FRACTION: _Rule = (lambda v: _is_positive(v) and v <= 1, "a number above 0 and at most 1")
_RULES: dict[str, _Rule] = {  # by the field that a file sets
    "name": (lambda v: isinstance(v, str) and bool(re.fullmatch(r"[\w.-]{1,40}", v)), "letters, digits, '.', '_', '-'"),
    "platform": (lambda v: v in ("tpu", "gpu", "cpu"), "tpu, gpu or cpu"),
    "kinds": (lambda v: _is_list(v) and all(isinstance(kind, str) and kind for kind in v), "a list of texts"),
    "peak_flops": (
        lambda v: _is_table(v) and bool(v) and all(map(_is_positive, v.values())),
        "a table with a positive number for each dtype",
    ),
    "pod": (
        lambda v: _is_list(v) and len(v) in (2, 3) and all(map(_is_count, v)),
        f"a list of 2 or 3 integers from 1 to {MOST}",
    ),
    "wrap": (lambda v: v in ("cubes", "pod", ""), "cubes, pod or empty"),
    "domain": (_is_count, f"an integer from 1 to {MOST}"),
    "domain_spans_hosts": (lambda v: isinstance(v, bool), "true or false"),
    "devices_per_chip": (_is_count, f"an integer from 1 to {MOST}"),
    "matrix_unit": (lambda v: v in (128, 256), "128 or 256"),
    "overlap_fraction": (lambda v: v == 0 or (_is_positive(v) and v <= 1), "a number from 0 to 1"),
    "link_fraction": _FRACTION,
    "matmul_fraction": _FRACTION,
    "indexed_fraction": _FRACTION,
}
_NUMBER = (_is_positive, "a positive number")
_NEEDED = [  # the fields of Chip without a default
    item.name for item in dataclasses.fields(Chip) if item.default is dataclasses.MISSING
]


def _problem(key: str, value: object) -> str:
    """The problem with the value of a field; "" if it is valid."""
    is_right, text = _RULES.get(key, _NUMBER)
    return "" if is_right(value) else f"must be {text}, got {str(value)[:80]!r}"


def _problems_together(chip: Chip) -> list[str]:
    """Mistakes in fields that depend on each other."""
    problems: list[str] = []
    if "bfloat16" not in chip.peak_flops:
        problems.append("peak_flops must contain bfloat16")
    if (chip.platform == "tpu") != bool(chip.pod):
        problems.append(f"pod, the sides of the largest torus, must be set for tpu only; platform is {chip.platform}")
    if math.prod(chip.pod) > _MOST_CHIPS:
        problems.append(f"pod must have at most {_MOST_CHIPS:,} chips, got {math.prod(chip.pod):,}")
    if chip.wrap and not chip.pod:
        problems.append(f"wrap={chip.wrap} requires pod")
    return problems
