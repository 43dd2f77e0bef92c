"""Causal grouped-query attention of a decoder.

Shape letters: B batch, S sequence, D hidden, H query heads, K key-value heads, C head dim.
"""

from typing import Any

import jax
from flax import nnx

from flax_mesh.axes import Mode
from flax_mesh.errors import ConfigError
from flax_mesh.models.config import DecoderConfig, linear_options, norm
from flax_mesh.models.kernels import RESIDUALS, splash_attention
from flax_mesh.models.matmul import dot_float32
from flax_mesh.models.remat import named
from flax_mesh.models.rotary import rotate
from flax_mesh.sharding.constrain import constrain


class Attention(nnx.Module):
    """Causal grouped-query attention, (B, S, D) -> (B, S, D)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
        options = linear_options(config, rngs)
        biased: dict[str, Any] = options | {"use_bias": config.qkv_bias}
        self.q = nnx.LinearGeneral(config.hidden_size, (heads, width), **biased)
        self.k = nnx.LinearGeneral(config.hidden_size, (kv_heads, width), **biased)
        self.v = nnx.LinearGeneral(config.hidden_size, (kv_heads, width), **biased)
        if config.qk_norm:
            self.q_norm = norm(config, rngs, width)
            self.k_norm = norm(config, rngs, width)
        options["dot_general"] = dot_float32  # sums over heads, and over tp, before rounding
        self.o = nnx.LinearGeneral((heads, width), config.hidden_size, axis=(-2, -1), **options)

    def __call__(self, x_BSD: jax.Array, mode: Mode = "train", segment_ids_BS: jax.Array | None = None) -> jax.Array:
        axes = self.config.axes
        q_BSHC, k_BSKC = self.q(x_BSD), self.k(x_BSD)
        if self.config.qk_norm:
            q_BSHC, k_BSKC = self.q_norm(q_BSHC), self.k_norm(k_BSKC)
        q_BSHC = rotate(q_BSHC, self.config.rope_theta, self.config.rope_scaling)
        k_BSKC = rotate(k_BSKC, self.config.rope_theta, self.config.rope_scaling)
        q_BSHC = constrain(q_BSHC, ("batch", "query_sequence", "heads", "head_dim"), axes=axes, mode=mode)
        # Every query attends to all keys: under sequence parallelism keys and values are gathered here.
        k_BSKC = constrain(k_BSKC, ("batch", None, "kv_heads", "head_dim"), axes=axes, mode=mode)
        v_BSKC = constrain(self.v(x_BSD), ("batch", None, "kv_heads", "head_dim"), axes=axes, mode=mode)
        remat = self.config.remat
        q_BSHC, k_BSKC, v_BSKC = named(q_BSHC, "q", remat), named(k_BSKC, "k", remat), named(v_BSKC, "v", remat)
        has_segments = segment_ids_BS is not None
        kernel = self.config.attention_kernel(x_BSD.shape[1], x_BSD.shape[1], has_segments=has_segments, mode=mode)
        y_BSHC = attend(kernel, q_BSHC, k_BSKC, v_BSKC, segment_ids_BS, self.config, mode)
        y_BSHC = constrain(y_BSHC, ("batch", "query_sequence", "heads", "head_dim"), axes=axes, mode=mode)
        # Splash attention names its output itself, together with the sums that its backward pass reads.
        return self.o(y_BSHC if kernel == "splash" else named(y_BSHC, "attention", remat))


def attend(
    kernel: Any,
    q_BSHC: jax.Array,
    k_BSKC: jax.Array,
    v_BSKC: jax.Array,
    segment_ids_BS: jax.Array | None,
    config: DecoderConfig,
    mode: Mode = "train",
) -> jax.Array:
    """Causal attention within `sliding_window` and within equal segment ids, by one of the kernels."""
    window = config.sliding_window
    if kernel == "splash":
        return splash_attention(q_BSHC, k_BSKC, v_BSKC, segment_ids_BS, window=window, axes=config.axes, mode=mode)
    mask = None if segment_ids_BS is None else segment_ids_BS[:, None, :, None] == segment_ids_BS[:, None, None, :]
    local = (window - 1, 0) if window else None
    try:
        return jax.nn.dot_product_attention(
            q_BSHC, k_BSKC, v_BSKC, mask=mask, is_causal=True, local_window_size=local, implementation=kernel
        )
    except RuntimeError as error:  # JAX could not find the version of cuDNN, or the GPU is too old for it
        if kernel != "cudnn":
            raise
        if config.attention == "auto":
            return attend("xla", q_BSHC, k_BSKC, v_BSKC, segment_ids_BS, config, mode)
        raise ConfigError(
            f"model.attention={config.attention} cannot be traced here: {error} Use model.attention=xla, or JAX for "
            "CUDA"
        ) from error


def is_fused_attention(primitive: Any, *_: Any, **params: Any) -> bool:
    """A policy of `jax.checkpoint` that saves what kernels of attention return."""
    if primitive.name.startswith("dot_product_attention_fwd"):
        return True
    return primitive.name == "name" and params["name"] == RESIDUALS
