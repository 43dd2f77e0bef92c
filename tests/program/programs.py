"""Programs with every kind of body, for rules: each multiplies `x` (N, N) by layers of `w` (2, N, N) in a body."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

N = 4
X, *W = np.random.default_rng(0).normal(size=(3, N, N)).astype(np.float32) / 2
W = np.stack(W)
Layer = Callable[[jax.Array, jax.Array], jax.Array]  # (x, w) -> x


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.exp(-jnp.square(x @ w[0]))


def custom_jvp(layer: Layer) -> Layer:
    """With a derivative of its own: 3."""
    call = jax.custom_jvp(layer)
    call.defjvp(lambda primals, tangents: (call(*primals), 3 * tangents[0]))
    return call


def custom_vjp(layer: Layer) -> Layer:
    """With a derivative of its own: 5, and none of the weight."""
    call = jax.custom_vjp(layer)
    call.defvjp(lambda x, w: (call(x, w), w), lambda w, g: (5 * g, 0 * w))
    return call


def effect(x: jax.Array, w: jax.Array) -> jax.Array:
    jax.debug.callback(print, x.sum())
    return product(x, w)


def while_(layer: Layer) -> Layer:
    """The loop carries the weight, and its test has a constant."""

    def call(x: jax.Array, w: jax.Array) -> jax.Array:
        most = (x.sum() > 0).astype(jnp.int32) + 1
        start = (0, x, w)
        return lax.while_loop(lambda c: c[0] < most, lambda c: (c[0] + 1, layer(c[1], c[2]), c[2]), start)[1]

    return call


def scan(layer: Layer) -> Layer:
    """The weight is a row, a constant and a part of the carry."""

    def call(x: jax.Array, w: jax.Array) -> jax.Array:
        def step(carry: tuple[jax.Array, jax.Array], row: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            x, same = carry
            return (layer(x, same) + x @ row + x @ w[1], same), row

        (x, same), rows = lax.scan(step, (x, w), w, reverse=True)
        return layer(x, same) + x @ rows[1]

    return call


def branches(layer: Layer) -> Layer:
    return lambda x, w: lax.switch((x.sum() > 0) * 1, [lambda x, w: x @ w[1], layer], x, w)


BODIES: dict[str, Callable[[Layer], Layer]] = {  # name -> a layer with the given one in a body of this kind
    "jit": lambda layer: jax.jit(lambda x, w: layer(x, w)),
    "remat": lambda layer: jax.checkpoint(layer),
    "scan": scan,
    "while": while_,
    "cond": branches,
    "custom_jvp": custom_jvp,
    "custom_vjp": custom_vjp,
}


def on_devices(mesh: Mesh, layer: Layer) -> Layer:
    """The layer on the rows of each device."""
    return jax.shard_map(layer, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
