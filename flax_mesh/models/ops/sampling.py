"""The choice of a token from its logits.

Shape letters: B batch, V vocab.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from flax_mesh.errors import Problem
from flax_mesh.fields import MAX_SIZE, type_problems, value_problems
from flax_mesh.modes import promotions

_GREEDY_BELOW = 1e-30  # of the temperature; logits divided by less may be infinite


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from its logits.

    Attributes:
        temperature: The logits are divided by it. 0: the token of the largest logit (greedy).
        top_k: Only the tokens of the k largest logits. 0: all.
        top_p: Of these only the most probable ones, as few as have this probability together (Holtzman et al. 2020).

    Of tokens with equal logits those with smaller ids come first.
    """

    temperature: float = field(default=0.0, metadata={"at_least": 0})
    top_k: int = field(default=0, metadata={"at_least": 0, "at_most": MAX_SIZE})
    top_p: float = field(default=1.0, metadata={"above": 0, "at_most": 1})

    def problems(self) -> list[Problem]:
        if problems := [*type_problems(self), *value_problems(self)]:
            return problems
        without_effect = [name for name in ("top_k", "top_p") if getattr(self, name) != getattr(Sampling, name)]
        rest = "has no effect with temperature 0 (greedy)", "set a temperature above 0"
        return [Problem(name, *rest) for name in without_effect if self.temperature == 0]


@promotions()
def choose_tokens(
    logits_BV: jax.Array, keys_B: jax.Array, temperature: ArrayLike, top_k: ArrayLike = 0, top_p: ArrayLike = 1.0
) -> jax.Array:
    """One token per row (B,) int32, drawn with the row's random key; the others are fields of `Sampling`, or traced."""

    def sampled() -> jax.Array:
        scaled_BV = logits_BV / temperature
        is_filtered = (jnp.asarray(top_k) > 0) | (jnp.asarray(top_p) < 1)
        kept_BV = jax.lax.cond(is_filtered, lambda: _filtered(scaled_BV, top_k, top_p), lambda: scaled_BV)
        return jax.vmap(jax.random.categorical)(keys_B, kept_BV).astype(jnp.int32)

    is_greedy = jnp.asarray(temperature) < _GREEDY_BELOW
    return jax.lax.cond(is_greedy, lambda: jnp.argmax(logits_BV, axis=-1).astype(jnp.int32), sampled)


def _filtered(logits_BV: jax.Array, top_k: ArrayLike, top_p: ArrayLike) -> jax.Array:
    """Logits with -inf for the tokens that top_k and top_p exclude."""
    order_BV = jnp.argsort(-logits_BV, axis=-1)  # stable
    sorted_BV = jnp.take_along_axis(logits_BV, order_BV, axis=-1)
    rank_V = jnp.arange(logits_BV.shape[-1])
    is_top_V = (top_k == 0) | (rank_V < top_k)
    probability_BV = jax.nn.softmax(jnp.where(is_top_V, sorted_BV, -jnp.inf))
    before_BV = jnp.cumsum(probability_BV, axis=-1) - probability_BV  # of the more probable tokens
    is_kept_BV = is_top_V & ((before_BV < top_p) | (rank_V == 0))
    is_kept_BV = jnp.take_along_axis(is_kept_BV, jnp.argsort(order_BV, axis=-1), axis=-1)  # in the order of the ids
    return jnp.where(is_kept_BV, logits_BV, -jnp.inf)
