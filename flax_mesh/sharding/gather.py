"""Whole trees from devices to numpy: all at once, or shard after shard with a limit on the bytes in flight."""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from flax_mesh.errors import ShardingError
from flax_mesh.tree import named_leaves

Index = tuple[slice, ...]
Bounds = tuple[tuple[int, int], ...]  # an index that can be a key and be sorted: start and stop of each dim
Remote = Literal["error", "leave", "collect"]


def gather(tree: Any, *, dtype: Any = None, bytes_in_flight: int | None = None, remote: Remote = "error") -> Any:
    """`tree` with every array as numpy, whole, its dtype kept. Numbers stay numbers, random keys stay keys.

    dtype: floating arrays are cast to it, on the host
    bytes_in_flight: at most so many bytes are on their way to the host at a time, shard by shard; a shard that is
        larger travels alone. The jax arrays then keep no copy on the host, which they do otherwise. By default all
        leaves travel at once
    remote: for arrays of which a part lies only on devices of other processes. "error" names them and says how much of
        each is not here; "leave" leaves them in the tree as they are, for their `addressable_shards`; "collect" has all
        processes send each other their parts, and all must call it, with trees of the same layout

    Nothing is compiled and nothing is replicated on devices. Only "collect" compiles an all-gather for each shape of
    shards, and takes up one shard of every process on each device meanwhile.
    """
    if remote not in ("error", "leave", "collect"):
        raise ValueError(f"remote must be 'error', 'leave' or 'collect', got {remote!r}.")
    leaves, treedef = jax.tree.flatten(tree)
    apart = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array) and not is_here(x)]
    if apart and remote == "error":
        named = named_leaves(tree)
        raise ShardingError(_remote_text([named[i] for i in apart]))
    found = {i: _cast(collect(leaves[i]), dtype) if remote == "collect" else leaves[i] for i in apart}
    here = [i for i in range(len(leaves)) if i not in found]
    local = [leaves[i] for i in here]
    if bytes_in_flight is None:
        fetched = [_cast(x, dtype) for x in jax.device_get(local)]
    else:
        fetched = stream(local, dtype, bytes_in_flight)
    found |= dict(zip(here, fetched, strict=True))
    return jax.tree.unflatten(treedef, [found[i] for i in range(len(leaves))])


def gather_leaf(x: Any, dtype: Any = None) -> Any:
    """As `gather` for one array, without the toll of a tree."""
    if isinstance(x, jax.Array) and not is_here(x):
        return gather(x, dtype=dtype)
    return _cast(jax.device_get(x), dtype)


def stream(leaves: Sequence[Any], dtype: Any, bytes_in_flight: int) -> list[Any]:
    """The leaves as numpy, by shards that travel in their order, at most `bytes_in_flight` at a time."""
    if bytes_in_flight < 1:
        raise ValueError(f"bytes_in_flight must be at least 1, got {bytes_in_flight}.")
    streamed = [isinstance(x, jax.Array) and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    done = [
        np.empty(x.shape, _cast_dtype(x.dtype, dtype)) if by_shard else _cast(jax.device_get(x), dtype)
        for x, by_shard in zip(leaves, streamed, strict=True)
    ]
    shards = ((number, x) for number, (x, by_shard) in enumerate(zip(leaves, streamed, strict=True)) if by_shard)
    pieces = (((number, index), data) for number, x in shards for index, data in _pieces(x))
    for (number, index), data in in_turn(pieces, bytes_in_flight):
        done[number][index] = data
    return done


def in_turn(pieces: Iterable[tuple[Any, Any]], limit: int) -> Iterator[tuple[Any, np.ndarray]]:
    """(name, data) as (name, numpy), in order; each starts as soon as `limit` has room for its bytes."""
    flying: deque[tuple[Any, Any]] = deque()
    total = 0
    for name, data in pieces:
        while flying and total + data.nbytes > limit:
            total -= flying[0][1].nbytes
            yield _land(*flying.popleft())
        data.copy_to_host_async()
        flying.append((name, data))
        total += data.nbytes
        del data
    while flying:
        yield _land(*flying.popleft())


def _land(name: Any, data: Any) -> tuple[Any, np.ndarray]:
    return name, np.asarray(data)


def _pieces(x: jax.Array) -> Iterator[tuple[Index, jax.Array]]:
    """(index, shard) of the shards that make up the array, copies left out."""
    seen = set()
    for shard in x.addressable_shards:
        if x.is_fully_addressable:
            copy = shard.replica_id > 0
        else:  # the first replica may lie elsewhere
            bounds = _bounds(shard.index, x.shape)
            copy = bounds in seen
            seen.add(bounds)
        if not copy:
            yield shard.index, shard.data if shard.device.platform == "cpu" else _apart(shard.data)


def _apart(x: jax.Array) -> jax.Array:
    """The shard as an array of its own, which keeps the copy on the host instead of `x`."""
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, [x])


def is_here(x: jax.Array) -> bool:
    """Whether the devices of this process hold every element."""
    if x.is_fully_addressable:
        return True
    return _all_bounds(x).keys() == {_bounds(shard.index, x.shape) for shard in x.addressable_shards}


def collect(x: jax.Array) -> np.ndarray:
    """The whole array in every process: each sends the shards of which it is the first holder, one at a time."""
    holders = _all_bounds(x)
    queues: list[list[Bounds]] = [[] for _ in range(jax.process_count())]
    for bounds in sorted(holders):
        queues[holders[bounds]].append(bounds)
    mine = {_bounds(shard.index, x.shape): shard.data for shard in x.addressable_shards}
    nothing = np.zeros(x.sharding.shard_shape(x.shape), x.dtype)
    whole = np.empty(x.shape, x.dtype)
    own = queues[jax.process_index()]
    for turn in range(max(map(len, queues))):
        sent = np.asarray(mine[own[turn]]) if turn < len(own) else nothing
        received = multihost_utils.process_allgather(sent)
        for queue, data in zip(queues, received, strict=True):
            if turn < len(queue):
                whole[tuple(slice(*pair) for pair in queue[turn])] = data
    return whole


def _all_bounds(x: jax.Array) -> dict[Bounds, int]:
    """Every distinct shard -> the first process that holds it."""
    first: dict[Bounds, int] = {}
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        bounds, process = _bounds(index or (), x.shape), int(device.process_index)
        first[bounds] = min(first.get(bounds, process), process)
    return first


def _bounds(index: Index, shape: Sequence[int]) -> Bounds:
    return tuple(one.indices(size)[:2] for one, size in zip(index, shape, strict=True))


def _remote_text(named: Sequence[tuple[str, jax.Array]]) -> str:
    lines = []
    for path, x in named:
        here = {_bounds(shard.index, x.shape) for shard in x.addressable_shards}
        away = {bounds: process for bounds, process in _all_bounds(x).items() if bounds not in here}
        count = sum(math.prod(stop - start for start, stop in bounds) for bounds in away)
        lines.append(f"{path} {x.shape}: {count} of {x.size} elements lie on processes {sorted(set(away.values()))}")
    return (
        f"gather: not all is on devices of process {jax.process_index()}:\n" + "\n".join(lines) + "\n"
        'Use remote="collect", in all processes at once; remote="leave" to keep these as jax arrays; or a checkpoint.'
    )


def _cast(x: Any, dtype: Any) -> Any:
    if dtype is None or not isinstance(x, np.ndarray):
        return x
    return x.astype(_cast_dtype(x.dtype, dtype), copy=False)


def _cast_dtype(found: Any, dtype: Any) -> Any:
    return dtype if dtype is not None and jnp.issubdtype(found, jnp.floating) else found
