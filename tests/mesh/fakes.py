"""Fake devices with exactly the attributes that jax.experimental.mesh_utils and flax_mesh read."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class FakeDevice:
    id: int
    platform: str
    device_kind: str
    process_index: int
    coords: tuple[int, ...]
    core_on_chip: int
    slice_index: int | None

    def __repr__(self) -> str:
        return f"{self.device_kind}{self.coords}/{self.core_on_chip} id {self.id}"


def tpu_slice(
    kind: str,
    shape: tuple[int, ...],
    *,
    cores: int = 1,
    origin: tuple[int, int, int] = (0, 0, 0),
    slice_index: int | None = None,
    host: tuple[int, int, int] = (2, 2, 1),
) -> list[FakeDevice]:
    """One slice in the order of `jax.devices()`: by process. Ids count x, y, z; a process has a box of `host` chips."""
    shape = (*shape, 1, 1)[:3]
    first = 100_000 * (slice_index + 1) if slice_index is not None else 0
    devices = []
    for number, (z, y, x, core) in enumerate(itertools.product(*map(range, reversed(shape)), range(cores))):
        hosts = [-(-size // box) for size, box in zip(shape, host, strict=True)]
        process = (x // host[0]) + hosts[0] * (y // host[1]) + hosts[0] * hosts[1] * (z // host[2])
        process += math.prod(hosts) * (slice_index or 0)
        coords = (x + origin[0], y + origin[1], z + origin[2])
        devices.append(FakeDevice(first + number, "tpu", kind, process, coords, core, slice_index))
    return sorted(devices, key=lambda device: (device.process_index, device.id))


def tpu_slices(count: int, kind: str, shape: tuple[int, ...]) -> list[FakeDevice]:
    return [device for index in range(count) for device in tpu_slice(kind, shape, slice_index=index)]


def gpu_hosts(hosts: int, per_host: int, *, slice_index: bool = False) -> list[FakeDevice]:
    return [
        FakeDevice(i, "gpu", "NVIDIA H100 80GB HBM3", i // per_host, (), 0, i // per_host if slice_index else None)
        for i in range(hosts * per_host)
    ]


def factor_shapes(total: int, num_axes: int) -> Iterator[tuple[int, ...]]:
    """Every mesh shape with `num_axes` axes whose product is `total`."""
    if num_axes == 1:
        yield (total,)
        return
    for size in range(1, total + 1):
        if total % size == 0:
            for rest in factor_shapes(total // size, num_axes - 1):
                yield (size, *rest)
