"""Rotary position embedding (Su et al. 2021), and its scaling for longer contexts than in training.

Shape letters: B batch, S sequence, H heads, C rotated dims of a head, or half of them.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

KINDS = ("llama3", "linear", "yarn", "longrope")


class RopeScaling(NamedTuple):
    """Scaling of rotary frequencies for longer contexts than in training; `factor` 1 disables it.

    llama3    A frequency with fewer than `low_frequency_factor` periods in `original_length` positions is divided by
              `factor`; one with more than `high_frequency_factor` periods is unchanged; between them it is interpolated
              linearly in the number of periods (`apply_scaling` in Meta's reference code of Llama 3.1).
    linear    Every frequency is divided by `factor` (Chen et al. 2023).
    yarn      As llama3, but interpolated linearly in the index of the frequency (Peng et al. 2023). Both factors are
              the paper's beta_slow and beta_fast; with `truncate` the ends of the interpolation are integers.
    longrope  Every frequency is divided by a separate factor: `short_factors` in sequences of at most
              `original_length` positions, `long_factors` in longer ones (Ding et al. 2024).

    yarn and longrope multiply the rotated queries and keys by `attention_factor`; 0 stands for the factor of the
    papers. With `mscale` and `mscale_all_dims` the factor of yarn is a quotient of two, of which the scores are
    multiplied by the square of the second (DeepSeek); see `score_multiplier`.
    """

    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int = 8192
    kind: str = "llama3"
    attention_factor: float = 0.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    mscale: float = 0.0
    mscale_all_dims: float = 0.0

    def multiplier(self) -> float:
        """Of the rotated queries and keys."""
        if self.kind not in ("yarn", "longrope") or self.factor <= 1:
            return self.attention_factor or 1.0
        of_paper = self._yarn(1.0)
        if self.mscale and self.mscale_all_dims:
            of_paper = self._yarn(self.mscale) / self._yarn(self.mscale_all_dims)
        if self.kind == "longrope":
            of_paper = math.sqrt(1 + math.log(self.factor) / math.log(self.original_length))
        return self.attention_factor or of_paper

    def score_multiplier(self) -> float:
        """Of the scores of latent attention, whose keys are rotated in part."""
        return self._yarn(self.mscale_all_dims) ** 2 if self.factor > 1 else 1.0

    def _yarn(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0


class Rope(NamedTuple):
    """How the queries and keys of a layer are rotated: the first `dims` of a head, 0 for all.

    Dim i is paired with dim i + C/2, or with `interleaved` dim 2i with dim 2i + 1.
    """

    theta: float
    scaling: RopeScaling = RopeScaling()
    dims: int = 0
    interleaved: bool = False


def rotate(x_BSHC: jax.Array, rope: Rope, positions: jax.Array | None = None, length: int | None = None) -> jax.Array:
    """Rotate pairs of the last dim by the position; angles in float32.

    `positions` are shared by all rows, (S,), or given per row, (B, S); by default 0 to S - 1. `length` is the number of
    positions that longrope counts, by default S.
    """
    if 0 < rope.dims < x_BSHC.shape[-1]:
        rotated, rest = jnp.split(x_BSHC, [rope.dims], axis=-1)
        return jnp.concatenate([rotate(rotated, rope._replace(dims=0), positions, length), rest], axis=-1)
    frequency_C = _frequencies(x_BSHC.shape[-1] // 2, rope, length or x_BSHC.shape[1])
    positions = jnp.arange(x_BSHC.shape[1]) if positions is None else positions
    angle_SC = positions.astype(jnp.float32)[..., None] * frequency_C
    cos, sin = jnp.cos(angle_SC)[..., None, :], jnp.sin(angle_SC)[..., None, :]
    if (multiplier := rope.scaling.multiplier()) != 1:
        cos, sin = cos * multiplier, sin * multiplier
    x_BSHC, dtype = x_BSHC.astype(jnp.float32), x_BSHC.dtype
    a, b = (x_BSHC[..., ::2], x_BSHC[..., 1::2]) if rope.interleaved else jnp.split(x_BSHC, 2, axis=-1)
    halves = [a * cos - b * sin, b * cos + a * sin]
    if rope.interleaved:
        return jnp.stack(halves, axis=-1).reshape(x_BSHC.shape).astype(dtype)
    return jnp.concatenate(halves, axis=-1).astype(dtype)


def _frequencies(half: int, rope: Rope, length: int) -> jax.Array:
    theta, scaling = rope.theta, rope.scaling
    frequency_C = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling.kind == "longrope":
        factors = scaling.long_factors if length > scaling.original_length else scaling.short_factors
        return frequency_C / jnp.asarray(factors, jnp.float32) if factors else frequency_C
    if scaling.factor == 1:
        return frequency_C
    if scaling.kind == "linear":
        return frequency_C / scaling.factor
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    if scaling.kind == "yarn":
        first, last = (_index(periods, half, theta, scaling.original_length) for periods in (high, low))
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * half - 1)
        ramp_C = (jnp.arange(half, dtype=jnp.float32) - first) / (last - first or 0.001)
        unscaled_C = 1 - jnp.clip(ramp_C, 0, 1)
    else:
        periods_C = scaling.original_length * frequency_C / (2 * jnp.pi)
        unscaled_C = jnp.clip((periods_C - low) / (high - low), 0, 1)  # 1: the frequency is unchanged
    return frequency_C * (unscaled_C + (1 - unscaled_C) / scaling.factor)


def _index(periods: float, half: int, theta: float, length: int) -> float:
    """The index, a real number, of the frequency with that many periods in `length` positions."""
    return half * math.log(length / (periods * 2 * math.pi)) / math.log(theta)
