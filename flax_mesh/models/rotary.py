"""Rotary position embedding (Su et al. 2021), and its scaling for longer contexts than in training.

Shape letters: B batch, S sequence, H heads, C head dim, or half of it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class RopeScaling(NamedTuple):
    """Scaling of rotary frequencies for longer contexts than in training, as in Llama 3.1; `factor` 1 is no scaling.

    A frequency with fewer than `low_frequency_factor` periods in `original_length` positions is divided by `factor`;
    one with more than `high_frequency_factor` periods is unchanged; between them it is interpolated linearly in the
    number of periods (`apply_scaling` in Meta's reference code of Llama 3.1; "llama3" in transformers).
    """

    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int = 8192


def rotate(
    x_BSHC: jax.Array,
    theta: float,
    scaling: RopeScaling = RopeScaling(),  # noqa: B008
    positions: jax.Array | None = None,
) -> jax.Array:
    """Rotate the pairs (i, i + C/2) of the last dim by the position; angles in float32.

    `positions` are those of all rows, (S,), or of each, (B, S); by default 0 to S - 1.
    """
    half = x_BSHC.shape[-1] // 2
    frequency_C = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling.factor != 1:
        periods_C = scaling.original_length * frequency_C / (2 * jnp.pi)
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        unscaled_C = jnp.clip((periods_C - low) / (high - low), 0, 1)  # 1: the frequency is unchanged
        frequency_C = frequency_C * (unscaled_C + (1 - unscaled_C) / scaling.factor)
    positions = jnp.arange(x_BSHC.shape[1]) if positions is None else positions
    angle_SC = positions.astype(jnp.float32)[..., None] * frequency_C
    cos, sin = jnp.cos(angle_SC)[..., None, :], jnp.sin(angle_SC)[..., None, :]
    a, b = jnp.split(x_BSHC.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BSHC.dtype)
