"""Tokens and targets at later positions, for modules that predict the tokens after the next one.

Shape letters: B batch, S sequence.
"""

# JAX has no types for some functions.
# pyright: reportUnknownMemberType=false

import jax
import jax.numpy as jnp


def shifted(x_BS: jax.Array, by: int, last: int) -> jax.Array:
    """The values `by` positions later; `last` where there are none."""
    return jnp.pad(x_BS[:, by:], ((0, 0), (0, min(by, x_BS.shape[1]))), constant_values=last)


def later_targets(targets_BS: jax.Array, by: int, segment_ids_BS: jax.Array | None) -> jax.Array:
    """The targets `by` positions later, -1 where the document ends before."""
    later_BS = shifted(targets_BS, by, -1)
    if segment_ids_BS is None:
        return later_BS
    return jnp.where(segment_ids_BS == shifted(segment_ids_BS, by, -1), later_BS, -1)
