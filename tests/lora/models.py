"""Models that use their weights in all the ways that adapters know, with the patterns of the weights to adapt."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss

WIDTH = 8


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(WIDTH, 24, rngs=rngs), nnx.Linear(24, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.silu(self.up(x)))


class Weights(nnx.Module):
    """Every kind of product, with the weight as the left or the right operand."""

    def __init__(self, rngs: nnx.Rngs):
        rng = np.random.default_rng(0)
        draw = lambda *shape: nnx.Param(jnp.asarray(rng.normal(size=shape) / 3, jnp.float32))  # noqa: E731
        self.plain, self.left, self.back = draw(WIDTH, 12), draw(10, 12), draw(6, 5, WIDTH)
        self.heads, self.experts = draw(3, WIDTH, 4), draw(3, 4, 4)
        self.dense, self.einsum = (
            nnx.LinearGeneral(10, (6, 5), rngs=rngs),
            nnx.Einsum("hk,hkd->hd", (3, 4, 2), rngs=rngs),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jnp.tanh(x @ self.plain[...])
        y = jnp.swapaxes(self.left[...] @ jnp.swapaxes(y, -1, -2), -1, -2)
        y = jnp.einsum("bshk,hkd->bsd", self.dense(y), self.back)
        heads = jnp.einsum("bsd,hdk->bhsk", y, self.heads[...].astype(jnp.float32))
        heads = jnp.einsum("bhsk,hkl->bshl", heads, self.experts[...])
        return y.mean() + jax.vmap(jax.vmap(self.einsum))(heads).mean()


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.attention(x)


class Listed(nnx.Module):
    """A list of layers under remat and jit, one of which is called twice."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([Mlp(rngs) for _ in range(3)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in (*self.layers, self.layers[0]):
            x = nnx.remat(lambda layer, x: layer(x))(layer, x)
        return x


class Scanned(nnx.Module):
    """A scanned stack whose loop runs twice: the second one reads the result of the first one."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.split_rngs(splits=3)(nnx.vmap(Mlp, in_axes=0, out_axes=0))(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)
        return x


class Unrolled(nnx.Module):
    """A stack whose layers are selected one by one, split in parts for two loops, and paired for a third one."""

    def __init__(self, rngs: nnx.Rngs):
        self.kernel = nnx.Param(jnp.asarray(np.random.default_rng(0).normal(size=(3, WIDTH, WIDTH)) / 3, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(3):
            x = jnp.tanh(x @ self.kernel[i])
        for part in jax.lax.split(self.kernel[...], (1, 2)):
            x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, part)
        pairs = self.kernel[1:].reshape(1, 2, WIDTH, WIDTH)
        return jax.lax.scan(lambda x, two: (jnp.tanh(jnp.sin(x @ two[0]) @ two[1]), None), x, pairs)[0]


class Branches(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.one, self.two = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        one, two = self.one.kernel[...], self.two.kernel[...]
        return jax.lax.cond(x.sum() > 0, lambda x: x @ one, lambda x: jax.checkpoint(jnp.matmul)(x, two), x)


@jax.custom_vjp
def rounded(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.einsum("bsd,de->bse", x, w)


rounded.defvjp(
    lambda x, w: (rounded(x, w), (x, w)), lambda saved, g: (g @ saved[1].T, jnp.einsum("bsd,bse->de", saved[0], g))
)


class Custom(nnx.Module):
    """A product with a custom derivative, statistics that the call changes, and dropout."""

    def __init__(self, rngs: nnx.Rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)))
        self.norm, self.drop = nnx.BatchNorm(WIDTH, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(self.norm(rounded(x, self.kernel[...])))


def loss_fn(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.sin(model(x)))


def decoder(**more: Any) -> Any:
    config = DecoderConfig(
        vocab_size=32, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, mlp_size=24, **more
    )
    return functools.partial(make_decoder, config)


DELTA = {"delta_key_heads": 2, "delta_value_heads": 4, "delta_key_dim": 4, "delta_value_dim": 4, "delta_conv": 3}
X = np.random.default_rng(1).normal(size=(2, 4, WIDTH)).astype(np.float32)
TOKENS = {
    name: np.random.default_rng(at).integers(0, 32, (4, 8), np.int32) for at, name in enumerate(("inputs", "targets"))
}
# name -> (constructor, loss, batch, patterns, paths of adapted weights)
CASES: dict[str, tuple[Any, Any, Any, Any]] = {
    "products": (Weights, loss_fn, X, ("plain", "left", "back", "heads", "experts", "dense/kernel", "einsum")),
    "attention": (Attention, loss_fn, X, "attention/(query|value|out)/kernel"),
    "list": (Listed, loss_fn, X, "layers/.*kernel"),
    "stack": (Scanned, loss_fn, X, "layers"),
    "parts of a stack": (Unrolled, loss_fn, X, "kernel"),
    "custom": (Custom, loss_fn, X, "^kernel"),
    "branches": (Branches, loss_fn, X, "kernel"),
    "decoder": (decoder(), next_token_loss, TOKENS, "(q|v|o|up|down|gate)/kernel"),
    "delta nets": (
        decoder(layer_pattern="delta,global", attention_gate=True, **DELTA),
        next_token_loss,
        TOKENS,
        "(attention|delta)/.*kernel",
    ),
    "scanned decoder": (decoder(scan=True, remat="full"), next_token_loss, TOKENS, "(q|v|o|up|down|gate)/kernel"),
}
