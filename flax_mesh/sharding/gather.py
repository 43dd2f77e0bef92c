"""Copies of trees from devices to numpy: all arrays at once, or shard by shard with a limit on the bytes in flight."""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.typing import DTypeLike

from flax_mesh.errors import ShardingError
from flax_mesh.fields import check_types
from flax_mesh.text import path_lines, processes_text, shown
from flax_mesh.tree import PyTree, check_dtype, is_key, named_leaves

_Name = TypeVar("_Name")
_Leaf = TypeVar("_Leaf")  # an array, or a number, which is returned itself
Index = tuple[slice, ...]
_Bounds = tuple[tuple[int, int], ...]  # start and stop of each dim: an index that can be hashed and sorted
_Remote = Literal["error", "leave", "collect"]


@check_types
def gather(
    tree: PyTree, *, dtype: DTypeLike | None = None, bytes_in_flight: int | None = None, remote: _Remote = "error"
) -> PyTree:
    """Returns `tree` with every array as a complete numpy array. Numbers and random keys are returned unchanged.

    Args:
        tree: Any pytree.
        dtype: Floating arrays are cast to it, on the host. Default: dtypes do not change.
        bytes_in_flight: Limit on the bytes that are transferred at the same time, shard by shard; a larger shard is
            transferred alone. Default: all leaves are transferred at once, and each jax array caches its host copy.
        remote: For arrays that are partly on devices of other processes only. "error" raises a ShardingError that
            reports how many elements of each array are missing here. "leave" leaves them in the tree as jax arrays.
            "collect" exchanges the missing parts: all processes must call it, with trees of the same shardings.

    Nothing is compiled and nothing is replicated on devices, except by "collect": it compiles an all-gather for each
    shape of shards, which allocates one shard of every process on each device.

    Example:
        >>> arrays = fm.shard({"w": np.ones((8, 2))}, jax.P("fsdp"), fm.create_mesh((8,), ("fsdp",)))
        >>> type(fm.gather(arrays)["w"]).__name__
        'ndarray'
    """
    if remote not in ("error", "leave", "collect"):
        raise ValueError(f"remote must be 'error', 'leave' or 'collect', got {shown(remote)}.")
    check_dtype(dtype)
    leaves, treedef = jax.tree.flatten(tree)
    if classes := [x.__name__ for x in leaves if isinstance(x, type)]:
        raise TypeError(f"the leaves of tree must be arrays, got the classes {', '.join(classes[:8])}.")
    partial = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array) and not _is_local(x)]
    if partial and remote == "error":
        named = named_leaves(tree)
        raise ShardingError(_remote_text([named[i] for i in partial]))
    by_index = {i: _cast(collect(leaves[i]), dtype) if remote == "collect" else leaves[i] for i in partial}
    complete = [i for i in range(len(leaves)) if i not in by_index]
    local = [leaves[i] for i in complete]
    if bytes_in_flight is None:
        fetched = [_cast(x, dtype) for x in jax.device_get(local)]
    else:
        fetched = stream(local, dtype, bytes_in_flight)
    by_index |= dict(zip(complete, fetched, strict=True))
    return jax.tree.unflatten(treedef, [by_index[i] for i in range(len(leaves))])


def gather_leaf(x: _Leaf, dtype: DTypeLike | None = None) -> np.ndarray | _Leaf:
    """As `gather` for one array, without the overhead of flattening a tree."""
    if isinstance(x, jax.Array) and not _is_local(x):
        return gather(x, dtype=dtype)
    return _cast(jax.device_get(x), dtype)


def stream(leaves: Sequence[PyTree], dtype: DTypeLike | None, bytes_in_flight: int) -> list[PyTree]:
    """The leaves as numpy, transferred shard by shard in their order, at most `bytes_in_flight` at a time."""
    if bytes_in_flight < 1:
        raise ValueError(f"bytes_in_flight must be at least 1, got {bytes_in_flight}.")
    streamed = [isinstance(x, jax.Array) and not is_key(x) for x in leaves]
    done = [
        np.empty(x.shape, _cast_dtype(x.dtype, dtype)) if by_shard else _cast(jax.device_get(x), dtype)
        for x, by_shard in zip(leaves, streamed, strict=True)
    ]
    shards = ((number, x) for number, (x, by_shard) in enumerate(zip(leaves, streamed, strict=True)) if by_shard)
    pieces = (((number, index), data) for number, x in shards for index, data in _pieces(x))
    for (number, index), data in in_turn(pieces, bytes_in_flight):
        done[number][index] = data
    return done


def in_turn(pieces: Iterable[tuple[_Name, jax.Array]], limit: int) -> Iterator[tuple[_Name, np.ndarray]]:
    """Yields each (name, data) as (name, numpy), in order. A transfer starts once its bytes fit within `limit`."""
    in_flight: deque[tuple[_Name, jax.Array]] = deque()
    total = 0
    for name, data in pieces:
        while in_flight and total + data.nbytes > limit:
            total -= in_flight[0][1].nbytes
            yield _finish(*in_flight.popleft())
        data.copy_to_host_async()
        in_flight.append((name, data))
        total += data.nbytes
        del data
    while in_flight:
        yield _finish(*in_flight.popleft())


def _finish(name: _Name, data: jax.Array) -> tuple[_Name, np.ndarray]:
    return name, np.asarray(data)


def _pieces(x: jax.Array) -> Iterator[tuple[Index, jax.Array]]:
    """(index, shard) of every distinct local shard of the array."""
    seen = set()
    for shard in x.addressable_shards:
        if x.is_fully_addressable:
            duplicate = shard.replica_id > 0
        else:  # replica 0 may be on another process
            bounds = _bounds(shard.index, x.shape)
            duplicate = bounds in seen
            seen.add(bounds)
        if not duplicate:
            yield shard.index, shard.data if shard.device.platform == "cpu" else _new_array(shard.data)


def _new_array(x: jax.Array) -> jax.Array:
    """A new array on the buffer of `x`: the host copy is cached in it, and freed with it, instead of in `x`."""
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, [x])


def _is_local(x: jax.Array) -> bool:
    """Whether every element is on a device of this process."""
    if x.is_fully_addressable:
        return True
    return _all_bounds(x).keys() == {_bounds(shard.index, x.shape) for shard in x.addressable_shards}


def collect(x: jax.Array) -> np.ndarray:
    """The complete array on every process.

    Each distinct shard is sent by the lowest process that stores it. Round i is one all-gather of the i-th shard of
    every process, so that at most one shard of each process is in memory; a process without an i-th shard sends zeros.
    """
    owners = _all_bounds(x)
    queues: list[list[_Bounds]] = [[] for _ in range(jax.process_count())]
    for bounds in sorted(owners):
        queues[owners[bounds]].append(bounds)
    local = {_bounds(shard.index, x.shape): shard.data for shard in x.addressable_shards}
    filler = np.zeros(x.sharding.shard_shape(x.shape), x.dtype)
    full = np.empty(x.shape, x.dtype)
    to_send = queues[jax.process_index()]
    for turn in range(max(map(len, queues))):
        sent = np.asarray(local[to_send[turn]]) if turn < len(to_send) else filler
        received = multihost_utils.process_allgather(sent)
        for queue, data in zip(queues, received, strict=True):
            if turn < len(queue):
                full[tuple(slice(*pair) for pair in queue[turn])] = data
    return full


def _all_bounds(x: jax.Array) -> dict[_Bounds, int]:
    """Every distinct shard -> the lowest process that stores it."""
    first: dict[_Bounds, int] = {}
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        bounds, process = _bounds(index or (), x.shape), int(device.process_index)
        first[bounds] = min(first.get(bounds, process), process)
    return first


def _bounds(index: Index, shape: Sequence[int]) -> _Bounds:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _remote_text(named: Sequence[tuple[str, jax.Array]]) -> str:
    problems = []
    for path, x in named:
        local = {_bounds(shard.index, x.shape) for shard in x.addressable_shards}
        missing = {bounds: process for bounds, process in _all_bounds(x).items() if bounds not in local}
        count = sum(math.prod(stop - start for start, stop in bounds) for bounds in missing)
        processes = processes_text(missing.values())
        problems.append((path, f"{count} of {x.size} elements {x.shape} are only on {processes}"))
    return (
        f"gather requires all elements on devices of process {jax.process_index()}, but:\n"
        + "\n".join(path_lines(f"{path}: {problem}" for path, problem in problems))
        + "\n"
        'Pass remote="collect" on all processes to exchange them, pass remote="leave" to keep these as jax arrays, or '
        "save a checkpoint."
    )


def _cast(x: _Leaf, dtype: DTypeLike | None) -> np.ndarray | _Leaf:
    if dtype is None or not isinstance(x, np.ndarray):
        return x
    return x.astype(_cast_dtype(x.dtype, dtype), copy=False)


def _cast_dtype(current: np.dtype, dtype: DTypeLike | None) -> DTypeLike:
    return dtype if dtype is not None and jnp.issubdtype(current, jnp.floating) else current
