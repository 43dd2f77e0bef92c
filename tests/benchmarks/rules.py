"""Matching 30 rules with about 2,000 and 20,000 leaves, compared with building the path strings only.

cold: rules that were not applied before; warm: another tree of the same structure; map: `jax.tree.map` of the identity;
flax: 30 logical axis rules for a state with annotated Variables. Best CPU time of interleaved rounds. Targets: cold at
most 1.5 times the paths, warm at most 0.6 times.

    python -m tests.benchmarks rules [--rounds 15] [--layers 83,832]
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.core.spmd import logical_axis_rules
from jax.sharding import PartitionSpec
from jax.tree_util import keystr

from flax_mesh import PartitionRules, match_partition_rules
from tests.benchmarks.common.peers import peer
from tests.benchmarks.common.report import options, print_json, print_table, use_cpu

TARGETS = {"cold": 1.5, "warm": 0.6}  # relative to the time of the paths
NAMES = [f"{part}_{i}" for i in range(4) for part in ("attention", "mlp", "norm")]
TABLE = [
    *((rf"{name}/(kernel|scale)$", ("embed", "mlp")) for name in NAMES),
    *((rf"{name}/bias$", ("mlp",)) for name in NAMES),
    ("embed/table$", ("vocab", "embed")),
    *((rf"unused_{i}/kernel$", ()) for i in range(4)),
    (".*", ()),
]


def state_of(layers: int, **metadata: Any) -> nnx.State:
    """A state of 24 leaves per layer and one table, with `metadata` for every Variable."""
    layer = {(name, what): shape for name in NAMES for what, shape in (("bias", (2,)), ("kernel", (2, 2)))}
    shapes: dict[Any, Any] = {("embed", "table"): (2, 2)}
    shapes |= {("layers", i, *path): shape for i in range(layers) for path, shape in layer.items()}
    return nnx.from_flat_state([(path, nnx.Param(np.ones(shape), **metadata)) for path, shape in shapes.items()])


def measure(layers: int, kind: str, rounds: int) -> dict[str, Any]:
    """Best milliseconds of each variant, after one round that is not counted."""
    state: Any = state_of(layers)
    if kind == "dict":
        state = nnx.to_pure_dict(state)
    seen = PartitionRules(TABLE)
    match_partition_rules(seen, state)
    variants = {
        "paths": lambda: [
            keystr(path, simple=True, separator="/") for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]
        ],
        "cold": lambda: match_partition_rules(PartitionRules(TABLE), state),
        "warm": lambda: match_partition_rules(seen, state),
        "map": lambda: jax.tree.map(lambda leaf: leaf, state),
        **{name: lambda match=match: match(state) for name, match in peers().items()},
        "flax": lambda: by_flax(annotated),
    }
    annotated = state_of(layers, out_sharding=("axis_7", "axis_29"), eager_sharding=False)
    best = dict.fromkeys(variants, float("inf"))
    for _ in range(rounds):
        for name, fn in variants.items():
            began = time.process_time()
            fn()
            best[name] = min(best[name], 1e3 * (time.process_time() - began))
    return {"tree": kind, "leaves": len(jax.tree.leaves(state))} | best


def peers() -> dict[str, Callable[[Any], Any]]:
    """The same table in the libraries that are installed."""
    specs = [(pattern, PartitionSpec("fsdp", "tp")) for pattern, _ in TABLE]
    found = {}
    if (eformer := peer("eformer.escale")) is not None:
        found["eformer"] = lambda tree: eformer.match_partition_rules(specs, tree)
    if (scalax := peer("scalax.sharding")) is not None:
        found["scalax"] = scalax.TreePathShardingRule(*specs).apply
    return found


def by_flax(annotated: nnx.State) -> Any:
    with logical_axis_rules([(f"axis_{i}", "fsdp" if i % 2 else "tp") for i in range(len(TABLE))]):
        return nnx.get_partition_spec(annotated)


def ratios(row: dict[str, Any]) -> dict[str, Any]:
    """The same row with times relative to the time of the paths."""
    texts = ("tree", "leaves")
    return {name: value if name in texts else value / row["paths"] for name, value in row.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    given = options("rules", arguments, rounds=15, layers=(83, 832))
    use_cpu()
    rows = [measure(depth, kind, given.rounds) for kind in ("dict", "state") for depth in given.layers]
    print(f"{len(TABLE)} rules; CPU ms")
    print_table(rows)
    print("\nrelative to the paths")
    print_table([ratios(row) for row in rows])
    print_json("rules", arguments, targets=TARGETS, ms=rows, ratios=[ratios(row) for row in rows])
    return 0
