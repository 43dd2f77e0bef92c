"""The tree on disk: every leaf under its global path, one array per layer, whatever its layout in memory."""

import functools
import math
import re
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from flax_mesh.checkpoint.stacks import layers_of, tree_of
from flax_mesh.errors import ConfigError
from flax_mesh.modes import array_from
from flax_mesh.processes.agree import Bounds, Shares, bounds, places_of
from flax_mesh.sharding.memory import is_on_host
from flax_mesh.text import array_text, at_most, grouped, path_lines
from flax_mesh.tree import (
    PyTree,
    Shaped,
    array_problem,
    in_batches,
    in_stack,
    indexed_paths,
    is_key,
    layer_path,
    named_leaves,
    owners_of,
    path_and_start,
    shard_bytes,
)

Target = dict[str, jax.ShapeDtypeStruct]  # the arrays to restore, by path on disk
Reader = Callable[[Sequence[str]], Mapping[str, jax.Array]]  # of the arrays at some paths on disk
_Shape = tuple[int, ...]
_NUMBERS = (bool, int, float, complex)
_BATCH_BYTES = 2**30  # of stacks assembled at a time: the memory that restoring needs beside the state


@dataclass(frozen=True)
class _ArrayShard:
    """One shard of an array, read lazily; `index` and `replica_id` as in `jax.Shard`."""

    index: tuple[slice, ...]
    replica_id: int
    device: object
    read: Callable[[], Shaped]
    _last: list[weakref.ref[jax.Array]] = field(default_factory=list)  # weak reference to the last value read

    @property
    def data(self) -> Shaped:
        value = self._last[0]() if self._last else None
        if value is None:  # Orbax reads once for the shape and once for the data
            value = self.read()
            self._last[:] = [weakref.ref(value)] if isinstance(value, jax.Array) else []
        return value


class ShardedArray:
    """An array as the parts that this process writes; over all processes each part of the array is written once.

    A layer of a stack is never materialized as an array over its devices: its shards are slices of the stack's shards.
    All parts of all processes have the shape `part`.
    """

    def __init__(self, shape: _Shape, dtype: np.dtype, sharding: Sharding, part: _Shape, shards: Sequence[_ArrayShard]):
        self.shape, self.dtype, self.sharding = shape, dtype, sharding
        self.ndim, self.size, self.itemsize = len(shape), math.prod(shape), dtype.itemsize
        self.global_shards = list(shards)
        # Orbax asks every process for the shape of a shard, even one that writes none.
        shard = jax.ShapeDtypeStruct(part, dtype)
        self.addressable_shards = list(shards) or [_ArrayShard((), sys.maxsize, None, lambda: shard)]


def paths_on_disk(state: PyTree, layers: Sequence[str]) -> tuple[list[tuple[str, Any]], dict[str, list[str]]]:
    """(path, leaf) of every leaf, and `_stacked_paths`. Numbers of Python and NumPy become arrays without dims.

    A path on disk is a tree of names, which Orbax also joins with dots: the leaves ["a"]["b"], ["a.b"] and ["a/b"]
    would be one array, and a leaf ["a"] cannot contain another one. Raises ConfigError if two leaves have the same name
    on disk, or if a leaf cannot be stored.
    """
    is_number = lambda x: type(x) in _NUMBERS or isinstance(x, np.generic)  # noqa: E731
    named = [(path, np.asarray(x) if is_number(x) else x) for path, x in named_leaves(state)]
    if problems := [f"{path}: {problem}" for path, x in named if (problem := _problem(x))]:
        raise ConfigError(path_lines(problems), head="a checkpoint cannot store every leaf of this tree:")
    stacks = _stacked_paths(named, layers)
    owners: dict[str, list[int]] = {}  # name on disk -> indices of leaves
    paths: dict[str, list[int]] = {}
    for i, (path, leaf) in enumerate(named):
        for part in () if 0 in leaf.shape else stacks.get(path, [path]):
            owners.setdefault(part.replace("/", "."), []).append(i)
            paths.setdefault(part, []).append(i)
    shared = [indices for indices in owners.values() if len(indices) > 1]
    folders = ((path, path[: match.start()]) for path in paths for match in re.finditer("/", path))
    shared += [paths[folder] + paths[path] for path, folder in folders if folder in paths]
    if shared:
        keys = indexed_paths(state)
        raise ConfigError(
            at_most(list(dict.fromkeys(" and ".join(keys[i] for i in indices) for indices in shared))),
            head="every array of a checkpoint must have its own name, but these have the same one. On disk the names "
            "of a path are joined with dots, / separates names, and an array cannot contain another one:",
            repair="Rename one of each line.",
        )
    return named, stacks


def _problem(x: Any) -> str:
    if (problem := array_problem(x)) or is_key(x):
        return problem
    return "" if _has_dtype(x.dtype) else f"is an array of {x.dtype}, which Orbax does not have; convert it"


@functools.cache
def _has_dtype(dtype: np.dtype) -> bool:
    import tensorstore  # pyright: ignore[reportMissingImports]

    try:
        tensorstore.dtype(dtype.name)
    except ValueError:
        return False
    return True


def with_numbers(leaves: Iterable[Any], tree: PyTree) -> list[object]:
    """The leaves; those that are numbers of Python in `tree` are so again."""
    return [
        type(x)(leaf.item()) if type(x) in _NUMBERS else leaf
        for leaf, x in zip(leaves, jax.tree.leaves(tree), strict=True)
    ]


def to_disk(
    named: Sequence[tuple[str, Any]], stacks: Mapping[str, list[str]], *, on_host: bool = True
) -> Iterator[tuple[str, object]]:
    """(path on disk, array to write) of every leaf of nonzero size; random keys as their uint32 data.

    `on_host`: copy the shards of stacks to the host first and slice them there; otherwise every layer is sliced on its
    device when it is read.
    """
    named = [(path, jax.random.key_data(x) if is_key(x) else x) for path, x in named]
    on_host = on_host and _host() is not None
    shares = Shares()
    if on_host:
        for path, leaf in named:
            for shard in _shards_here(leaf).values() if path in stacks else ():
                shard.data.copy_to_host_async()
    for path, leaf in named:
        if 0 in leaf.shape:
            continue  # nothing to store, and Orbax refuses it
        if path in stacks:
            layers = map(np.asarray, leaf) if isinstance(leaf, np.ndarray) else _layers(leaf, shares, on_host)
            yield from zip(stacks[path], layers, strict=True)
        elif hasattr(leaf, "sharding"):
            yield path, _written(leaf, shares)
        else:
            yield path, leaf


def arrays_on_disk(state: PyTree, layers: Sequence[str] | None = None, stored: Collection[str] | None = None) -> Target:
    """Shape, dtype and sharding of the arrays that a Checkpointer with these `layers` saves, by path on disk.

    With the paths that a checkpoint has `stored`: of the arrays that it restores from there.
    """
    return disk_target(*paths_on_disk(tree_of(state), layers_of(state, layers, stored)))


def disk_target(named: Sequence[tuple[str, Shaped]], stacks: Mapping[str, list[str]]) -> Target:
    """Shape, dtype and sharding to restore into, by path on disk, for (path, abstract leaf) pairs."""
    target = {}
    for path, leaf in named:
        if 0 in leaf.shape:
            continue
        leaf = _as_key_data(leaf)
        shape, sharding = leaf.shape, getattr(leaf, "sharding", None)
        if path in stacks:
            shape, sharding = shape[1:], _layer_sharding(leaf)
        target |= dict.fromkeys(stacks.get(path, [path]), jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding))
    return target


def from_disk(read: Reader, named: Sequence[tuple[str, Shaped]], stacks: Mapping[str, list[str]]) -> list[jax.Array]:
    """The arrays for (path, abstract leaf) pairs; `read` returns the arrays at some paths on disk.

    Stacks are assembled a few at a time, so that the devices never hold a second copy of all of them. An array that is
    placed only on devices of other processes is not read: here it is an array without shards.
    """
    elsewhere = {path: _as_key_data(leaf) for path, leaf in named if _is_elsewhere(leaf)}
    arrays: dict[str, Any] = {
        path: _empty(_as_key_data(leaf)) for path, leaf in named if 0 in leaf.shape and path not in elsewhere
    }
    for path, leaf in elsewhere.items():
        arrays[path] = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, [], dtype=leaf.dtype)
    stacked = {path: _as_key_data(leaf) for path, leaf in named if path in stacks and path not in arrays}
    arrays |= dict(read([path for path, _ in named if path not in stacks and path not in arrays]))
    for path in [path for path, leaf in stacked.items() if getattr(leaf, "sharding", None) is None]:
        layers, _ = read(stacks[path]), stacked.pop(path)
        arrays[path] = np.stack([layers[layer] for layer in stacks[path]])
    for paths in _batches(stacked):
        layers = read([layer for path in paths for layer in stacks[path]])
        split = [[layers[layer] for layer in stacks[path]] for path in paths]
        arrays |= zip(paths, _compiled_stack(tuple(stacked[path].sharding for path in paths))(split), strict=True)
    return [_as_key(arrays[path], leaf) for path, leaf in named]


def read_scaled(
    scaled: Mapping[str, tuple[str, float]],
    stored: Mapping[str, Shaped],
    target: Target,
    reader: Callable[[Target], Reader],
    paths: Sequence[str],
) -> dict[str, jax.Array]:
    """The arrays at `paths`. Products are computed in the dtype of the array that is stored."""
    others = [path for path in paths if path not in scaled]
    arrays = dict(reader(target)(others))
    sources = {path: scaled[path][0] for path in paths if path in scaled}
    as_stored = {
        source: jax.ShapeDtypeStruct(target[path].shape, stored[source].dtype, sharding=target[path].sharding)
        for path, source in sources.items()
    }
    values = dict(reader(as_stored)(list(as_stored)))
    return arrays | {
        path: (values[source] * scaled[path][1]).astype(target[path].dtype) for path, source in sources.items()
    }


def _stacked_paths(named: Sequence[tuple[str, Shaped]], layers: Sequence[str]) -> dict[str, list[str]]:
    """Paths on disk of every leaf of a scanned stack, one per layer; optimizer leaves follow their parameter."""
    has_parts = all(path.startswith(("model/", "optimizer/")) for path, _ in named)
    bases = [path_and_start(path) for path, _ in named]
    parameters = {path.removeprefix("model/") for path, _ in bases if path.startswith("model/") or not has_parts}
    owned, stacked = owners_of([base for base, _ in bases], parameters), {}
    for (path, leaf), (base, start) in zip(named, bases, strict=True):
        owner = owned.get(base)
        stack = in_stack(owner, layers) if owner else None
        if owner and stack and leaf.shape:
            head = base[: len(base) - len(owner)]
            stacked[path] = [head + layer_path(owner, stack, start + i) for i in range(leaf.shape[0])]
    return stacked


def check_same(
    target: Mapping[str, Shaped], stored: Mapping[str, Shaped], what: str, *, cast: bool = False, repair: str = ""
) -> None:
    """Raise one ConfigError that lists every path on which two trees differ; with `cast` float dtypes may differ."""
    problems = [f"{path}: only in the model, {array_text(target[path])}" for path in target.keys() - stored.keys()]
    problems += [f"{p}: only in the checkpoint, {array_text(stored[p])}" for p in stored.keys() - target.keys()]
    for path in target.keys() & stored.keys():
        if not fits(stored[path], target[path], cast=cast):
            problems.append(f"{path}: checkpoint {array_text(stored[path])}, model {array_text(target[path])}")
    if problems:
        head = (
            f"{what} does not match the model ({len(problems)} of {len(target.keys() | stored.keys())} leaves differ):"
        )
        raise ConfigError(path_lines(sorted(problems)), head=head, repair=repair)


def fits(stored: Shaped, target: Shaped, *, cast: bool) -> bool:
    """Whether `stored` can be restored as `target`: equal shapes, and equal dtypes or (`cast`) two float dtypes."""
    floats = all(jnp.issubdtype(x.dtype, jnp.floating) for x in (stored, target))
    return tuple(stored.shape) == tuple(target.shape) and (stored.dtype == target.dtype or (cast and floats))


def _as_key_data(abstract: Any) -> jax.ShapeDtypeStruct:
    """Random keys are stored as their data: uint32, with one more dim."""
    if not is_key(abstract):
        return abstract
    data, sharding = jax.eval_shape(jax.random.key_data, abstract), abstract.sharding
    if isinstance(sharding, NamedSharding):  # others have no dims
        spec = PartitionSpec(*sharding.spec, *[None] * (data.ndim - len(sharding.spec)))
        sharding = NamedSharding(sharding.mesh, spec)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


def _as_key(data: jax.Array, abstract: Any) -> jax.Array:
    """`data` wrapped as random keys if `abstract` is a key array, else unchanged."""
    if not is_key(abstract):
        return data
    name = str(abstract.dtype).removeprefix("key<").removesuffix(">")  # as JAX prints a key type: key<fry>
    impl = {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}[name]
    keys = jax.random.wrap_key_data(data, impl=impl)
    return keys if _is_elsewhere(abstract) else jax.device_put(keys, abstract.sharding)


def _is_elsewhere(abstract: object) -> bool:
    sharding = getattr(abstract, "sharding", None)
    return sharding is not None and not sharding.addressable_devices


def _empty(abstract: Shaped) -> jax.Array | np.ndarray:
    """An array of size zero, of NumPy without a sharding; none is stored on disk."""
    sharding = getattr(abstract, "sharding", None)
    if sharding is None:
        return np.zeros(abstract.shape, abstract.dtype)
    shard = np.zeros(sharding.shard_shape(abstract.shape), abstract.dtype)
    return array_from(abstract.shape, sharding, lambda _: shard, abstract.dtype)


def _shards_here(leaf: jax.Array) -> dict[Bounds, Any]:
    """One replica of each shard in this process. An array of NumPy has none."""
    shards = sorted(getattr(leaf, "addressable_shards", ()), key=lambda shard: -shard.replica_id)
    return {bounds(shard.index, leaf.shape): shard for shard in shards}


def _written(x: jax.Array, shares: Shares) -> ShardedArray:
    part, parts = shares.of_this_process(places_of(x.sharding, x.shape), x.dtype.itemsize, divide=not is_on_host(x))
    here, is_whole = _shards_here(x), part == x.sharding.shard_shape(x.shape)
    # Whole shards are not sliced, since that may need memory of the device.
    read = lambda p: here[p.shard].data if is_whole else here[p.shard].data[p.slices]  # noqa: E731
    shards = [_ArrayShard(p.index, 0, here[p.shard].device, functools.partial(read, p)) for p in parts]
    return ShardedArray(x.shape, x.dtype, x.sharding, part, shards)


def _layers(stack: jax.Array, shares: Shares, on_host: bool) -> Iterator[ShardedArray]:
    sharding, places = _layer_sharding(stack), places_of(stack.sharding, stack.shape)
    here = {place: (np.asarray(x.data) if on_host else x.data, x.device) for place, x in _shards_here(stack).items()}
    for i in range(stack.shape[0]):
        # The shards that have this layer, by their place in the layer.
        whole = {place[1:]: place for place in places if place[0][0] <= i < place[0][1]}
        of_layer = {shard: places[place] for shard, place in whole.items()}
        part, parts = shares.of_this_process(of_layer, stack.dtype.itemsize, divide=on_host or not is_on_host(stack))
        layer = []
        for p in parts:
            data, device = here[whole[p.shard]]
            read = functools.partial(_cut, data, (i - whole[p.shard][0][0], *p.slices))
            layer.append(_ArrayShard(p.index, 0, device, read))
        yield ShardedArray(stack.shape[1:], stack.dtype, sharding, part, layer)


def _cut(data: jax.Array | np.ndarray, index: tuple[int | slice, ...]) -> jax.Array:
    """A part of one layer of a shard of a stack, on the host if the shard is on the host."""
    return jax.device_put(data[index], _host()) if isinstance(data, np.ndarray) else data[index]


def _host() -> Any:
    """A CPU device, through which Orbax accepts arrays on the host; None if JAX has no CPU backend."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def _layer_sharding(stack: object) -> Any:
    sharding = getattr(stack, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]), memory_kind=sharding.memory_kind)


def _batches(stacks: Mapping[str, jax.ShapeDtypeStruct]) -> Iterator[list[str]]:
    """Paths in batches of limited bytes, each on one mesh: a program cannot run on several pipeline groups."""
    for paths in grouped(stacks, lambda path: getattr(stacks[path].sharding, "mesh", None)).values():
        yield from in_batches(paths, lambda path: shard_bytes(stacks[path]), _BATCH_BYTES)


@functools.lru_cache(maxsize=64)
def _compiled_stack(shardings: tuple[Sharding, ...]) -> Callable[[list[list[jax.Array]]], list[jax.Array]]:
    return jax.jit(lambda split: [jnp.stack(x) for x in split], out_shardings=list(shardings))
