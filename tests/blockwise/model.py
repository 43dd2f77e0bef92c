"""A model with attention that is written by hand, as other projects have it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

WIDTH, IDS = 32, 64
RULES = [("qkv/kernel", (None, None, "heads", None)), ("out/kernel", ("heads", None, None)), (".*", ())]


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        # Without a bias: a bias of the keys has no gradient but rounding errors.
        self.qkv = nnx.LinearGeneral(WIDTH, (3, 4, 8), use_bias=False, rngs=rngs)
        self.out = nnx.LinearGeneral((4, 8), WIDTH, axis=(-2, -1), rngs=rngs)

    def __call__(self, x: jax.Array, segments: jax.Array | None = None) -> jax.Array:
        q, k, v = jnp.moveaxis(self.qkv(self.norm(x)), -3, 0)
        i = jnp.arange(x.shape[1])
        s = jnp.einsum("bqnh,bknh->bnqk", q, k) / 8**0.5
        s = jnp.where(i[:, None] >= i, s, -1e9)
        if segments is not None:
            s = jnp.where((segments[:, :, None] == segments[:, None])[:, None], s, -1e9)
        return x + self.out(jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(s, -1), v))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(IDS, WIDTH, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, IDS, rngs=rngs)

    def __call__(self, tokens: jax.Array, segments: jax.Array | None = None) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, segments)
        return self.head(x)


def loss_fn(model: Net, batch: Any) -> tuple[jax.Array, int]:
    logits = jax.nn.log_softmax(model(batch["inputs"], batch.get("segments")))
    return -jnp.take_along_axis(logits, batch["targets"][..., None], -1).sum(), batch["targets"].size


def make() -> tuple[Net, nnx.Optimizer]:
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def batch_of(length: int, rows: int = 4, documents: int = 0) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, IDS, (rows, length)).astype(np.int32)
    batch = {"inputs": tokens, "targets": tokens}
    if documents:  # of about the same length in all rows
        batch["segments"] = (np.arange(length) + 7 * np.arange(rows)[:, None]) * documents // length
    return batch
