"""The topology of a number of chips: `v5p:512` is v5p:8x8x8."""

import math
import re

from flax_mesh.errors import ConfigError
from flax_mesh.hardware import CHIPS, Chip
from flax_mesh.mesh.torus.shapes import best_shape, nearest_counts
from flax_mesh.plan.topology import EXAMPLES, Topology, parse_topology
from flax_mesh.text import listed

COUNT = re.compile(r"([\w.-]+):([0-9]{1,7})")
GPUS_PER_HOST = 8


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
    kind, count = known[match[1]], int(match[2])
    if not kind.torus:
        per_host = min(count, GPUS_PER_HOST, kind.domain or GPUS_PER_HOST)
        if not count or count % per_host:
            raise ConfigError(f"{text} must be a multiple of {per_host or GPUS_PER_HOST}, the GPUs of a host")
        return parse_topology(f"{match[1]}:{count // per_host}x{per_host}", chip)
    for slices in range(-(-count // math.prod(kind.pod)) or 1, count + 1):
        if count % slices == 0 and (shape := best_shape(kind, count // slices)):
            sides = "x".join(map(str, shape))
            return parse_topology(f"{match[1]}:{sides}" + (f"*{slices}" if slices > 1 else ""), chip)
        if count <= math.prod(kind.pod):
            break
    nearest = [f"{match[1]}:{number}" for number in nearest_counts(kind, count)]
    raise ConfigError(
        f"no slice of {match[1]} has {count} chips; the nearest: {listed(nearest)}. "
        f"Or name a topology, such as {EXAMPLES}"
    )
