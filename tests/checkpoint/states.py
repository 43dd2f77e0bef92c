"""States of any layout: random values for them, and their arrays with stacks split by numpy alone."""

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from flax_mesh import create_mesh, named_leaves
from flax_mesh.checkpoint.layout import is_key
from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss
from flax_mesh.mpmd import MpmdMesh, Pipeline, split_stages
from flax_mesh.mpmd.schedules import make_schedule
from flax_mesh.train import TrainState
from flax_mesh.tree import in_stack, layer_path, path_and_start

SMALL = DecoderConfig(vocab_size=32, hidden_size=16, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4, mlp_size=32)


def random_values(abstract: Any, dtype: Any = None) -> Any:
    """Random arrays in the layout of `abstract`, made without compiling a program; a layer has the same values in every
    layout."""
    if isinstance(abstract, TrainState):
        return abstract.with_state(random_values(abstract.to_nnx(), dtype))

    def make(path: str, leaf: Any) -> jax.Array:
        if is_key(leaf):
            return jax.device_put(jax.random.split(jax.random.key(1), leaf.shape), leaf.sharding)
        base, start = path_and_start(path)
        if stack := in_stack(base, ["layers"]):
            layers = range(start, start + leaf.shape[0])
            value = np.stack([values_at(layer_path(base, stack, i), leaf.shape[1:]) for i in layers])
        else:
            value = values_at(base, leaf.shape)
        return jax.device_put(value.astype(dtype or leaf.dtype), leaf.sharding)

    leaves = [make(path, leaf) for path, leaf in named_leaves(abstract)]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def values_at(path: str, shape: tuple[int, ...]) -> np.ndarray:
    return 9 * np.random.default_rng(list(path.encode())).random(shape, np.float32)


def pipelined(config: DecoderConfig, virtual: int = 1) -> TrainState:
    """The layout of a pipeline on two groups of four devices; a stack of layers is split into chunks between them."""
    batch = {key: jax.ShapeDtypeStruct((4, 8), np.int32) for key in ("inputs", "targets")}
    groups = MpmdMesh(create_mesh((2, 1, 2, 1, 2, 1), ("pp", "dp", "fsdp", "ep", "tp", "sp")), "pp")
    make = lambda: make_decoder(config, nnx.Rngs(0))  # noqa: E731
    staged = split_stages(next_token_loss, make, batch, num_stages=2 * virtual, mesh=groups.unstack[0])
    kind = "interleaved-1f1b" if virtual > 1 else "1f1b"
    schedule = make_schedule(kind, num_groups=2, num_microbatches=2, num_virtual_stages=virtual)
    return Pipeline(staged, optax.sgd(1e-3), mesh=groups, schedule=schedule).abstract


def by_layer(state: Any) -> dict[str, np.ndarray]:
    """path on disk -> array, with stacks, and chunks of stacks in a pipeline, split into layers."""
    found = {}
    for path, leaf in named_leaves(state.to_nnx() if isinstance(state, TrainState) else state):
        head, layers, tail = path.partition("layers/")
        start = re.fullmatch(r"(.*)/from (\d+)", tail)
        if layers and not tail[0].isdigit():
            name, first = (start[1], int(start[2])) if start else (tail, 0)
            found |= {f"{head}layers/{i}/{name}": part for i, part in enumerate(np.asarray(leaf), first)}
        else:
            found[path] = np.asarray(leaf)
    return found


def check_same(a: Any, b: Any) -> None:
    """Bit for bit, whatever the two layouts."""
    a, b = by_layer(a), by_layer(b)
    assert a.keys() == b.keys() and any("/layers/2/" in path for path in a)
    for path in a:
        assert a[path].dtype == b[path].dtype and np.array_equal(a[path], b[path]), path


def check_leaves(want: Any, *found: Any) -> None:
    """Each tree in `found` has the dtypes and shardings of `want`, and its bits on every device."""
    wanted, *trees = (named_leaves(one.to_nnx() if isinstance(one, TrainState) else one) for one in (want, *found))
    for tree in trees:
        for (path, a), (_, b) in zip(wanted, tree, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype and a.sharding.is_equivalent_to(b.sharding, a.ndim), path
            shards = [(jax.random.key_data(x) if is_key(x) else x).addressable_shards for x in (a, b)]
            for one, other in zip(*shards, strict=True):
                assert one.device == other.device, path
                assert np.asarray(one.data).tobytes() == np.asarray(other.data).tobytes(), path


def largest(step: Path) -> Path:
    """The largest file of a step, which contains values of arrays."""
    return max((path for path in step.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def listing(folder: Path) -> dict[Path, tuple[int, int]]:
    """The time of the last change and the size of every file."""
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}
