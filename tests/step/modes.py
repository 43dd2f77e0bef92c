"""The modes of NNX, models of many styles, and a training loop in plain JAX and NNX as the oracle."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from flax_mesh.tree import named_leaves, path_and_start

WIDTH, ROWS, DEPTH, STEPS, MICROBATCHES = 16, 8, 2, 2, 2
OPTIMIZER = optax.sgd(0.1, momentum=0.5)
# Contexts in which everything runs: make(), the loss function, and all functions of flax_mesh.
MODES: dict[str, Callable[[], Any]] = {
    "graph": contextlib.nullcontext,
    "simple_graph": lambda: nnx.set_graph_updates(False),
    "tree": lambda: nnx.set_graph_mode(False),
    "hijax": lambda: nnx.var_defaults(hijax=True),
    "ref": lambda: nnx.var_defaults(ref=True),
    "hijax_ref": lambda: nnx.var_defaults(hijax=True, ref=True),
    "eager_sharding": lambda: nnx.use_eager_sharding(True),
    "no_eager_sharding": lambda: nnx.use_eager_sharding(False),
}


class Count(nnx.Variable):
    """Counts calls."""


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.calls = Count(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        return x + jnp.tanh(self.linear(x)) / self.calls[...]


class Listed(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(DEPTH)])

    def __call__(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Annotated(Listed):
    """Annotations with logical names, which are not names of the mesh."""

    def __init__(self):
        super().__init__()
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(3), kernel_init=init)


class Scanned(nnx.Module):
    """A stack from nnx.vmap, called by nnx.scan."""

    def __init__(self):
        keys = jax.random.split(jax.random.key(0), DEPTH)
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1))
        self.layers = nnx.vmap(lambda key: Layer(nnx.Rngs(key)))(keys)

    def __call__(self, x):
        run = nnx.scan(lambda x, layer: (layer(x), None), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        return run(self.first(x), self.layers)[0]


class TiedVariable(Listed):
    def __init__(self):
        super().__init__()
        self.last = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(2))
        self.last.kernel = self.first.kernel

    def __call__(self, x):
        return self.last(super().__call__(x))


class TiedModule(TiedVariable):
    def __init__(self):
        super().__init__()
        self.last = self.first


class PytreeLayer(nnx.Pytree):
    def __init__(self, rngs: nnx.Rngs):
        self.kernel = nnx.Param(0.3 * jax.random.normal(rngs.params(), (WIDTH, WIDTH)))
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.norm(jnp.tanh(x @ self.kernel))


class PytreeModel(nnx.Pytree):
    """Neither the model nor its layers are an nnx.Module."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([PytreeLayer(rngs) for _ in range(DEPTH)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class SharedPytree(PytreeModel):
    """One layer object several times in a list."""

    def __init__(self):
        layer = PytreeLayer(nnx.Rngs(0))
        self.layers = nnx.List([layer] * DEPTH)


class Attributes(nnx.Module):
    """Layers in a list in an nnx.Dict, arrays as nnx.data, static values, and a tuple of modules."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.parts = nnx.Dict(layers=nnx.List([Layer(rngs) for _ in range(DEPTH)]))
        self.scale = nnx.data(jnp.full((WIDTH,), 0.5))
        self.tables = nnx.data({"shift": np.linspace(-1, 1, WIDTH, dtype=np.float32)})
        self.power = nnx.static(2)
        self.ends = nnx.data((nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)))

    def __call__(self, x):
        x = self.ends[0](x) * self.scale + self.tables["shift"]
        for layer in self.parts["layers"]:
            x = layer(x)
        return self.ends[1](x) ** self.power


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + jnp.tanh(nn.Dense(WIDTH)(x))


class Bridged(nnx.Module):
    def __init__(self):
        blocks = [nnx.bridge.ToNNX(LinenBlock(), rngs=nnx.Rngs(i)) for i in range(DEPTH)]
        self.layers = nnx.List([block.lazy_init(jnp.ones((1, WIDTH))) for block in blocks])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


STYLES: dict[str, type] = {
    "listed": Listed,
    "annotated": Annotated,
    "scanned": Scanned,
    "tied_variable": TiedVariable,
    "tied_module": TiedModule,
    "pytree": PytreeModel,
    "shared_pytree": SharedPytree,
    "attributes": Attributes,
    "linen": Bridged,
}
LAYERS = {"attributes": "parts/layers"}  # the path of the layers where it is not "layers"
SHARING = {"tied_variable", "tied_module", "shared_pytree"}  # models that share Variables
Trajectory = tuple[list[float], list[dict[str, np.ndarray]]]  # losses, and the leaves of the model after every step


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(ROWS, WIDTH)).astype(np.float32) for name in "xy"}


def loss_fn(model: Any, batch: Any) -> tuple[jax.Array, int]:
    return jnp.sum((model(batch["x"]) - batch["y"]) ** 2) / WIDTH, len(batch["x"])


def make_both(style: str) -> tuple[Any, nnx.Optimizer]:
    model = STYLES[style]()
    # In tree mode Flax refuses shared Variables unless the call names the other mode.
    return model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param, graph=True if style in SHARING else None)


def leaves_of(state: Any) -> dict[str, np.ndarray]:
    """Leaves by path, without random streams, and with the chunks of a stack ("from 2") concatenated."""
    found: dict[str, list[np.ndarray]] = {}
    for path, leaf in named_leaves(state):
        if "rngs/" not in path:
            found.setdefault(path_and_start(path)[0], []).append(np.array(leaf))
    return {path: parts[0] if len(parts) == 1 else np.concatenate(parts) for path, parts in found.items()}


@functools.cache
def reference(style: str) -> Trajectory:
    """Two steps on one device in the default mode, in plain JAX, NNX and optax: no function of flax_mesh is called."""
    with nnx.use_eager_sharding(False):
        model = STYLES[style]()
    graphdef, params, others = nnx.split(model, nnx.Param, ...)
    moments = OPTIMIZER.init(params)

    def loss_of(params: Any, others: Any, part: Any) -> Any:
        called = nnx.merge(graphdef, params, others, copy=True)
        loss, weight = loss_fn(called, part)
        return loss, (weight, nnx.state(called, nnx.Not(nnx.Param)))

    @jax.jit
    def step(params: Any, others: Any, moments: Any) -> Any:
        loss, weight, total = 0.0, 0, jax.tree.map(jnp.zeros_like, params)
        for part in range(MICROBATCHES):
            rows = {name: x[part * ROWS // MICROBATCHES :][: ROWS // MICROBATCHES] for name, x in batch().items()}
            (found, (count, others)), grads = jax.value_and_grad(loss_of, has_aux=True)(params, others, rows)
            loss, weight, total = loss + found, weight + count, jax.tree.map(jnp.add, total, grads)
        updates, moments = OPTIMIZER.update(jax.tree.map(lambda g: g / weight, total), moments, params)
        return loss / weight, optax.apply_updates(params, updates), others, moments

    losses, leaves = [], []
    for _ in range(STEPS):
        loss, params, others, moments = step(params, others, moments)
        losses.append(float(loss))
        leaves.append(leaves_of(params) | leaves_of(others))
    return losses, leaves


def assert_equal(found: Trajectory, expected: Trajectory) -> None:
    """Equal losses, parameters and variables. After the first step of SGD the parameters contain the gradients."""
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for have, want in zip(found[1], expected[1], strict=True):
        assert have.keys() == want.keys()
        for path in want:
            most = np.max(np.abs(want[path]), initial=1e-3)
            np.testing.assert_allclose(have[path], want[path], rtol=0, atol=2e-5 * most, err_msg=path)
