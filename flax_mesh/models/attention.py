"""Causal grouped-query attention of a decoder.

Shape letters: B batch, S sequence, P slots of a prompt, T slots of a cache, D hidden, H query heads, K key-value heads,
C head dim.
"""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend import core as jex

from flax_mesh.axes import Mode
from flax_mesh.errors import ConfigError
from flax_mesh.kernels import RESIDUALS
from flax_mesh.models.cache import KVCache, pad_slots, read_slots, split_heads, write_slots
from flax_mesh.models.config import DecoderConfig
from flax_mesh.models.ops.kernels import split_splash_attention
from flax_mesh.models.ops.matmul import dot_float32
from flax_mesh.models.ops.rotary import rotate
from flax_mesh.models.ops.scores import causal_mask, plain_attention
from flax_mesh.models.parts import linear_options, norm
from flax_mesh.models.settings.pattern import LayerKind
from flax_mesh.models.settings.remat import named
from flax_mesh.sharding.constrain import constrain

Q_DIMS = ("batch", "query_sequence", "heads", "head_dim")


class Attention(nnx.Module):
    """Causal grouped-query attention, (B, S, D) -> (B, S, D)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
        options = linear_options(config, rngs)
        options["use_bias"] = config.qkv_bias
        self.q = nnx.LinearGeneral(config.hidden_size, (heads, width), **options)
        self.k = nnx.LinearGeneral(config.hidden_size, (kv_heads, width), **options)
        self.v = nnx.LinearGeneral(config.hidden_size, (kv_heads, width), **options)
        if config.qk_norm:
            sizes = (heads * width, kv_heads * width) if config.qk_norm_all_heads else (width, width)
            self.q_norm, self.k_norm = (norm(config, rngs, size) for size in sizes)
        if config.attention_gate:
            self.gate = nnx.LinearGeneral(config.hidden_size, (heads, width), **options)
        options["dot_general"] = dot_float32  # sums over heads, and over tp, before rounding
        options["use_bias"] = config.output_bias
        self.o = nnx.LinearGeneral((heads, width), config.hidden_size, axis=(-2, -1), **options)
        if config.attention_sinks:
            self.sinks = nnx.Param(jnp.zeros(heads, options["param_dtype"]))

    def __call__(
        self,
        x_BSD: jax.Array,
        mode: Mode = "train",
        segment_ids_BS: jax.Array | None = None,
        kind: LayerKind | None = None,
    ) -> jax.Array:
        """`kind` is the kind of this layer, by default the kind of the first layer."""
        kind = kind or self.config.kinds[0]
        return self._out(self._attend(*self._project(x_BSD, mode, kind), mode, kind, segment_ids_BS), x_BSD)

    def prefill(
        self, x_BPD: jax.Array, num_slots: int, kind: LayerKind | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The output for a prompt, and its keys and values (B, K, C, T) for a cache with `num_slots` slots."""
        kind = kind or self.config.kinds[0]
        q_BPHC, k_BPKC, v_BPKC = self._project(x_BPD, "prefill", kind, length=num_slots)
        y_BPHC, axes = self._attend(q_BPHC, k_BPKC, v_BPKC, "prefill", kind), self.config.axes
        return self._out(y_BPHC, x_BPD), pad_slots(k_BPKC, num_slots, axes), pad_slots(v_BPKC, num_slots, axes)

    def decode(
        self,
        x_B1D: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        cache: KVCache,
        layer: jax.Array | None = None,
        kind: LayerKind | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The output for one token of each row, and `keys` and `values` updated with the token.

        `keys` and `values` belong to one layer, or to a stack if the index `layer` is given.
        """
        kind = kind or self.config.kinds[0]
        axes, position = self.config.axes, cache.positions_B[:, None]
        num_slots = keys.shape[-1]
        q_B1HC, k_B1KC, v_B1KC = self._project(x_B1D, "decode", kind, position, num_slots)
        keys = write_slots(keys, k_B1KC, cache.used_B, layer, axes)
        values = write_slots(values, v_B1KC, cache.used_B, layer, axes)
        k_BTKC, v_BTKC = read_slots(keys, layer), read_slots(values, layer)
        mask_BT = cache.mask_BT(num_slots, self.config.window(kind))
        if self._has_own_scores:
            # A copy: this product has the keys on the left, of which XLA on CPU contracts only the last dim.
            k_BTKC = jax.lax.optimization_barrier(k_BTKC)
            y_B1HC = self._plain(q_B1HC, k_BTKC, v_BTKC, mask_BT[:, None])
        else:
            mask_B11T = mask_BT[:, None, None, :]
            # The kernels are for many queries of a row; here it has one.
            y_B1HC = jax.nn.dot_product_attention(
                q_B1HC, k_BTKC, v_BTKC, mask=mask_B11T, scale=self.config.attention_scale or None, implementation="xla"
            )
        return self._out(constrain(y_B1HC, Q_DIMS, axes=axes, mode="decode"), x_B1D), keys, values

    def _project(
        self,
        x_BSD: jax.Array,
        mode: Mode,
        kind: LayerKind,
        positions: jax.Array | None = None,
        length: int | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Rotated queries (B, S, H, C) and keys (B, S, K, C), and values."""
        axes = self.config.axes
        q_BSHC, k_BSKC = self.q(x_BSD), self.k(x_BSD)
        if self.config.qk_norm_all_heads:
            q_BSHC, k_BSKC = (
                norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape)
                for norm, x in ((self.q_norm, q_BSHC), (self.k_norm, k_BSKC))
            )
        elif self.config.qk_norm:
            q_BSHC, k_BSKC = self.q_norm(q_BSHC), self.k_norm(k_BSKC)
        if (rope := self.config.rope(kind)) is not None:
            q_BSHC, k_BSKC = (rotate(x, rope, positions, length) for x in (q_BSHC, k_BSKC))
        q_BSHC = constrain(q_BSHC, Q_DIMS, axes=axes, mode=mode)
        # Every query attends to all keys: under sequence parallelism keys and values are gathered here.
        k_BSKC = split_heads(k_BSKC, axes, mode)
        return q_BSHC, k_BSKC, split_heads(self.v(x_BSD), axes, mode)

    def _attend(
        self,
        q_BSHC: jax.Array,
        k_BSKC: jax.Array,
        v_BSKC: jax.Array,
        mode: Mode,
        kind: LayerKind,
        segment_ids_BS: jax.Array | None = None,
    ) -> jax.Array:
        """Weighted sums of values (B, S, H, C) for queries that attend to keys of the same sequence."""
        axes, remat = self.config.axes, self.config.remat
        q_BSHC, k_BSKC, v_BSKC = named(q_BSHC, "q", remat), named(k_BSKC, "k", remat), named(v_BSKC, "v", remat)
        has_segments = segment_ids_BS is not None
        kernel = self.config.attention_kernel(q_BSHC.shape[1], k_BSKC.shape[1], has_segments=has_segments, mode=mode)
        window = self.config.window(kind)
        if self._has_own_scores:
            y_BSHC = self._plain(q_BSHC, k_BSKC, v_BSKC, causal_mask(q_BSHC.shape[1], window, segment_ids_BS))
        else:
            y_BSHC = attend(kernel, q_BSHC, k_BSKC, v_BSKC, segment_ids_BS, self.config, window, mode)
        y_BSHC = constrain(y_BSHC, Q_DIMS, axes=axes, mode=mode)
        # Splash attention names its output itself, together with the sums that its backward pass reads.
        return y_BSHC if kernel == "splash" else named(y_BSHC, "attention", remat)

    def _out(self, y_BSHC: jax.Array, x_BSD: jax.Array) -> jax.Array:
        if self.config.attention_gate:
            y_BSHC = y_BSHC * jax.nn.sigmoid(self.gate(x_BSD))
        return self.o(y_BSHC)

    @property
    def _has_own_scores(self) -> bool:
        return self.config.attention_sinks or self.config.attention_softcap > 0

    def _plain(self, q_BSHC: jax.Array, k_BTKC: jax.Array, v_BTKC: jax.Array, mask_BST: jax.Array) -> jax.Array:
        config = self.config
        scale, sinks_H = config.attention_scale or config.head_dim**-0.5, None
        if config.attention_sinks:
            sinks_H = self.sinks[...]
        return plain_attention(
            q_BSHC, k_BTKC, v_BTKC, mask_BST, scale=scale, cap=config.attention_softcap, sinks_H=sinks_H
        )


def attend(
    kernel: Any,
    q_BSHC: jax.Array,
    k_BSKC: jax.Array,
    v_BSKC: jax.Array,
    segment_ids_BS: jax.Array | None,
    config: DecoderConfig,
    window: int,
    mode: Mode = "train",
) -> jax.Array:
    """Causal attention within a window and within equal segment ids, by one of the kernels."""
    scale = config.attention_scale or None
    if kernel == "splash":
        arrays = q_BSHC, k_BSKC, v_BSKC, segment_ids_BS
        return split_splash_attention(*arrays, window=window, axes=config.axes, mode=mode, scale=scale)
    mask = None if segment_ids_BS is None else segment_ids_BS[:, None, :, None] == segment_ids_BS[:, None, None, :]
    local = (window - 1, 0) if window else None
    try:
        return jax.nn.dot_product_attention(
            q_BSHC,
            k_BSKC,
            v_BSKC,
            mask=mask,
            scale=scale,
            is_causal=True,
            local_window_size=local,
            implementation=kernel,
        )
    except RuntimeError as error:  # JAX could not find the version of cuDNN, or the GPU is too old for it
        if kernel != "cudnn":
            raise
        if config.attention == "auto":
            warnings.warn(f"model.attention=auto uses xla, since cudnn cannot be traced here: {error}", stacklevel=2)
            return attend("xla", q_BSHC, k_BSKC, v_BSKC, segment_ids_BS, config, window, mode)
        raise ConfigError(
            f"model.attention={config.attention} cannot be traced here: {error} Use model.attention=xla, or JAX for "
            "CUDA"
        ) from error


def is_fused_attention(primitive: jex.Primitive, *_: object, **params: object) -> bool:
    """A policy of `jax.checkpoint` that saves the results of attention kernels."""
    if primitive.name.startswith("dot_product_attention_fwd"):
        return True
    return primitive.name == "name" and params["name"] == RESIDUALS
