"""A small model with dropout and BatchNorm, and its train state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from flax_mesh import abstract_state, create_mesh
from flax_mesh.train import abstract_train_state, init_train_state, make_train_step

RULES = [("kernel$", ("embed", "mlp")), (".*", ())]


class Net(nnx.Module):
    """A model with dropout and, optionally, BatchNorm. `seen` counts its calls."""

    def __init__(self, rngs: nnx.Rngs, rate: float = 0.0, norm: bool = False):
        self.layers = nnx.List([nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)])
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs) if norm else None
        self.seen = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        h = self.layers[0](x)
        h = self.norm(h) if self.norm else h
        self.seen[...] += 1
        return self.layers[1](self.drop(jnp.tanh(h)))


@functools.cache
def make(optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)), **kinds):  # noqa: B008
    def create():
        model = Net(nnx.Rngs(0), **kinds)
        return model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    return create


def start(maker, mesh=None):
    """The initial state, as arrays of its own: a step donates them."""
    state = _initial(maker, mesh)
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False), state)


def layout(maker, mesh=None):
    """The abstract state, for steps that are only traced."""
    return abstract_train_state(maker, _abstract(maker, mesh))


@functools.cache
def _initial(maker, mesh):
    return init_train_state(maker, _abstract(maker, mesh))


def _abstract(maker, mesh):
    mesh = mesh or create_mesh((1,), ("fsdp",), devices=jax.devices()[:1])
    return abstract_state(maker, mesh, RULES if "tp" in mesh.axis_names else [(".*", ())])


def batch(rows=16, seed=0, live=None):
    rng = np.random.default_rng(seed)
    weights = rng.integers(0, 2, (rows,)).astype(np.float32) if live is None else live
    return {"x": rng.normal(size=(rows, 8)).astype(np.float32), "w": weights}


def run(loss_fn, state, batches, **kinds):
    """(state, rows of metrics) after one step per batch. No step transfers an array implicitly."""
    step = make_train_step(loss_fn, state, **kinds)
    rows = []
    for b in batches:
        with jax.transfer_guard("disallow"):
            state, metrics = step(state, b)
        rows.append({k: np.asarray(v) for k, v in metrics.items()})
    return state, rows
