"""Multi-token prediction: modules that predict the tokens after the next one, for a loss beside it.

The k-th module combines the hidden state before it at position i, and the embedding of the token at i + k, by norms and
a projection, and passes both through a layer. The embedding and the head are those of the decoder.

Shape letters: B batch, S sequence, D hidden. Source: DeepSeek-V3 (2024, arXiv:2412.19437), section 2.2.
"""

# JAX and NumPy have no types for some functions and arrays.
# pyright: reportUnknownMemberType=false

import jax
import jax.numpy as jnp
from flax import nnx

from flax_mesh.models.config import DecoderConfig
from flax_mesh.models.layer import DecoderLayer
from flax_mesh.models.ops.matmul import dot_float32
from flax_mesh.models.ops.router import Aux
from flax_mesh.models.parts import linear_options, norm, token_dims
from flax_mesh.sharding.constrain import constrain


class Prediction(nnx.Module):
    """Hidden states and embeddings of later tokens (B, S, D) -> hidden states (B, S, D), before `norm`; statistics."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.embedding_norm, self.hidden_norm = norm(config, rngs), norm(config, rngs)
        self.config, size = config, config.hidden_size
        options = linear_options(config, rngs) | {"dot_general": dot_float32}
        self.projection = nnx.LinearGeneral(2 * size, size, **options)
        self.layer = DecoderLayer(config, rngs=rngs)
        self.norm = norm(config, rngs)

    def __call__(
        self, x_BSD: jax.Array, later_BSD: jax.Array, segment_ids_BS: jax.Array | None
    ) -> tuple[jax.Array, Aux]:
        # The order of published weights: the embedding comes first.
        both = jnp.concatenate([self.embedding_norm(later_BSD), self.hidden_norm(x_BSD)], axis=-1)
        both = constrain(both, (*token_dims("train"), "mlp"), axes=self.config.axes)  # its sums are split over tp
        return self.layer(self.projection(both).astype(x_BSD.dtype), "train", segment_ids_BS)


def shifted(x_BS: jax.Array, by: int, last: int) -> jax.Array:
    """The values `by` positions later; `last` where there are none."""
    return jnp.pad(x_BS[:, by:], ((0, 0), (0, min(by, x_BS.shape[1]))), constant_values=last)


def later_targets(targets_BS: jax.Array, by: int, segment_ids_BS: jax.Array | None) -> jax.Array:
    """The targets `by` positions later, -1 where the document ends before."""
    later_BS = shifted(targets_BS, by, -1)
    if segment_ids_BS is None:
        return later_BS
    return jnp.where(segment_ids_BS == shifted(segment_ids_BS, by, -1), later_BS, -1)
