"""create_mesh compared with jax.make_mesh, and with eformer and scalax if they are installed.

Microseconds, the best of interleaved rounds. "repeated" creates the same mesh again, "cold" one with new axis names.
The search rows compute the assignment of a v4 slice of 8x8x16 chips without a cache.

    python -m tests.benchmarks mesh [--rounds 15]
"""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType

from flax_mesh import create_device_mesh, create_mesh
from flax_mesh.mesh.torus.assign import choose_assignment
from flax_mesh.mesh.torus.torus import Torus, wraps_around
from tests.benchmarks.common.peers import peer
from tests.benchmarks.common.report import options, report, use_cpu
from tests.mesh.fakes import tpu_slice

Row = dict[str, tuple[Callable[[tuple[str, str]], object], int]]

AUTO = (AxisType.Auto,) * 2
TARGETS = {("repeated", "flax_mesh"): 1.0, ("cold", "flax_mesh"): 300.0, ("search 8x8x16", "flax_mesh"): 1e6}


def candidates() -> dict[str, Row]:
    """{row: {library: (function of two axis names, calls per round)}}."""
    rows: dict[str, Row] = {
        "repeated": {
            "flax_mesh": (lambda names: create_mesh((2, 4), ("dp", "tp")), 20_000),
            "jax.make_mesh": (lambda names: jax.make_mesh((2, 4), ("dp", "tp"), AUTO), 500),
        },
        "cold": {
            "flax_mesh": (lambda names: create_mesh((2, 4), names), 200),
            "jax.make_mesh": (lambda names: jax.make_mesh((2, 4), names, AUTO), 200),
        },
    }
    if (eformer := peer("eformer.escale")) is not None:
        rows["repeated"]["eformer"] = (lambda names: eformer.create_mesh((2, 4), ("dp", "tp")), 20_000)
        rows["cold"]["eformer"] = (lambda names: eformer.create_mesh((2, 4), names), 200)
    if (scalax := peer("scalax.sharding")) is not None:
        rows["repeated"]["scalax"] = (lambda names: scalax.MeshShardingHelper((2, 4), ("dp", "tp")), 500)
        rows["cold"]["scalax"] = (lambda names: scalax.MeshShardingHelper((2, 4), names), 200)
    devices = tpu_slice("TPU v4", (8, 8, 16))
    shape = (2, 4, 2, 2, 4, 8)
    torus = Torus("TPU v4", ("x", "y", "z"), (8, 8, 16), wraps_around("TPU v4", (8, 8, 16)))
    rows["search 8x8x16"] = {"flax_mesh": (lambda names: choose_assignment(torus, shape, allow_split=True), 1)}
    split = {"allow_split_physical_axes": True}
    rows["device mesh 8x8x16"] = {
        "flax_mesh": (lambda names: create_device_mesh(shape, devices, **split), 1),
        "mesh_utils": (lambda names: mesh_utils.create_device_mesh(shape, devices, **split), 1),
    }
    return rows


def measure(rounds: int) -> list[dict[str, Any]]:
    """Microseconds per call in the best round, and their ratio to the time of flax_mesh."""
    fresh = (f"axis{number}" for number in itertools.count())
    rows = []
    for what, group in candidates().items():
        best = dict.fromkeys(group, float("inf"))
        for _ in range(rounds):
            for who, (function, calls) in group.items():
                names = [(next(fresh), next(fresh)) for _ in range(calls)]
                start = time.perf_counter()
                for pair in names:
                    function(pair)
                best[who] = min(best[who], (time.perf_counter() - start) / calls * 1e6)
        for who, value in best.items():
            row = {"mesh": what, "by": who, "us": value, "ratio": value / best["flax_mesh"]}
            rows.append(row | {"target us": TARGETS.get((what, who))})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    given = options("mesh", arguments, rounds=15)
    use_cpu()
    return report("mesh", arguments, measure(given.rounds))
