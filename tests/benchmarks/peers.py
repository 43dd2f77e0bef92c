"""flax_mesh, JAX, Flax and, if they are installed, eformer and scalax, for the tasks that they have in common.

match: 30 rules and about 2,000 and 20,000 leaves. cold: rules that were not applied before; warm: another tree of the
same structure; map: `jax.tree.map` of the identity; flax: logical axis rules for a state with annotated Variables.
Targets: cold at most 1.5 times the paths alone, warm at most 0.6 times.
place: 302 numpy arrays on 8 devices. functions: the trees of `make_shard_and_gather_fns`, created again for each round;
stream: `gather(bytes_in_flight=)`. eformer and scalax get arrays on one device, for two rounds. Targets: at most 1.2
times JAX's own, no compilation.
mesh: "repeated" creates the same mesh again, "cold" one with new axis names.
import: after jax and flax.nnx, in a new process with bytecode. Target: at most 50 ms.

Milliseconds of CPU time, the best and the first of interleaved rounds; ratios are relative to the first row of a task.

    python -m tests.benchmarks peers [--only match,place,mesh,import] [--rounds 15] [--layers 83,832]
"""

import functools
import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core.spmd import logical_axis_rules
from jax.experimental import mesh_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.tree_util import keystr

import flax_mesh as fm
from tests.benchmarks.common.peers import peer
from tests.benchmarks.common.report import options, report, use_cpu
from tests.mesh.fakes import tpu_slice
from tests.train.bigram import count_compilations

PARTS = ("match", "place", "mesh", "import")
PEERS = {"eformer": "eformer.escale", "scalax": "scalax.sharding"}
PEER_ROUNDS = 2
P = PartitionSpec
NAMES = [f"{part}_{i}" for i in range(4) for part in ("attention", "mlp", "norm")]
TABLE = [
    *((rf"{name}/(kernel|scale)$", ("embed", "mlp")) for name in NAMES),
    *((rf"{name}/bias$", ("mlp",)) for name in NAMES),
    ("embed/table$", ("vocab", "embed")),
    *((rf"unused_{i}/kernel$", ()) for i in range(4)),
    (".*", ()),
]
IMPORT = """
import sys, time
import jax, flax.nnx
sys.dont_write_bytecode = False
began = time.process_time()
import {name}
print(1e3 * (time.process_time() - began))
"""


class Variant(NamedTuple):
    """`prepare` returns the function to time, which does the work `calls` times."""

    prepare: Callable[[], Callable[[], Any]]
    rounds: int | None = None  # None: all
    calls: int = 1


Task = tuple[str, dict[str, Variant]]


def peers() -> dict[str, Any]:
    """The modules of the other libraries that are installed."""
    modules = {name: peer(path) for name, path in PEERS.items()}
    return {name: module for name, module in modules.items() if module is not None}


def repeated(fn: Callable[[], Any]) -> Variant:
    return Variant(lambda: fn)


def state_of(layers: int, **metadata: Any) -> nnx.State:
    """A state of 24 leaves per layer and one table, with `metadata` for every Variable."""
    layer = {(name, what): shape for name in NAMES for what, shape in (("bias", (2,)), ("kernel", (2, 2)))}
    shapes: dict[Any, Any] = {("embed", "table"): (2, 2)}
    shapes |= {("layers", i, *path): shape for i in range(layers) for path, shape in layer.items()}
    return nnx.from_flat_state([(path, nnx.Param(np.ones(shape), **metadata)) for path, shape in shapes.items()])


def by_flax(annotated: nnx.State) -> Any:
    with logical_axis_rules([(f"axis_{i}", "fsdp" if i % 2 else "tp") for i in range(len(TABLE))]):
        return nnx.get_partition_spec(annotated)


def match_tasks(given: Any) -> Iterator[Task]:
    specs = [(pattern, P("fsdp", "tp")) for pattern, _ in TABLE]
    others: dict[str, Callable[[Any], Any]] = {}
    for name, module in peers().items():
        if name == "scalax":
            others[name] = module.TreePathShardingRule(*specs).apply
        else:
            others[name] = functools.partial(module.match_partition_rules, specs)
    for kind in ("dict", "state"):
        yield from (match_task(kind, layers, others) for layers in given.layers)


def match_task(kind: str, layers: int, others: dict[str, Callable[[Any], Any]]) -> Task:
    state: Any = state_of(layers)
    if kind == "dict":
        state = nnx.to_pure_dict(state)
    annotated = state_of(layers, out_sharding=("axis_7", "axis_29"), eager_sharding=False)
    seen, flatten = fm.PartitionRules(TABLE), jax.tree_util.tree_flatten_with_path
    fm.match_partition_rules(seen, state)
    variants: dict[str, Callable[[], Any]] = {
        "paths": lambda: [keystr(path, simple=True, separator="/") for path, _ in flatten(state)[0]],
        "cold": lambda: fm.match_partition_rules(fm.PartitionRules(TABLE), state),
        "warm": lambda: fm.match_partition_rules(seen, state),
        "map": lambda: jax.tree.map(lambda leaf: leaf, state),
        **{name: functools.partial(match, state) for name, match in others.items()},
        "flax": lambda: by_flax(annotated),
    }
    task = f"match {len(jax.tree.leaves(state)):,} leaves, {kind}"
    return task, {name: repeated(fn) for name, fn in variants.items()}


def host_tree() -> dict[str, Any]:
    """25 layers of 6 matrices and 6 vectors, a table and a norm: 302 arrays, 38 MiB."""
    matrix, vector = np.ones((128, 512), np.float32), np.ones(512, np.float32)
    layer = {f"kernel_{i}": matrix for i in range(6)} | {f"bias_{i}": vector for i in range(6)}
    tree = {"layers": [layer] * 25, "table": np.ones((128, 128), np.float32), "norm": np.ones(128, np.float32)}
    return jax.tree.map(np.copy, tree)


def place_tasks(given: Any) -> Iterator[Task]:
    mesh, tree = fm.create_mesh((2, 2, 1, 2, 1)), host_tree()
    specs = jax.tree.map(lambda x: P("fsdp", "tp") if x.ndim == 2 else P(), tree)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    on_one = jax.tree.map(jnp.asarray, tree)
    others: dict[str, Callable[[], Any]] = {}  # name -> a function that returns (shard functions, gather functions)
    for name, module in peers().items():
        if name == "scalax":
            helper = module.MeshShardingHelper(tuple(mesh.shape.values()), mesh.axis_names)
            others[name] = functools.partial(helper.make_shard_and_gather_fns, tree, specs)
        else:
            others[name] = functools.partial(module.make_shard_and_gather_fns, specs, mesh)

    def part(number: int, make: Callable[[], Any]) -> Callable[[], Callable[[Any], Any]]:
        return lambda: functools.partial(apply, make()[number])

    def placed() -> Any:
        return fm.shard(tree, specs, mesh)  # in every round: JAX caches copies on the host

    own = functools.partial(fm.make_shard_and_gather_fns, specs, mesh)
    sharded = {
        "jax.device_put": waited(lambda: tree, lambda: lambda tree: jax.device_put(tree, shardings)),
        "shard": waited(lambda: tree, lambda: lambda tree: fm.shard(tree, specs, mesh)),
        "functions": waited(lambda: tree, part(0, own)),
    }
    gathered = {
        "jax.device_get": waited(placed, lambda: jax.device_get),
        "gather": waited(placed, lambda: fm.gather),
        "functions": waited(placed, part(1, own)),
        "stream of 1 MiB": waited(placed, lambda: functools.partial(fm.gather, bytes_in_flight=2**20)),
    }
    for name, make in others.items():
        sharded[name] = waited(lambda: on_one, part(0, make), PEER_ROUNDS)
        gathered[name] = waited(placed, part(1, make), PEER_ROUNDS)
    yield "shard 302 arrays", sharded
    yield "gather 302 arrays", gathered


def apply(fns: Any, tree: Any) -> Any:
    return jax.tree.map(lambda fn, x: fn(x), fns, tree)


def waited(place: Callable[[], Any], make: Callable[[], Callable[[Any], Any]], rounds: int | None = None) -> Variant:
    """`make()` is called with what `place` returns, and the time includes the wait for its arrays."""

    def prepare() -> Callable[[], Any]:
        argument, fn = jax.block_until_ready(place()), make()
        return lambda: jax.block_until_ready(fn(argument))

    return Variant(prepare, rounds)


def mesh_tasks(given: Any) -> Iterator[Task]:
    fresh = (f"axis{number}" for number in itertools.count())
    auto = (AxisType.Auto,) * 2
    makes: dict[str, Callable[[tuple[str, str]], Any]] = {
        "jax.make_mesh": lambda names: jax.make_mesh((2, 4), names, auto),
        "flax_mesh": lambda names: fm.create_mesh((2, 4), names),
    }
    for name, module in peers().items():
        make = module.MeshShardingHelper if name == "scalax" else module.create_mesh
        makes[name] = functools.partial(make, (2, 4))

    def variant(make: Callable[[tuple[str, str]], Any], calls: int, *, cold: bool) -> Variant:
        def prepare() -> Callable[[], Any]:
            names = [(next(fresh), next(fresh)) if cold else ("dp", "tp") for _ in range(calls)]
            return lambda: [make(pair) for pair in names]

        return Variant(prepare, calls=calls)

    yield "create_mesh, repeated", {name: variant(make, 2000, cold=False) for name, make in makes.items()}
    yield "create_mesh, cold", {name: variant(make, 200, cold=True) for name, make in makes.items()}
    devices, shape = tpu_slice("TPU v4", (8, 8, 16)), (2, 4, 2, 2, 4, 8)
    searches = {"mesh_utils": mesh_utils.create_device_mesh, "flax_mesh": fm.create_device_mesh}
    split = {"devices": devices, "allow_split_physical_axes": True}
    yield (
        "devices of 8x8x16 chips",
        {name: repeated(functools.partial(make, shape, **split)) for name, make in searches.items()},
    )


def measure(task: str, variants: dict[str, Variant], rounds: int) -> list[dict[str, Any]]:
    times: dict[str, list[float]] = {name: [] for name in variants}
    compiled = dict.fromkeys(variants, 0)
    for number in range(rounds):
        for name, variant in variants.items():
            if number >= (variant.rounds or rounds):
                continue
            run = variant.prepare()
            with count_compilations() as programs:
                began = time.process_time()
                run()
                times[name].append(1e3 * (time.process_time() - began) / variant.calls)
            compiled[name] += len(programs)
    return rows_of(task, times, compiled)


def rows_of(task: str, times: dict[str, list[float]], compiled: dict[str, int]) -> list[dict[str, Any]]:
    best = {name: min(spent) for name, spent in times.items()}
    floor = next(iter(best.values()))
    return [
        {"task": task, "by": name, "ms": ms, "ratio": ms / floor, "first ms": times[name][0]}
        | {"compilations": compiled.get(name)}
        for name, ms in best.items()
    ]


def measure_imports(rounds: int) -> list[dict[str, Any]]:
    names = ["flax_mesh", "flax_mesh.train", *(PEERS[name] for name in peers())]
    times: dict[str, list[float]] = {name: [] for name in names}
    for _, name in itertools.product(range(rounds), times):
        command = [sys.executable, "-c", IMPORT.format(name=name)]
        times[name].append(float(subprocess.check_output(command, text=True).splitlines()[-1]))
    return rows_of("import", times, {})


def main(arguments: Sequence[str] | None = None) -> int:
    given = options("peers", arguments, only=PARTS, rounds=15, layers=(83, 832))
    use_cpu()
    jax.block_until_ready(jnp.zeros(8))  # initializes the backend
    tasks = {"match": match_tasks, "place": place_tasks, "mesh": mesh_tasks}
    rows: list[dict[str, Any]] = []
    for part in given.only:
        for task, variants in tasks[part](given) if part in tasks else ():
            rows += measure(task, variants, given.rounds)
    if "import" in given.only:
        rows += measure_imports(min(given.rounds, 7))
    return report("peers", arguments, rows)
