"""A small model, batches and builders of pipelines, shared by tests of many folders."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from flax_mesh.models import DecoderConfig
from flax_mesh.mpmd import Pipeline, split_stages
from flax_mesh.mpmd.schedules import make_schedule
from flax_mesh.train import make_train_step
from tests.mpmd.zoo.base import FAST, groups, initial_state

CONFIG = DecoderConfig(
    vocab_size=64, hidden_size=32, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=64
)
PLAIN_SGD = optax.sgd(1.0)  # the step is then the gradient itself


class Net(nnx.Module):
    """An embedding, residual blocks, and the embedding again as the head."""

    def __init__(self, rngs: nnx.Rngs, depth: int = 4):
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(depth)])

    def __call__(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return self.embed.attend(x)


class Stack(Net):
    """The blocks as one scanned stack."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.layers = nnx.vmap(lambda key: nnx.Linear(8, 8, rngs=nnx.Rngs(key)))(jax.random.split(rngs.params(), 4))

    def __call__(self, x):
        x, _ = jax.lax.scan(lambda x, layer: (x + jnp.tanh(layer(x)), None), self.embed(x), self.layers)
        return self.embed.attend(x)


def net_loss(model, batch):
    """Cross-entropy over the targets that are not negative, so the weights of microbatches differ."""
    scores = jax.nn.log_softmax(model(batch["x"]))
    live = batch["y"] >= 0
    picked = jnp.take_along_axis(scores, jnp.maximum(batch["y"], 0)[..., None], -1)[..., 0]
    return -jnp.sum(picked, where=live), jnp.sum(live, dtype=jnp.float32), {"seen": jnp.sum(live)}


def make_net():
    return Net(nnx.Rngs(0))


def make_small():
    """With one layer for each of two stages, which compiles in half the time."""
    return Net(nnx.Rngs(0), 2)


def net_batch(rows, seed=0, length=3):
    rng = np.random.default_rng(seed)
    y = rng.integers(-1, 16, (rows, length)).astype(np.int32)
    y[-1] = -1  # a row of padding
    return {"x": rng.integers(0, 16, (rows, length)).astype(np.int32), "y": y}


def decoder_batch(rows, seed=0):
    rng = np.random.default_rng(seed)
    inputs = rng.integers(0, 64, (rows, 16)).astype(np.int32)
    return {"inputs": inputs, "targets": rng.integers(-1, 64, (rows, 16)).astype(np.int32)}


def build(make, loss_fn, batch, count, optimizer, *, name="1f1b", mesh=None, split=None, **kinds):
    mesh = mesh or groups(pp=2)
    schedule = make_schedule(name, num_groups=mesh.mpmd_dim, num_microbatches=count)
    staged = split_stages(loss_fn, make, batch, mesh=mesh, schedule=schedule, **(split or {}))
    return Pipeline(staged, optimizer, compiler_options=FAST, **kinds)


def build_net(count=2, optimizer: optax.GradientTransformation = PLAIN_SGD, make=make_small, **kinds):
    return build(make, net_loss, net_batch(2 * count), count, optimizer, **kinds)


def plain(make, loss_fn, optimizer, count, layers=("layers",), **kinds):
    """(state, step) on one device."""
    state = initial_state(make, optimizer)
    return state, make_train_step(loss_fn, state, num_microbatches=count, layers=layers, **kinds)
