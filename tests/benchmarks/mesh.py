"""create_mesh against jax.make_mesh and eformer: `python -m tests.benchmarks.mesh`.

8 CPU devices; microseconds, the best of interleaved rounds, so that ratios come from one run on one machine. "repeated"
asks for the same mesh again. "cold" asks for axis names never used before: neither our cache nor JAX's table of Mesh
objects has it. The search rows lay out a v4 slice of 8x8x16 chips from nothing. A last line of JSON repeats it all.
"""

import itertools
import json
import platform
import time
import warnings
from collections.abc import Callable

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType

from flax_mesh.mesh import create_device_mesh, create_mesh
from flax_mesh.mesh.cost import choose_assignment
from flax_mesh.mesh.topology import Torus, wraps_around
from tests.mesh.fakes import tpu_slice

Row = dict[str, tuple[Callable[[tuple[str, str]], object], int]]

ROUNDS = 15
AUTO = (AxisType.Auto,) * 2
TARGETS = {("repeated", "flax_mesh"): 1.0, ("cold", "flax_mesh"): 300.0, ("search 8x8x16", "flax_mesh"): 1e6}


def candidates() -> dict[str, Row]:
    """{row: {who: (function of two axis names, calls per round)}}."""
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
    eformer = eformer_create_mesh()
    if eformer is not None:
        rows["repeated"]["eformer"] = (lambda names: eformer((2, 4), ("dp", "tp")), 20_000)
        rows["cold"]["eformer"] = (lambda names: eformer((2, 4), names), 200)
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


def eformer_create_mesh() -> Callable[..., object] | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from eformer.escale import create_mesh as other  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return other


def measure() -> dict[str, dict[str, float]]:
    """Microseconds per call: the best round of each."""
    fresh = (f"axis{number}" for number in itertools.count())
    rows = candidates()
    best = {row: dict.fromkeys(who, float("inf")) for row, who in rows.items()}
    for row, group in rows.items():
        for _ in range(ROUNDS):
            for who, (function, calls) in group.items():
                names = [(next(fresh), next(fresh)) for _ in range(calls)]
                start = time.perf_counter()
                for pair in names:
                    function(pair)
                best[row][who] = min(best[row][who], (time.perf_counter() - start) / calls * 1e6)
    return best


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    best = measure()
    print(f"{'':20} {'who':14} {'us':>10} {'ratio':>8} {'target us':>10}")
    for row, group in best.items():
        for who, value in group.items():
            target = TARGETS.get((row, who))
            ratio = value / group["flax_mesh"]
            print(f"{row:20} {who:14} {value:10.2f} {ratio:8.2f} {target if target is not None else '':>10}")
    versions = {"jax": jax.__version__, "python": platform.python_version(), "machine": platform.machine()}
    missed = [f"{row} {who}" for (row, who), target in TARGETS.items() if best[row][who] > target]
    print(json.dumps({"benchmark": "mesh", "us": best, "missed": missed, **versions}))


if __name__ == "__main__":
    main()
