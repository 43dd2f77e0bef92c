"""Multi-head latent attention (DeepSeek-V2, 2024): the keys and values of all heads come from one latent of a token.

Shape letters: B batch, S sequence, P slots of a prompt, T slots of a cache, D hidden, H heads, C head dim of queries
and keys, of which the last R are rotated and the first N not, V head dim of values, L latent. All heads share the
rotated part of a key.

Training computes keys and values of all heads. Generation stores a latent and a rotated key for each token, and never
computes their keys and values: queries are taken to the latents, and weighted sums of latents to values ("absorbed").
"""

# JAX and NumPy have no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from flax_mesh.axes import Mode
from flax_mesh.models.attention import Q_DIMS, attend
from flax_mesh.models.cache import KVCache, pad_slots, read_slots, write_slots
from flax_mesh.models.config import DecoderConfig
from flax_mesh.models.ops.matmul import dot_float32
from flax_mesh.models.ops.rotary import rotate
from flax_mesh.models.ops.scores import causal_mask, head_scores, plain_attention, weighted_values
from flax_mesh.models.parts import linear_options, norm
from flax_mesh.models.settings.pattern import LayerKind
from flax_mesh.models.settings.remat import named
from flax_mesh.sharding.constrain import constrain

_EPSILON = 1e-6  # of the norms of latents, whatever the epsilon of the others
_KV_DIMS = ("batch", None, "heads", "head_dim")


class LatentAttention(nnx.Module):
    """Causal latent attention, (B, S, D) -> (B, S, D), with the methods of `Attention`."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        hidden, heads, width, latent = config.hidden_size, config.num_heads, config.head_dim, config.latent_size
        self.unrotated = width - (config.rotary_dims or width)
        options, plain = linear_options(config, rngs), linear_options(config, rngs)
        options["use_bias"] = config.qkv_bias
        if size := config.query_latent_size:
            self.q_down = nnx.LinearGeneral(hidden, size, **options)
            self.q_norm = norm(config, rngs, size, _EPSILON)
            self.q_up = nnx.LinearGeneral(size, (heads, width), **plain)
        else:
            self.q = nnx.LinearGeneral(hidden, (heads, width), **plain)
        self.kv_down = nnx.LinearGeneral(hidden, latent + width - self.unrotated, **options)
        self.kv_norm = norm(config, rngs, latent, _EPSILON)
        self.kv_up = nnx.LinearGeneral(latent, (heads, self.unrotated + config.value_size), **plain)
        plain["dot_general"], plain["use_bias"] = dot_float32, config.output_bias
        self.o = nnx.LinearGeneral((heads, config.value_size), hidden, axis=(-2, -1), **plain)

    def __call__(
        self,
        x_BSD: jax.Array,
        mode: Mode = "train",
        segment_ids_BS: jax.Array | None = None,
        kind: LayerKind | None = None,
    ) -> jax.Array:
        kind = kind or self.config.kinds[0]
        return self._attend(self._queries(x_BSD, kind), *self._latents(x_BSD, kind), mode, kind, segment_ids_BS)

    def prefill(
        self, x_BPD: jax.Array, num_slots: int, kind: LayerKind | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The output for a prompt, its rotated keys (B, 1, R, T) and its latents (B, 1, L, T)."""
        kind = kind or self.config.kinds[0]
        latents = self._latents(x_BPD, kind, length=num_slots)
        y_BPD = self._attend(self._queries(x_BPD, kind, length=num_slots), *latents, "prefill", kind)
        k_B1RT, l_B1LT = (pad_slots(x, num_slots, self.config.axes) for x in latents)
        return y_BPD, k_B1RT, l_B1LT

    def decode(
        self,
        x_B1D: jax.Array,
        keys: jax.Array,
        latents: jax.Array,
        cache: KVCache,
        layer: jax.Array | None = None,
        kind: LayerKind | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The output for one token of each row, and the cached arrays updated with it; as `Attention.decode`."""
        config, kind, position = self.config, kind or self.config.kinds[0], cache.positions_B[:, None]
        num_slots = keys.shape[-1]
        q_B1HC = self._queries(x_B1D, kind, position, num_slots)
        k_B11R, l_B11L = self._latents(x_B1D, kind, position, num_slots)
        keys = write_slots(keys, k_B11R, cache.used_B, layer, config.axes)
        latents = write_slots(latents, l_B11L, cache.used_B, layer, config.axes)
        k_BT1R, l_BT1L = read_slots(keys, layer), read_slots(latents, layer)
        up_LHX = self.kv_up.kernel[...].astype(q_B1HC.dtype)
        q_B1HN, q_B1HR = jnp.split(q_B1HC, [self.unrotated], axis=-1)
        q_B1HL = jnp.einsum("bshn,lhn->bshl", q_B1HN, up_LHX[..., : self.unrotated])
        scores = head_scores(constrain(q_B1HL, Q_DIMS, axes=config.axes, mode="decode"), l_BT1L)
        scores = scores + head_scores(constrain(q_B1HR, Q_DIMS, axes=config.axes, mode="decode"), k_BT1R)
        mask_B1T = cache.mask_BT(num_slots, config.window(kind))[:, None]
        y_B1HL = weighted_values(scores, l_BT1L, mask_B1T, scale=config.score_scale, cap=config.attention_softcap)
        y_B1HV = jnp.einsum("bshl,lhv->bshv", y_B1HL, up_LHX[..., self.unrotated :])
        return self.o(constrain(y_B1HV, Q_DIMS, axes=config.axes, mode="decode")), keys, latents

    def _queries(
        self, x_BSD: jax.Array, kind: LayerKind, positions: jax.Array | None = None, length: int | None = None
    ) -> jax.Array:
        q_BSHC = self.q_up(self.q_norm(self.q_down(x_BSD))) if self.config.query_latent_size else self.q(x_BSD)
        if (rope := self.config.rope(kind)) is None:
            return q_BSHC
        q_BSHN, q_BSHR = jnp.split(q_BSHC, [self.unrotated], axis=-1)
        return jnp.concatenate([q_BSHN, rotate(q_BSHR, rope, positions, length)], axis=-1)

    def _latents(
        self, x_BSD: jax.Array, kind: LayerKind, positions: jax.Array | None = None, length: int | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Rotated keys (B, S, 1, R) and latents (B, S, 1, L)."""
        l_BSL, k_BSR = jnp.split(self.kv_down(x_BSD), [self.config.latent_size], axis=-1)
        k_BS1R, rope = k_BSR[:, :, None], self.config.rope(kind)
        k_BS1R = k_BS1R if rope is None else rotate(k_BS1R, rope, positions, length)
        return k_BS1R, self.kv_norm(l_BSL)[:, :, None]

    def _attend(
        self,
        q_BSHC: jax.Array,
        k_BS1R: jax.Array,
        l_BS1L: jax.Array,
        mode: Mode,
        kind: LayerKind,
        segment_ids_BS: jax.Array | None = None,
    ) -> jax.Array:
        """The output (B, S, D) for queries that attend to keys of the same sequence."""
        config, axes, remat = self.config, self.config.axes, self.config.remat
        k_BSHN, v_BSHV = jnp.split(self.kv_up(l_BS1L[:, :, 0]), [self.unrotated], axis=-1)
        k_BSHR = jnp.broadcast_to(k_BS1R, (*k_BSHN.shape[:3], k_BS1R.shape[-1]))
        k_BSHC = jnp.concatenate([k_BSHN, k_BSHR], axis=-1)
        q_BSHC = named(constrain(q_BSHC, Q_DIMS, axes=axes, mode=mode), "q", remat)
        # Every query attends to all keys: under sequence parallelism keys and values are gathered here.
        k_BSHC = named(constrain(k_BSHC, _KV_DIMS, axes=axes, mode=mode), "k", remat)
        v_BSHV = named(constrain(v_BSHV, _KV_DIMS, axes=axes, mode=mode), "v", remat)
        length, window, has_segments = q_BSHC.shape[1], config.window(kind), segment_ids_BS is not None
        kernel = config.attention_kernel(length, length, has_segments=has_segments, mode=mode)
        if kernel == "xla":
            mask_BSS = causal_mask(length, window, segment_ids_BS)
            scale, cap = config.score_scale, config.attention_softcap
            y_BSHV = plain_attention(q_BSHC, k_BSHC, v_BSHV, mask_BSS, scale=scale, cap=cap)
        else:  # the kernels have one head dim: zeros do not change the scores, and are cut off the sums of values
            config = replace(config, attention_scale=config.score_scale)
            width = max(q_BSHC.shape[-1], v_BSHV.shape[-1])
            q, k, v = (_widened(x, width) for x in (q_BSHC, k_BSHC, v_BSHV))
            y_BSHV = attend(kernel, q, k, v, segment_ids_BS, config, window, mode)[..., : v_BSHV.shape[-1]]
        y_BSHV = constrain(y_BSHV, Q_DIMS, axes=axes, mode=mode)
        return self.o(y_BSHV if kernel == "splash" else named(y_BSHV, "attention", remat))


def _widened(x_BSHC: jax.Array, size: int) -> jax.Array:
    return jnp.pad(x_BSHC, [(0, 0)] * 3 + [(0, size - x_BSHC.shape[-1])])
