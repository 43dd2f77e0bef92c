"""Queries in head-tail order: each of n devices has chunks d and 2n - 1 - d of 2n equal ones.

With a causal mask the last of n devices computes 2 - 1/n times the mean if queries are split in order, and as many
scores as every other one in head-tail order. Rows are exchanged before an attention, and its result is given back.
"""

# JAX has no types for some functions.
# pyright: reportUnknownMemberType=false

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flax_mesh.axes import Axes
from flax_mesh.kernels import Band

# Scores per query that an exchange must save on the device with most of them. A training step moves about five rows
# of C numbers per query (queries, results and their gradients): 10 C bytes take 0.11 C ns at 90 GB/s, as long as
# 14 C operations for each of about 500 scores at 60 TFLOP/s.
EXCHANGE = 512


class Work(NamedTuple):
    """Scores that each device computes, for one row of the batch and one head."""

    in_order: np.ndarray
    exchanged: np.ndarray

    def saves(self, queries: int) -> bool:
        """Whether an exchange is worth its time; `queries` are those of one device."""
        return is_worth(self.in_order.max() / queries, self.exchanged.max() / queries)

    def text(self, scores: int) -> str:
        """`scores` are those of a block."""
        most, before = (int(x.max()) // scores for x in (self.exchanged, self.in_order))
        return f" in head-tail order, at most {most} blocks on a device ({before} in order)"


def is_worth(before: float, after: float) -> bool:
    """Whether an exchange is worth its time, from the scores per query on the device with most of them."""
    return bool(before - after >= EXCHANGE)


def work_of(pieces: np.ndarray, parts: int) -> Work:
    """`pieces`: the scores of equal consecutive pieces of the queries, an even number for each of `parts` devices."""
    chunks = pieces.reshape(2 * parts, -1).sum(1)
    return Work(chunks.reshape(parts, 2).sum(1), (chunks + chunks[::-1])[:parts])


def work_of_band(length: int, band: Band, block: int, parts: int) -> Work:
    """Of a kernel that computes every block of `block` queries and keys of which its mask leaves an element."""
    first, (left, right) = np.arange(0, length, block), band
    low = np.zeros_like(first) if left is None else np.maximum(first - left, 0)
    high = np.full_like(first, length - 1) if right is None else np.minimum(first + block - 1 + right, length - 1)
    return work_of((high // block - low // block + 1) * block**2, parts)


def head_tail(parts: int) -> tuple[int, ...]:
    """The chunks of all devices, two each: the one with an even number comes first, whether it is the head or not.

    In order, the first chunk of each device is even too: so each half of the rows moves by one permutation of devices.

    >>> head_tail(2)
    (0, 3, 2, 1)
    """
    return tuple(c for d in range(parts) for c in sorted((d, 2 * parts - 1 - d), key=lambda c: c % 2))


def exchange(x: jax.Array, dim: int, names: Axes, parts: int, *, back: bool = False) -> jax.Array:
    """The rows that this device has in head-tail order, from those in order, or `back`; inside of a shard_map."""
    device_of = {c: n // 2 for n, c in enumerate(head_tail(parts))}
    ordered = tuple(name for name in jax.sharding.get_abstract_mesh().axis_names if name in names)
    # ppermute counts the devices along the axes in the order of the mesh, and parts are in the order of `names`.
    grid = np.arange(parts).reshape([lax.axis_size(name) for name in ordered])
    place = grid.transpose([ordered.index(name) for name in names]).ravel().tolist()
    halves: list[jax.Array] = []
    for n, half in enumerate(jnp.split(x, 2, dim)):
        pairs = [(place[d], place[device_of[2 * d + n]]) for d in range(parts)]
        pairs = [(b, a) for a, b in pairs] if back else pairs
        halves.append(lax.ppermute(after(half, halves), ordered, pairs))
    return jnp.concatenate(halves, dim)


def after(x: jax.Array, done: Sequence[jax.Array]) -> jax.Array:
    """`x`, for a collective operation that starts after those with the results `done`."""
    return lax.optimization_barrier((x, *done))[0] if done else x
