"""Attentions as functions of queries, keys, values and more, with the mask that a kernel's line has; 128 elements."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from tests.blockwise.compare import apart, gradients
from tests.blockwise.programs import by_hand

LENGTH = 128


def cast(args, dtype):
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, args)


def operands(heads=2, kv_heads=2, length=LENGTH):
    random = np.random.default_rng(0)
    return tuple(random.normal(size=(2, length, n, 8)).astype(np.float32) for n in (heads, kv_heads, kv_heads))


def distance(s):
    return jnp.arange(s.shape[-2])[:, None] - jnp.arange(s.shape[-1])


def masked(see: Callable[..., Any], low: float = -1e30) -> Callable[[Any], Any]:
    """The function of scores that hides the keys that a query does not see, by its distance to them."""
    return lambda s: jnp.where(see(distance(s)), s, low)


def with_scores(change: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda q, k, v: by_hand(q, k, v, change)


def documents(q, k, v, ids):
    same = ids[:, None, :, None] == ids[:, None, None, :]
    return by_hand(q, k, v, lambda s: masked(lambda d: d >= 0)(jnp.where(same, s, -1e30)))


def grouped(q, k, v):
    q, rows = q.reshape(*q.shape[:2], 2, 2, 8), q.shape[1]
    s = jnp.einsum("bqkgh,bskh->bkgqs", q, k).astype(jnp.float32) * 0.3
    p = jax.nn.softmax(masked(lambda d: d >= 0)(s), -1).astype(q.dtype)
    return jnp.einsum("bkgqs,bskh->bqkgh", p, v).reshape(-1, rows, 4, 8)


def by_lengths(low: float) -> Callable[..., Any]:
    def fn(q, k, v, lengths):
        keep = jnp.arange(k.shape[1]) < lengths[:, None]
        return by_hand(q, k, v, lambda s: jnp.where((distance(s) >= 0) & keep[:, None, None], s, low))

    return fn


def padded(q, k, v, ids):
    """Queries and keys without an id are left out, and those in the window of a query may all be."""
    mask = nnx.make_attention_mask(ids > 0, ids > 0, dtype=bool)
    return by_hand(q, k, v, lambda s: jnp.where(mask & masked_window(s), s, jnp.finfo(s.dtype).min))


def masked_window(s):
    return (distance(s) >= 0) & (distance(s) < 20)


def with_sinks(sinks: Callable[..., Any]) -> Callable[..., Any]:
    """Grouped queries whose scores are joined with `sinks(w, scores)` and masked by padding at the right."""

    def fn(q, k, v, w, lengths):
        s = jnp.einsum("bqkgh,bskh->bkgqs", q.reshape(2, -1, 2, 2, 8), k).astype(jnp.float32) * 0.3
        s = jnp.where((jnp.arange(LENGTH) < lengths[:, None])[:, None, None, None], masked(lambda d: d >= 0)(s), -1e9)
        p = jax.nn.softmax(jnp.concatenate([s, *sinks(w.astype(s.dtype), s)], -1), -1)[..., :LENGTH]
        return jnp.einsum("bkgqs,bskh->bqkgh", p.astype(q.dtype), v).reshape(2, -1, 4, 8)

    return fn


def per_head(w, s):
    return [jnp.broadcast_to(w.reshape(2, 2, 1, 1), (*s.shape[:-1], 1))]


IDS = np.asarray([[0] * 50 + [1] * 78, [3] * 100 + [1] * 28])
HOLES = np.asarray([[0] * 40 + [1] * 88, [1] * 30 + [0] * 60 + [1] * 38])
LENGTHS = np.asarray([77, 0], np.int32)
SINKS = (*operands(4, 2), np.asarray([0.3, -1, 2, 3], np.float32), LENGTHS)
# name -> (the function of queries, keys, values, ..., its arguments, the mask in the line)
CASES = {
    "every key": (by_hand, operands(), "every key"),
    "causal": (with_scores(masked(lambda d: d >= 0)), operands(), "causal"),
    "window": (with_scores(masked(lambda d: (d >= 0) & (d < 20))), operands(), "causal in a window of 20"),
    "both sides": (with_scores(masked(lambda d: abs(d) < 9)), operands(), "keys 8 before to 8 after"),
    "soft cap": (
        with_scores(lambda s: masked(lambda d: d >= 0)(5 * jnp.tanh(s / 5))),
        operands(),
        "causal, capped at 5",
    ),
    "documents": (documents, (*operands(), IDS), "causal, within documents"),
    "grouped": (grouped, operands(4, 2), "causal"),
    "lengths": (by_lengths(-1e9), (*operands(), LENGTHS), "causal, keys by lengths"),
    "padding": (padded, (*operands(), HOLES), "causal in a window of 20, padded queries, keys by a mask"),
    "sinks": (with_sinks(per_head), SINKS, "causal, a sink, keys by lengths"),
}


def assert_near(fn, kernel, args):
    written, found = gradients(fn, args)[0], gradients(kernel, args)[0]
    with jax.enable_x64(True):
        exact = gradients(fn, cast(args, jnp.float64))[0]
    assert apart(found, exact) <= 2 * apart(written, exact)


def mesh_of(platform, **sizes):
    """Without devices."""
    device = AbstractDevice(platform, None, platform) if platform else None
    return AbstractMesh((*sizes.values(),), (*sizes,), (AxisType.Auto,) * len(sizes), abstract_device=device)
