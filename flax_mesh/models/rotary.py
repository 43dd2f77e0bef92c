"""Rotary positions (Su et al. 2021), and their scaling for contexts longer than those trained on.

Shape letters: B batch, S sequence, H heads, C head dim, or half of it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class RopeScaling(NamedTuple):
    """Rotary frequencies for contexts longer than those trained on, as of Llama 3.1; `factor` 1 changes nothing.

    A wave that turns fewer than `low_frequency_factor` times in `original_length` positions is made `factor` times
    longer, one that turns more than `high_frequency_factor` times stays; between them the frequency is interpolated
    by the number of turns (`apply_scaling` in Meta's reference code of Llama 3.1; "llama3" in transformers).
    """

    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int = 8192


def rotate(x_BSHC: jax.Array, theta: float, scaling: RopeScaling = RopeScaling()) -> jax.Array:  # noqa: B008
    """Rotary position embedding (Su et al. 2021) on halves of the last dim; angles in float32."""
    half = x_BSHC.shape[-1] // 2
    frequency_C = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling.factor != 1:
        turns_C = scaling.original_length * frequency_C / (2 * jnp.pi)
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        kept_C = jnp.clip((turns_C - low) / (high - low), 0, 1)  # 1: the frequency stays
        frequency_C = frequency_C * (kept_C + (1 - kept_C) / scaling.factor)
    angle_SC = jnp.arange(x_BSHC.shape[1], dtype=jnp.float32)[:, None] * frequency_C
    cos, sin = jnp.cos(angle_SC)[:, None, :], jnp.sin(angle_SC)[:, None, :]
    a, b = jnp.split(x_BSHC.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BSHC.dtype)


def scaling_problems(scaling: RopeScaling) -> list[str]:
    """What is wrong with the settings of a decoder that the scaling is made of, one line each."""
    factor, low, high, length = scaling
    found = []
    if not factor >= 1:
        found.append(f"model.rope_factor must be at least 1 (1: no scaling), got {factor}")
    if not 0 < low < high:
        found.append(
            "model.rope_low_frequency_factor must be above 0 and below model.rope_high_frequency_factor, "
            f"got {low} and {high}"
        )
    if length < 1:
        found.append(f"model.rope_original_length must be at least 1, got {length}")
    return found
