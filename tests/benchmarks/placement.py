"""Placing and gathering a tree of 302 arrays on 8 devices, against `jax.device_put(tree)` and `jax.device_get(tree)`.

shard, gather: the whole tree; functions: the trees of `make_shard_and_gather_fns`, made anew for each round; stream:
`gather(bytes_in_flight=)`. Best CPU time of interleaved rounds, the first of which is told apart, and how often XLA
compiled in all rounds together. Target: at most 1.2 times JAX's own, no compilation.

eformer and scalax take part where they are installed, for two rounds, with functions made anew for each. They are given
arrays on one device, since numpy arrays stay where they are with eformer.
"""

import functools
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from flax_mesh import create_mesh, gather, make_shard_and_gather_fns, shard

ROUNDS = 15
P = PartitionSpec
Variant = tuple[
    int, Callable[[], Callable[[], Any]]
]  # rounds, and a function that prepares one: what it returns is timed


def host_tree() -> dict[str, Any]:
    """25 layers of 6 matrices and 6 vectors, a table and a norm: 302 arrays, 38 MiB."""
    matrix, vector = np.ones((128, 512), np.float32), np.ones(512, np.float32)
    layer = {f"kernel_{i}": matrix for i in range(6)} | {f"bias_{i}": vector for i in range(6)}
    tree = {"layers": [layer] * 25, "table": np.ones((128, 128), np.float32), "norm": np.ones(128, np.float32)}
    return jax.tree.map(np.copy, tree)


def apply(fns: Any, tree: Any) -> Any:
    return jax.tree.map(lambda fn, x: fn(x), fns, tree)


def shard_variants(tree: Any, specs: Any, mesh: Any) -> dict[str, Variant]:
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    on_one = jax.tree.map(jnp.asarray, tree)

    def functions() -> Callable[[], Any]:
        fns, _ = make_shard_and_gather_fns(specs, mesh)
        return lambda: apply(fns, tree)

    variants = {
        "jax.device_put": (ROUNDS, lambda: lambda: jax.device_put(tree, shardings)),
        "shard": (ROUNDS, lambda: lambda: shard(tree, specs, mesh)),
        "functions": (ROUNDS, functions),
    }
    for name, make in peers(specs, mesh, tree).items():
        variants[name] = (2, lambda make=make: functools.partial(apply, make()[0], on_one))
    return variants


def gather_variants(tree: Any, specs: Any, mesh: Any) -> dict[str, Variant]:
    def on(make: Callable[[], Callable[[Any], Any]]) -> Callable[[], Callable[[], Any]]:
        def prepare() -> Callable[[], Any]:
            placed = jax.block_until_ready(shard(tree, specs, mesh))  # anew: JAX keeps what it has copied to the host
            return functools.partial(make(), placed)

        return prepare

    variants = {
        "jax.device_get": (ROUNDS, on(lambda: jax.device_get)),
        "gather": (ROUNDS, on(lambda: gather)),
        "functions": (ROUNDS, on(lambda: functools.partial(apply, make_shard_and_gather_fns(specs, mesh)[1]))),
        "stream of 1 MiB": (ROUNDS, on(lambda: functools.partial(gather, bytes_in_flight=2**20))),
    }
    for name, make in peers(specs, mesh, tree).items():
        variants[name] = (2, on(lambda make=make: functools.partial(apply, make()[1])))
    return variants


def measure(variants: dict[str, Variant]) -> dict[str, dict[str, float]]:
    """Milliseconds of CPU time, best and first, and the number of compilations, of each variant."""
    events: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if "backend_compile" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    times: dict[str, list[float]] = {name: [] for name in variants}
    compiled = dict.fromkeys(variants, 0)
    for number in range(ROUNDS):
        for name, (rounds, prepare) in variants.items():
            if number >= rounds:
                continue
            run = prepare()
            events.clear()
            began = time.process_time()
            jax.block_until_ready(run())
            times[name].append(1e3 * (time.process_time() - began))
            compiled[name] += len(events)
    jax.monitoring.unregister_event_duration_listener(listen)
    return {name: {"ms": min(t), "first_ms": t[0], "compilations": compiled[name]} for name, t in times.items()}


def peers(specs: Any, mesh: Any, tree: Any) -> dict[str, Callable[[], tuple[Any, Any]]]:
    """name -> a function that gives (shard functions, gather functions)."""
    found: dict[str, Callable[[], tuple[Any, Any]]] = {}
    try:
        from eformer.escale import make_shard_and_gather_fns as of_eformer  # pyright: ignore[reportMissingImports]

        found["eformer"] = lambda: of_eformer(specs, mesh)
    except ImportError:
        pass
    try:
        from scalax.sharding import MeshShardingHelper  # pyright: ignore[reportMissingImports]

        helper = MeshShardingHelper(tuple(mesh.shape.values()), mesh.axis_names)
        found["scalax"] = lambda: helper.make_shard_and_gather_fns(tree, specs)
    except ImportError:
        pass
    return found


def main() -> int:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    mesh, tree = create_mesh((2, 2, 1, 2, 1)), host_tree()
    specs = jax.tree.map(lambda x: P("fsdp", "tp") if x.ndim == 2 else P(), tree)
    print(
        f"jax {jax.__version__}, {len(jax.tree.leaves(tree))} arrays on 8 CPU devices, best CPU ms of {ROUNDS} rounds"
    )
    rows = {}
    for what, variants in (
        ("shard", shard_variants(tree, specs, mesh)),
        ("gather", gather_variants(tree, specs, mesh)),
    ):
        rows[what] = measure(variants)
        floor = next(iter(rows[what].values()))["ms"]
        for name, row in rows[what].items():
            ratio = f"{row['ms'] / floor:6.2f}x, first {row['first_ms']:8.1f}, {row['compilations']:.0f} compilations"
            print(f"{what:6}  {name:16} {row['ms']:8.1f} ({ratio})")
    print(json.dumps({"benchmark": "placement", "jax": jax.__version__, "rows": rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
