"""Programs with every kind of body, for rules: each multiplies `x` by `w`, (N, N) arrays, in a body."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

N = 4
X, W = np.random.default_rng(0).normal(size=(2, N, N)).astype(np.float32) / 2
Layer = Callable[[jax.Array, jax.Array], jax.Array]  # (x, w) -> x


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.exp(-jnp.square(x @ w))


@jax.custom_jvp
def doubled(x: jax.Array) -> jax.Array:
    return 2 * jnp.exp(x) - 1


doubled.defjvp(lambda primals, tangents: (doubled(*primals), 3 * tangents[0]))  # a rule of its own: 3


@jax.custom_vjp
def halved(x: jax.Array) -> jax.Array:
    return jnp.exp(x) / 2


halved.defvjp(lambda x: (halved(x), None), lambda _, g: (5 * g,))


def effect(x: jax.Array, w: jax.Array) -> jax.Array:
    """A layer with a callback that the host sees."""
    jax.debug.callback(SEEN.append, x.sum())
    return product(x, w)


SEEN: list[object] = []


def while_(layer: Layer) -> Layer:
    """The loop carries the weight, and its test has a constant."""

    def call(x: jax.Array, w: jax.Array) -> jax.Array:
        most = jnp.argmax(x) * 0 + 2
        start = (0, x, w)
        return lax.while_loop(lambda c: c[0] < most, lambda c: (c[0] + 1, layer(c[1], c[2]), c[2]), start)[1]

    return call


def scan(layer: Layer) -> Layer:
    """The weight is a row, a constant and a part of the carry."""

    def call(x: jax.Array, w: jax.Array) -> jax.Array:
        def step(carry: tuple[jax.Array, jax.Array], row: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            x, same = carry
            return (layer(x, same) + x @ w, same), row

        (x, w), rows = lax.scan(step, (x, w), jnp.stack([w, w]), reverse=True)
        return x + layer(x, w) + rows.sum()

    return call


def branches(layer: Layer) -> Layer:
    return lambda x, w: lax.switch(jnp.argmax(x) % 3, [layer, lambda x, w: x @ w, lambda x, w: x + 1], x, w)


BODIES: dict[str, Callable[[Layer], Layer]] = {  # name -> a layer with the given one in a body of this kind
    "jit": lambda layer: jax.jit(lambda x, w: layer(x, w)),
    "remat": lambda layer: jax.checkpoint(layer),
    "scan": scan,
    "while": while_,
    "cond": branches,
    "custom_jvp": lambda layer: lambda x, w: doubled(layer(x, w)),
    "custom_vjp": lambda layer: lambda x, w: halved(layer(x, w)),
}


def on_devices(mesh: Mesh, layer: Layer) -> Layer:
    """The layer on the rows of each device."""
    return jax.shard_map(layer, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
