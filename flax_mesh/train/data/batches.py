"""A batch is a pure function of (seed, step): no iterator, no state, the same on every mesh and number of processes.

A part of the corpus is cut into windows of sequence_length + 1 tokens; window w starts at w * sequence_length, so every
token but the first is a target exactly once. An epoch visits each window once, in an order that (seed, epoch) alone
decides. Every process reads only the rows and columns its own devices hold.
"""

import functools
import hashlib
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import numpy as np

from flax_mesh.errors import ConfigError
from flax_mesh.train.data.data import DataConfig, Tokens

T = TypeVar("T")
Rows = dict[str, np.ndarray]
BatchFn = Callable[[int], dict[str, jax.Array]]

ALL = slice(None)
INT32_IDS = 2**31
FEISTEL_ROUNDS = 8


def num_windows(part: Tokens, sequence_length: int) -> int:
    """Windows of sequence_length + 1 tokens in a part; neighbours share one token."""
    return max(len(part) - 1, 0) // sequence_length


def num_eval_batches(part: Tokens, config: DataConfig) -> int:
    """Full batches of an evaluation: `config.eval_batches`, or fewer if the part is small. ConfigError if not one."""
    windows = num_windows(part, config.sequence_length)
    if windows < config.batch_size:
        raise ConfigError(
            f"data.held_out: the held-out part has {windows} windows of data.sequence_length {config.sequence_length}, "
            f"one batch needs data.batch_size {config.batch_size}. Raise data.held_out ({config.held_out}), "
            f"give more text, or lower data.batch_size."
        )
    return min(config.eval_batches, windows // config.batch_size)


def permuted(index: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Images of `index`, shape (n,), under a pseudo-random permutation of range(size) that (seed, epoch) decides.

    Needs O(n) time and memory whatever the size. A balanced Feistel network (Luby and Rackoff, 1988) permutes the
    smallest range of 4^h >= size numbers; a number that falls outside `size` is permuted again until it is inside
    (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002), which takes fewer than 4 passes
    on average. The round function is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    shift, mask = np.uint64(half), np.uint64(2**half - 1)
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * FEISTEL_ROUNDS).digest()
    keys = np.frombuffer(digest, "<u8")

    def permute(number: np.ndarray) -> np.ndarray:
        left, right = number >> shift, number & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return left << shift | right

    image = permute(np.asarray(index, np.uint64))
    while (outside := image >= size).any():
        image[outside] = permute(image[outside])
    return image.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def batch_rows(
    part: Tokens,
    seed: int,
    config: DataConfig,
    step: int,
    rows: slice = ALL,
    columns: slice = ALL,
    vocab_size: int | None = None,
) -> Rows:
    """`inputs` and `targets` of one training batch: int32, (batch_size, sequence_length) cut to `rows` and `columns`.

    Row r of step s is sample s * batch_size + r of an endless sequence of epochs; a batch may span several epochs.
    Raises ConfigError if the part is shorter than one window or holds an id outside the vocabulary or int32.
    """
    size = num_windows(part, config.sequence_length)
    if not size:
        window = config.sequence_length + 1
        raise ConfigError(f"data.source: {len(part)} tokens hold no window of data.sequence_length + 1 = {window}.")
    epochs, index = np.divmod(step * config.batch_size + np.arange(config.batch_size)[rows], size)
    windows = np.empty_like(index)
    for epoch in np.unique(epochs):
        windows[epochs == epoch] = permuted(index[epochs == epoch], size, seed, int(epoch))
    return _read(part, windows, config.sequence_length, columns, vocab_size)


def held_out_rows(
    part: Tokens,
    config: DataConfig,
    step: int,
    rows: slice = ALL,
    columns: slice = ALL,
    vocab_size: int | None = None,
) -> Rows:
    """As `batch_rows`, but batch k holds the windows from k * batch_size on, in order; past the end: IndexError."""
    full = num_windows(part, config.sequence_length) // config.batch_size
    if not 0 <= step < full:
        raise IndexError(f"held-out batch {step} was asked for, but the part holds {full} full batches.")
    windows = step * config.batch_size + np.arange(config.batch_size)[rows]
    return _read(part, windows, config.sequence_length, columns, vocab_size)


def make_batch_fn(
    part: Tokens, *, seed: int, config: DataConfig, sharding: jax.sharding.Sharding, vocab_size: int | None = None
) -> BatchFn:
    """A function step -> `batch_rows` as global jax.Arrays; `sharding` may split rows and columns.

    With `vocab_size`, an id the model has no row for is a ConfigError instead of a NaN.
    """
    rows_of = functools.partial(batch_rows, part, seed, config, vocab_size=vocab_size)
    return _make_placed_fn(rows_of, config, sharding)


def make_eval_fn(
    part: Tokens, *, config: DataConfig, sharding: jax.sharding.Sharding, vocab_size: int | None = None
) -> BatchFn:
    """A function k -> `held_out_rows` as global jax.Arrays, for k in range(num_eval_batches(part, config))."""
    num_eval_batches(part, config)  # raises for a part without a single batch
    rows_of = functools.partial(held_out_rows, part, config, vocab_size=vocab_size)
    return _make_placed_fn(rows_of, config, sharding)


def prefetch(fn: Callable[[int], T], start: int, stop: int) -> Generator[tuple[int, T, float], None, None]:
    """(step, fn(step), seconds waited for it) for every step in range(start, stop).

    One background thread, alive from the first `next` to the end or the closing of the generator, makes the next batch
    while the consumer works on this one. An exception of `fn` is raised where its batch would have come.
    """
    if start >= stop:
        return
    with ThreadPoolExecutor(1, thread_name_prefix="flax_mesh_prefetch") as pool:
        pending = pool.submit(fn, start)
        for step in range(start, stop):
            began = time.perf_counter()
            batch = pending.result()
            waited = time.perf_counter() - began
            if step + 1 < stop:
                pending = pool.submit(fn, step + 1)
            yield step, batch, waited


# --- which tokens, on which devices ---


def _read(part: Tokens, windows: np.ndarray, sequence_length: int, columns: slice, vocab_size: int | None) -> Rows:
    first, last, _ = columns.indices(sequence_length)
    tokens = np.empty((len(windows), last - first + 1), part.dtype)  # the last is the last column's target
    for row, start in enumerate(windows * sequence_length):
        tokens[row] = part[start + first : start + last + 1]
    num_ids = min(vocab_size or INT32_IDS, INT32_IDS)
    if tokens.size and (tokens.min() < 0 or tokens.max() >= num_ids):
        wrong = tokens[(tokens < 0) | (tokens >= num_ids)][0]
        raise ConfigError(
            f"data.source: token id {wrong} is outside the vocabulary of {num_ids} ids, 0 to {num_ids - 1}."
        )
    tokens = tokens.astype(np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def _make_placed_fn(rows_of: Callable[..., Rows], config: DataConfig, sharding: jax.sharding.Sharding) -> BatchFn:
    shape = config.batch_size, config.sequence_length
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        sizes = f"data.batch_size = {shape[0]} by data.sequence_length = {shape[1]}"
        raise ConfigError(f"{sizes} cannot be cut evenly over the mesh: {error}") from error

    def batch_fn(step: int) -> dict[str, jax.Array]:
        @functools.cache  # one read for inputs and targets, and for all devices that hold a copy of the same piece
        def read(rows: tuple[int, int], columns: tuple[int, int]) -> Rows:
            return rows_of(step, slice(*rows), slice(*columns))

        def piece(name: str, index: Any) -> np.ndarray:  # index: one slice for each dim
            rows, columns = (cut.indices(size)[:2] for cut, size in zip(index, shape, strict=True))
            return read(rows, columns)[name]

        return {
            # dtype: a process without a shard of the batch cannot infer it
            name: jax.make_array_from_callback(shape, sharding, functools.partial(piece, name), dtype=np.int32)
            for name in ("inputs", "targets")
        }

    return batch_fn
