"""Sharding and gathering 302 arrays on 8 devices, compared with `jax.device_put(tree)` and `jax.device_get(tree)`.

shard, gather: the complete tree; functions: the trees of `make_shard_and_gather_fns`, created again for each round;
stream: `gather(bytes_in_flight=)`. CPU time, best and first of interleaved rounds, and the number of compilations.
Target: at most 1.2 times JAX's own, no compilation. eformer and scalax get arrays on one device, for two rounds. The
last table has everything that the libraries have in common, from the benchmarks rules, mesh and imports.

    python -m tests.benchmarks placement [--rounds 15] [--alone]
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from flax_mesh import create_mesh, gather, make_shard_and_gather_fns, shard
from tests.benchmarks import imports, rules
from tests.benchmarks import mesh as meshes
from tests.benchmarks.common.peers import peer
from tests.benchmarks.common.report import options, print_json, print_table, use_cpu
from tests.train.bigram import count_compilations

PEER_ROUNDS = 2
TARGET = 1.2  # of the time of JAX itself
P = PartitionSpec
# Number of rounds, and a function that prepares a round and returns the function to time.
Variant = tuple[int, Callable[[], Callable[[], Any]]]


def host_tree() -> dict[str, Any]:
    """25 layers of 6 matrices and 6 vectors, a table and a norm: 302 arrays, 38 MiB."""
    matrix, vector = np.ones((128, 512), np.float32), np.ones(512, np.float32)
    layer = {f"kernel_{i}": matrix for i in range(6)} | {f"bias_{i}": vector for i in range(6)}
    tree = {"layers": [layer] * 25, "table": np.ones((128, 128), np.float32), "norm": np.ones(128, np.float32)}
    return jax.tree.map(np.copy, tree)


def apply(fns: Any, tree: Any) -> Any:
    return jax.tree.map(lambda fn, x: fn(x), fns, tree)


def shard_variants(tree: Any, specs: Any, mesh: Any, rounds: int) -> dict[str, Variant]:
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    on_one = jax.tree.map(jnp.asarray, tree)

    variants = {
        "jax.device_put": (rounds, lambda: lambda: jax.device_put(tree, shardings)),
        "shard": (rounds, lambda: lambda: shard(tree, specs, mesh)),
        "functions": (rounds, lambda: functools.partial(apply, make_shard_and_gather_fns(specs, mesh)[0], tree)),
    }
    for name, make in peers(specs, mesh, tree).items():
        variants[name] = (min(rounds, PEER_ROUNDS), lambda make=make: functools.partial(apply, make()[0], on_one))
    return variants


def gather_variants(tree: Any, specs: Any, mesh: Any, rounds: int) -> dict[str, Variant]:
    def on(make: Callable[[], Callable[[Any], Any]]) -> Callable[[], Callable[[], Any]]:
        def prepare() -> Callable[[], Any]:
            placed = jax.block_until_ready(shard(tree, specs, mesh))  # again: JAX caches copies on the host
            return functools.partial(make(), placed)

        return prepare

    variants = {
        "jax.device_get": (rounds, on(lambda: jax.device_get)),
        "gather": (rounds, on(lambda: gather)),
        "functions": (rounds, on(lambda: functools.partial(apply, make_shard_and_gather_fns(specs, mesh)[1]))),
        "stream of 1 MiB": (rounds, on(lambda: functools.partial(gather, bytes_in_flight=2**20))),
    }
    for name, make in peers(specs, mesh, tree).items():
        variants[name] = (min(rounds, PEER_ROUNDS), on(lambda make=make: functools.partial(apply, make()[1])))
    return variants


def measure(what: str, variants: dict[str, Variant]) -> list[dict[str, Any]]:
    """One row per variant: milliseconds of CPU time, best and first, and the number of compilations."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    compiled = dict.fromkeys(variants, 0)
    for number in range(max(rounds for rounds, _ in variants.values())):
        for name, (rounds, prepare) in variants.items():
            if number >= rounds:
                continue
            run = prepare()
            with count_compilations() as programs:
                began = time.process_time()
                jax.block_until_ready(run())
                times[name].append(1e3 * (time.process_time() - began))
            compiled[name] += len(programs)
    best = {name: min(spent) for name, spent in times.items()}
    floor = next(iter(best.values()))
    return [
        {"work": what, "by": name, "ms": ms, "ratio": ms / floor, "first ms": times[name][0]}
        | {"rounds": len(times[name]), "compilations": compiled[name]}
        for name, ms in best.items()
    ]


def peers(specs: Any, mesh: Any, tree: Any) -> dict[str, Callable[[], tuple[Any, Any]]]:
    """name -> a function that returns (shard functions, gather functions)."""
    found: dict[str, Callable[[], tuple[Any, Any]]] = {}
    if (eformer := peer("eformer.escale")) is not None:
        found["eformer"] = lambda: eformer.make_shard_and_gather_fns(specs, mesh)
    if (scalax := peer("scalax.sharding")) is not None:
        helper = scalax.MeshShardingHelper(tuple(mesh.shape.values()), mesh.axis_names)
        found["scalax"] = lambda: helper.make_shard_and_gather_fns(tree, specs)
    return found


def side_by_side(placed: list[dict[str, Any]], rounds: int) -> list[dict[str, Any]]:
    """One row per kind of work with one column per library, in the unit given in the row."""
    columns = {"flax_mesh": ("cold", "shard", "gather", "flax_mesh")}  # names of flax_mesh in the other benchmarks
    columns |= {"floor": ("paths", "jax.device_put", "jax.device_get"), "jax": ("jax.make_mesh",)}
    columns |= {"eformer": ("eformer", "eformer.escale"), "scalax": ("scalax", "scalax.sharding"), "flax": ("flax",)}
    name_of = {name: column for column, names in columns.items() for name in names}
    table: list[dict[str, Any]] = []

    def add(work: str, unit: str, values: dict[str, Any]) -> None:
        found = {name_of[name]: value for name, value in values.items() if name in name_of}
        table.append({"work": work, "unit": unit} | {column: found.get(column) for column in columns})

    for depth in (83, 832):
        row = rules.measure(depth, "dict", rounds)
        add(f"match {len(rules.TABLE)} rules, {row['leaves']:,} leaves", "CPU ms", row)
    for what in ("shard", "gather"):
        add(f"{what} 302 arrays, first call", "CPU ms", {r["by"]: r["first ms"] for r in placed if r["work"] == what})
        add(f"{what} 302 arrays", "CPU ms", {r["by"]: r["ms"] for r in placed if r["work"] == what})
    made = meshes.measure(rounds)
    for what in ("repeated", "cold"):
        add(f"create_mesh, {what}", "us", {row["by"]: row["us"] for row in made if row["mesh"] == what})
    add("import", "CPU ms", {row["module"]: row["ms"] for row in imports.measure(min(rounds, 7))})
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    given = options("placement", arguments, rounds=15, alone=False)
    use_cpu()
    mesh, tree = create_mesh((2, 2, 1, 2, 1)), host_tree()
    specs = jax.tree.map(lambda x: P("fsdp", "tp") if x.ndim == 2 else P(), tree)
    jax.block_until_ready(jax.device_put(np.ones(8), NamedSharding(mesh, P())))  # initializes the backend
    rows = measure("shard", shard_variants(tree, specs, mesh, given.rounds))
    rows += measure("gather", gather_variants(tree, specs, mesh, given.rounds))
    print(f"{len(jax.tree.leaves(tree))} arrays on 8 CPU devices, CPU ms, ratio to JAX's own")
    print_table(rows)
    table = [] if given.alone else side_by_side(rows, given.rounds)
    if table:
        print()
        print_table(table)
    print_json("placement", arguments, target=TARGET, rows=rows, table=table)
    return 0
