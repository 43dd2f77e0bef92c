"""An initializer whose bits depend neither on the compiler nor on the mesh, and that compiles fast; parts of layers."""

import math

import jax
import jax.numpy as jnp


def hashed_uniform(key: jax.Array, shape: tuple[int, ...], dtype=jnp.float32) -> jax.Array:
    """Pseudorandom multiples of a power of two: rounding them to int8 results in the same integers everywhere."""
    start = jax.random.key_data(key)[-1]
    hashed = (start + jnp.arange(math.prod(shape), dtype=jnp.uint32)) * jnp.uint32(2654435761)
    centered = (hashed >> 24).astype(jnp.float32) - 127.5
    # The standard deviation is at most the inverse root of the fan-in.
    scale = 2.0 ** math.floor(math.log2(3 / math.prod(shape[:-1])) / 2)
    return (centered * (scale / 128)).reshape(shape).astype(dtype)


def rms_norm(x, scale):
    """With Flax's epsilon of 1e-6, gradients of different meshes would differ by 1e-5 in float32."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-2) * scale


def attend(q, k, v, mask):
    """Attention of heads (batch, length, heads, dim), with a mask (batch, queries, keys)."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e9))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def rotate(x, positions):
    angles = positions[..., None, None] / 100 ** (jnp.arange(x.shape[-1] // 2) / (x.shape[-1] // 2))
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)], -1)
