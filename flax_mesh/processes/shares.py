"""Divides the arrays that several processes have among them, so that each writes about as many bytes."""

import functools
import math
from collections import Counter
from typing import NamedTuple

import jax
from jax.sharding import Sharding

_DIVIDED = 2**20  # bytes of a shard from which on several processes write parts of it
Bounds = tuple[tuple[int, int], ...]  # of a shard in its array: the first index of each dim, and the one after the last


class Part(NamedTuple):
    """A part of a shard: where the shard is in its array, and the part in the shard."""

    shard: Bounds
    slices: tuple[slice, ...]

    @property
    def index(self) -> tuple[slice, ...]:
        """Where the part is in the array."""
        return tuple(slice(at + x.start, at + x.stop) for (at, _), x in zip(self.shard, self.slices, strict=True))


class Shares:
    """Decides which parts of arrays each process writes. All processes decide alike: they must make the same calls.

    A large shard that N processes have is divided into N equal parts, or a few more. Those that have the fewest bytes
    so far write the parts that remain, and the shards that are not divided.
    """

    def __init__(self) -> None:
        self._bytes: Counter[int] = Counter()  # by process

    def of_this_process(
        self, places: dict[Bounds, list[int]], itemsize: int, *, divide: bool = True
    ) -> tuple[tuple[int, ...], list[Part]]:
        """The shape of all parts of an array, and the parts that this process writes. `places` are as of `places_of`.

        `divide`: whether shards may be divided.
        """
        shape = tuple(stop - start for start, stop in next(iter(places)))
        dim, count = 0, 1
        if divide and math.prod(shape) * itemsize >= _DIVIDED:
            dim, count = _division(shape, min(map(len, places.values())))
        shape, parts = tuple(size // count if i == dim else size for i, size in enumerate(shape)), list[Part]()
        for shard, processes in places.items():
            order = sorted(processes, key=lambda process: (self._bytes[process], process))
            for number in range(count):
                process = order[number % len(order)]
                # What only one process has is not counted: it may differ, as a counter on a device of each process.
                self._bytes[process] += math.prod(shape) * itemsize * (len(processes) > 1)
                if process == jax.process_index():
                    starts = [size * number * (i == dim) for i, size in enumerate(shape)]
                    slices = (slice(at, at + size) for at, size in zip(starts, shape, strict=True))
                    parts.append(Part(shard, tuple(slices)))
        return shape, parts


@functools.lru_cache(maxsize=4096)
def places_of(sharding: Sharding, shape: tuple[int, ...]) -> dict[Bounds, list[int]]:
    """The processes that have each shard of an array, in the same order in all processes."""
    places: dict[Bounds, set[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        places.setdefault(bounds(index, shape), set()).add(device.process_index)
    return {shard: sorted(processes) for shard, processes in places.items()}


def bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    """Where the shard with this `index` is in an array of this `shape`."""
    return tuple(x.indices(size)[:2] for x, size in zip(index, shape, strict=True))


@functools.lru_cache(maxsize=4096)
def _division(shape: tuple[int, ...], processes: int) -> tuple[int, int]:
    """The dim of a shard to divide, and the number of equal parts: 1 if no number below 2 * `processes` is possible."""
    counts = range(processes, 2 * processes)
    possible = [(count, dim) for dim, size in enumerate(shape) for count in counts if size and size % count == 0]
    count, dim = min(possible, default=(1, 0))
    return dim, count
