"""Batches as a pure function of (seed, step): no iterator state, and the same on every mesh and number of processes.

A part of the corpus is divided into windows of sequence_length + 1 tokens. Window w starts at w * sequence_length, so
every token except the first is a target exactly once:

    tokens    t0 t1 t2 t3 t4 t5 t6      sequence_length = 3
    window 0  t0 t1 t2 t3               inputs t0 t1 t2, targets t1 t2 t3
    window 1           t3 t4 t5 t6      inputs t3 t4 t5, targets t4 t5 t6

An epoch visits every window once, in an order that depends on (seed, epoch) only. A process reads only the rows and
columns of its local devices.
"""

import functools
import hashlib
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import jax
import numpy as np

from flax_mesh.data.config import DataConfig
from flax_mesh.data.corpus import Tokens, check_sizes
from flax_mesh.errors import ConfigError
from flax_mesh.modes import array_from

T = TypeVar("T")
Rows = dict[str, np.ndarray]
BatchFn = Callable[[int], dict[str, jax.Array]]

ALL = slice(None)
INT32_IDS = 2**31
FEISTEL_ROUNDS = 8


def num_windows(part: Tokens, sequence_length: int) -> int:
    """Number of windows of sequence_length + 1 tokens in a part. Adjacent windows share one token."""
    return max(len(part) - 1, 0) // sequence_length


def num_eval_batches(part: Tokens, config: DataConfig) -> int:
    """Number of full batches of an evaluation: at most `config.eval_batches`. Raises ConfigError if there is none."""
    windows = num_windows(part, config.sequence_length)
    if windows < config.batch_size:
        raise ConfigError(
            f"data.held_out: the held-out part has {windows} windows of data.sequence_length {config.sequence_length}, "
            f"one batch requires data.batch_size {config.batch_size}. Raise data.held_out ({config.held_out}), "
            f"use more text, or lower data.batch_size."
        )
    return min(config.eval_batches, windows // config.batch_size)


def permuted(index: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Apply a pseudo-random permutation of range(size), determined by (seed, epoch), to `index` of shape (n,).

    Takes O(n) time and memory for any size: a step permutes its rows, not the epoch. A balanced Feistel network
    (Luby and Rackoff, 1988) permutes the smallest range of 4^h >= size numbers. A result that is not below `size` is
    permuted again until it is (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002), which
    takes fewer than 4 passes on average. The round function is the finalizer of SplitMix64 (Steele, Lea and Flood,
    2014).
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


def sample_rows(samples: np.ndarray, size: int, seed: int) -> np.ndarray:
    """The rows, of `size`, of these samples of an endless sequence of epochs, each a permutation of all rows."""
    epochs, index = np.divmod(samples, size)
    rows = np.empty_like(index)
    for epoch in np.unique(epochs):
        rows[epochs == epoch] = permuted(index[epochs == epoch], size, seed, int(epoch))
    return rows


def batch_rows(
    part: Tokens,
    seed: int,
    config: DataConfig,
    step: int,
    rows: slice = ALL,
    columns: slice = ALL,
    vocab_size: int | None = None,
) -> Rows:
    """The "inputs" and "targets" of one training batch: int32, (batch_size, sequence_length)[rows, columns].

    Row r of step s is sample s * batch_size + r of an endless sequence of epochs; a batch may span several epochs.
    Raises ConfigError if the part is shorter than one window, or if a token id is outside the vocabulary or int32.
    """
    size = num_windows(part, config.sequence_length)
    if not size:
        window = config.sequence_length + 1
        raise ConfigError(
            f"data.source: {len(part)} tokens are fewer than one window of data.sequence_length + 1 = {window}."
        )
    samples = step * config.batch_size + np.arange(config.batch_size)[rows]
    windows = sample_rows(samples, size, seed)
    return _read(part, windows, config.sequence_length, columns, vocab_size)


def held_out_rows(
    part: Tokens,
    config: DataConfig,
    step: int,
    rows: slice = ALL,
    columns: slice = ALL,
    vocab_size: int | None = None,
) -> Rows:
    """As `batch_rows`, but batch k contains the windows from k * batch_size on, in order. IndexError past the end."""
    full = num_windows(part, config.sequence_length) // config.batch_size
    if not 0 <= step < full:
        raise IndexError(f"held-out batch must be in range({full}), the number of full batches; got {step}")
    windows = step * config.batch_size + np.arange(config.batch_size)[rows]
    return _read(part, windows, config.sequence_length, columns, vocab_size)


def make_batch_fn(
    part: Tokens, *, seed: int, config: DataConfig, sharding: jax.sharding.Sharding, vocab_size: int | None = None
) -> BatchFn:
    """Return a function step -> `batch_rows` as global `jax.Array`s. `sharding` may split rows and columns.

    With `vocab_size`, a token id outside the vocabulary raises ConfigError; otherwise the loss would be NaN.
    """
    rows_of = functools.partial(batch_rows, part, seed, config, vocab_size=vocab_size)
    return _make_placed_fn(rows_of, config, sharding)


def make_eval_fn(
    part: Tokens, *, config: DataConfig, sharding: jax.sharding.Sharding, vocab_size: int | None = None
) -> BatchFn:
    """Return a function k -> `held_out_rows` as global `jax.Array`s, for k in range(num_eval_batches(part, config))."""
    num_eval_batches(part, config)  # raises without a full batch
    rows_of = functools.partial(held_out_rows, part, config, vocab_size=vocab_size)
    return _make_placed_fn(rows_of, config, sharding)


def prefetch(fn: Callable[[int], T], start: int, stop: int) -> Generator[tuple[int, T, float], None, None]:
    """Yield (step, fn(step), seconds waited for it) for every step in range(start, stop).

    A background thread computes the next batch while the consumer processes the current one. It ends with the
    generator. An exception of `fn` is raised when its batch is requested.
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


# --- reading tokens and placing them on devices ---


def _read(part: Tokens, windows: np.ndarray, sequence_length: int, columns: slice, vocab_size: int | None) -> Rows:
    check_sizes(part)
    first, last, _ = columns.indices(sequence_length)
    tokens = np.empty((len(windows), last - first + 1), part.dtype)  # one more than inputs: the last target
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
        raise ConfigError(f"{sizes} is not evenly divisible over the mesh: {error}") from error

    def batch_fn(step: int) -> dict[str, jax.Array]:
        @functools.cache  # inputs and targets, and all devices with the same shard, share one read
        def read(rows: tuple[int, int], columns: tuple[int, int]) -> Rows:
            return rows_of(step, slice(*rows), slice(*columns))

        def shard(name: str, index: tuple[slice, ...]) -> np.ndarray:  # index: one slice per dim
            rows, columns = (dim.indices(size)[:2] for dim, size in zip(index, shape, strict=True))
            return read(rows, columns)[name]

        return {
            name: array_from(shape, sharding, functools.partial(shard, name), np.int32)
            for name in ("inputs", "targets")
        }

    return batch_fn
