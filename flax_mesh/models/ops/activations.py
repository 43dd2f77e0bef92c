"""The gated activations of an MLP: the input of its down projection, from its gate and up projections."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
SWIGLU_ALPHA = 1.702  # of the sigmoid in the clamped SwiGLU of gpt-oss


def activated(gate: jax.Array, activation: str = "silu", limit: float = 0.0) -> jax.Array:
    """The factor of the gate; with a `limit`, the clamped SwiGLU of gpt-oss."""
    if not limit:
        return ACTIVATIONS[activation](gate)
    gate = jnp.minimum(gate, limit)
    return gate * jax.nn.sigmoid(SWIGLU_ALPHA * gate)


def shifted(up: jax.Array, limit: float = 0.0) -> jax.Array:
    """The other factor: the up projection, which the clamped SwiGLU limits and shifts by 1."""
    return jnp.clip(up, -limit, limit) + 1 if limit else up
