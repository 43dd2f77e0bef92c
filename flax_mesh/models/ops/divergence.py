"""The Kullback-Leibler divergence of the next tokens of two models, with a temperature."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

DIRECTIONS = ("forward", "reverse")


class Divergence(NamedTuple):
    """The loss (1 - alpha) temperature^2 KL + alpha cross-entropy of a student (Hinton et al. 2015).

    With the probabilities p of the teacher and q of the student, softmax(logits / temperature), KL is the sum over the
    vocabulary of p log(p / q), "forward", or of q log(q / p), "reverse" (Gu et al. 2024).
    """

    direction: str
    temperature: float
    alpha: float

    def scaled(self, logits_V: jax.Array, teacher_V: jax.Array) -> jax.Array:
        """temperature^2 KL, over the last dim of both logits. Its gradient has then the scale of the cross-entropy's.

        >>> a, b = jnp.log(jnp.array([[0.5, 0.5], [0.9, 0.1]]))
        >>> [round(float(Divergence(name, 1.0, 0.0).scaled(a, b)), 3) for name in DIRECTIONS]
        [0.368, 0.511]
        """
        log_q, log_p = (jax.nn.log_softmax(x / self.temperature) for x in (logits_V, teacher_V))
        first, second = (log_p, log_q) if self.direction == "forward" else (log_q, log_p)
        return self.temperature**2 * jnp.sum(jnp.exp(first) * (first - second), axis=-1)

    def mixed(self, cross_entropy: jax.Array, divergence: jax.Array) -> jax.Array:
        """The loss."""
        return self.alpha * cross_entropy + (1 - self.alpha) * divergence
