"""The topology of a number of chips: `v5p:512` is v5p:8x8x8."""

import math
import re
from collections.abc import Iterator

from flax_mesh.errors import ConfigError
from flax_mesh.hardware import CHIPS, CUBE, Chip
from flax_mesh.plan.topology import EXAMPLES, Topology, parse_topology

COUNT = re.compile(r"([\w.-]+):([0-9]{1,7})")
GPUS_PER_HOST = 8
MOST_UNEQUAL = 4  # the longest side of a slice over its shortest


def parse_chips(text: str, chip: Chip | None = None) -> Topology:
    """The topology of a text: `v5p:512`, or any text that `parse_topology` accepts.

    The slice of TPU chips is the one with the shortest sides, and with rings if there is such a one; more chips than a
    pod are equal slices. GPUs are on hosts of 8. `chip` (of `run.hardware`) may be named too.

    Raises:
        ConfigError: The chip is unknown, or no slices have this number of chips.
    """
    match = COUNT.fullmatch(text.strip().lower())
    known = {other.name.lower(): other for other in (*CHIPS, *([chip] if chip else []))}
    if match is None or match[1] not in known or known[match[1]].platform == "cpu":
        return parse_topology(text, chip)
    found, count = known[match[1]], int(match[2])
    if not found.torus:
        per_host = min(count, GPUS_PER_HOST, found.domain or GPUS_PER_HOST)
        if not count or count % per_host:
            raise ConfigError(f"{text} must be a multiple of {per_host or GPUS_PER_HOST}, the GPUs of a host")
        return parse_topology(f"{match[1]}:{count // per_host}x{per_host}", chip)
    for slices in range(-(-count // math.prod(found.pod)) or 1, count + 1):
        if count % slices == 0 and (shapes := list(_shapes(found, count // slices))):
            shape = min(shapes, key=lambda shape: (not all(found.wraps(shape)), sum(shape), shape))
            sides = "x".join(map(str, shape))
            return parse_topology(f"{match[1]}:{sides}" + (f"*{slices}" if slices > 1 else ""), chip)
        if count <= math.prod(found.pod):
            break
    raise ConfigError(f"no slice of {match[1]} has {count} chips; name a topology, such as {EXAMPLES}")


def _shapes(chip: Chip, count: int) -> Iterator[tuple[int, ...]]:
    """Ascending sides of slices with this number of chips: 1, 2, or multiples of 4 where they are more."""
    largest = sorted(chip.pod)
    sides = [side for side in range(1, largest[-1] + 1) if count % side == 0 and (side <= 2 or side % CUBE == 0)]

    def extend(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(shape) == chip.torus:
            fits = all(a <= b for a, b in zip(shape, largest, strict=True)) or chip.wrap != "pod"
            if math.prod(shape) == count and fits and shape[-1] <= MOST_UNEQUAL * shape[0]:
                yield shape
            return
        for side in sides:
            if not shape or side >= shape[-1]:
                yield from extend((*shape, side))

    yield from extend(()) if count <= math.prod(chip.pod) else ()
