"""The layers of a decoder: attention or a delta net, and an MLP or experts, with their norms and residual connections.

Shape letters: B batch, S sequence, P slots of a prompt, D hidden, F mlp.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flax_mesh.axes import Mode
from flax_mesh.models.attention import Attention
from flax_mesh.models.cache import KVCache
from flax_mesh.models.config import MLP_NAMES, DecoderConfig
from flax_mesh.models.delta import DeltaNet
from flax_mesh.models.latent import LatentAttention
from flax_mesh.models.moe import MoE
from flax_mesh.models.ops.activations import activated, shifted
from flax_mesh.models.ops.matmul import dot_float32
from flax_mesh.models.ops.router import Aux
from flax_mesh.models.parts import dtypes, linear_options, norm, token_dims
from flax_mesh.models.settings.pattern import LayerKind
from flax_mesh.models.settings.remat import named
from flax_mesh.sharding.constrain import constrain


class MLP(nnx.Module):
    """A gated MLP, (B, S, D) -> (B, S, D): SwiGLU, or with another activation."""

    def __init__(self, config: DecoderConfig, size: int | None = None, *, rngs: nnx.Rngs):
        self.config = config
        options, size = linear_options(config, rngs), size or config.mlp_size
        options["use_bias"] = config.mlp_bias
        self.gate = nnx.LinearGeneral(config.hidden_size, size, **options)
        self.up = nnx.LinearGeneral(config.hidden_size, size, **options)
        self.down = nnx.LinearGeneral(size, config.hidden_size, dot_general=dot_float32, **options)

    def __call__(self, x_BSD: jax.Array, mode: Mode = "train") -> jax.Array:
        config, limit = self.config, self.config.swiglu_limit
        gate, up = MLP_NAMES
        h_BSF = activated(named(self.gate(x_BSD), gate, config.remat), config.activation, limit)
        h_BSF = h_BSF * shifted(named(self.up(x_BSD), up, config.remat), limit)
        return self.down(constrain(h_BSF, (*token_dims(mode), "mlp"), axes=self.config.axes, mode=mode))


class DecoderLayer(nnx.Module):
    """Residual layer, (B, S, D) -> (B, S, D) and the statistics of its router, {} without experts."""

    def __init__(self, config: DecoderConfig, kind: LayerKind | None = None, *, rngs: nnx.Rngs):
        self.config = config
        if config.norms != "after":
            self.attention_norm = norm(config, rngs)
        if kind and kind.delta:
            self.delta = DeltaNet(config, rngs=rngs)
        else:
            self.attention = (LatentAttention if config.latent_size else Attention)(config, rngs=rngs)
        if config.norms != "after":
            self.mlp_norm = norm(config, rngs)
        if config.norms != "before":
            self.attention_out_norm, self.mlp_out_norm = norm(config, rngs), norm(config, rngs)
        if config.num_experts:
            sizes = (config.hidden_size, config.mlp_size, config.num_experts, config.experts_per_token)
            options: dict[str, Any] = {"routing": config.routing, "bias": config.mlp_bias, **dtypes(config)}
            options["balance"] = config.router_balance
            options |= {name: getattr(config, name) for name in ("activation", "swiglu_limit")}
            self.moe = MoE(*sizes, axes=config.axes, rngs=rngs, **options)
            if config.shared_expert_size:
                self.shared_mlp = MLP(config, config.shared_expert_size, rngs=rngs)
            if config.shared_expert_gate:
                self.shared_gate = nnx.LinearGeneral(config.hidden_size, 1, **linear_options(config, rngs))
        else:
            self.mlp = MLP(config, rngs=rngs)

    def __call__(
        self,
        x_BSD: jax.Array,
        mode: Mode = "train",
        segment_ids_BS: jax.Array | None = None,
        kind: LayerKind | None = None,
    ) -> tuple[jax.Array, Aux]:
        x_BSD = named(x_BSD, "layer_input", self.config.remat)
        inputs = self._attention_input(x_BSD), mode, segment_ids_BS
        y_BSD = self.delta(*inputs) if kind and kind.delta else self.attention(*inputs, kind)
        return self._rest(x_BSD, y_BSD, mode, None if segment_ids_BS is None else segment_ids_BS != 0)

    def prefill(
        self, x_BPD: jax.Array, lengths_B: jax.Array, num_slots: int, kind: LayerKind
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """The output, and keys and values or states; see `prefill` of `Attention` and `DeltaNet`."""
        x = self._attention_input(x_BPD)
        y_BPD, *pair = self.delta.prefill(x, lengths_B) if kind.delta else self.attention.prefill(x, num_slots, kind)
        return self._rest(x_BPD, y_BPD, "prefill")[0], (pair[0], pair[1])

    def decode(
        self,
        x_B1D: jax.Array,
        pair: tuple[jax.Array, jax.Array],
        cache: KVCache,
        layer: jax.Array | None,
        kind: LayerKind,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """The output for one token, and the pair of arrays of `prefill`; see `decode` of `Attention` and `DeltaNet`."""
        x = self._attention_input(x_B1D)
        if kind.delta:
            y_B1D, *pair_after = self.delta.decode(x, *pair, layer)
        else:
            y_B1D, *pair_after = self.attention.decode(x, *pair, cache, layer, kind)
        return self._rest(x_B1D, y_B1D, "decode")[0], (pair_after[0], pair_after[1])

    def _attention_input(self, x_BSD: jax.Array) -> jax.Array:
        return x_BSD if self.config.norms == "after" else self.attention_norm(x_BSD)

    def _rest(
        self, x_BSD: jax.Array, y_BSD: jax.Array, mode: Mode, counted_BS: jax.Array | None = None
    ) -> tuple[jax.Array, Aux]:
        """The layer after its attention, which returned `y_BSD`."""
        config = self.config
        y_BSD = y_BSD if config.norms == "before" else self.attention_out_norm(y_BSD)
        # Attention and MLP are summed over tp in float32 and rounded once, here: equal results on every mesh.
        x_BSD = self._add(x_BSD, named(y_BSD, "attention_out", config.remat))
        y_BSD, aux = self._mlp(x_BSD if config.norms == "after" else self.mlp_norm(x_BSD), mode, counted_BS)
        x_BSD = self._add(x_BSD, y_BSD if config.norms == "before" else self.mlp_out_norm(y_BSD))
        return constrain(x_BSD, (*token_dims(mode), "hidden"), axes=config.axes, mode=mode), aux

    def _add(self, x_BSD: jax.Array, y_BSD: jax.Array) -> jax.Array:
        scale = self.config.residual_scale
        return (x_BSD + (y_BSD if scale == 1 else y_BSD * scale)).astype(x_BSD.dtype)

    def _mlp(self, x_BSD: jax.Array, mode: Mode, counted_BS: jax.Array | None) -> tuple[jax.Array, Aux]:
        if not self.config.num_experts:
            return self.mlp(x_BSD, mode), {}
        y_BSD, aux = self.moe(x_BSD, mode, counted_BS)
        if self.config.shared_expert_size:
            shared_BSD = self.shared_mlp(x_BSD, mode)
            gate = jax.nn.sigmoid(self.shared_gate(x_BSD)) if self.config.shared_expert_gate else 1
            y_BSD = y_BSD + gate * shared_BSD
        return y_BSD, aux


class Block(nnx.Module):
    """The layers of one repetition of a pattern, where they have different parameters: one layer for each key."""

    def __init__(self, config: DecoderConfig, keys: jax.Array):
        layers = zip(config.kinds, keys, strict=True)
        self.each = nnx.List([DecoderLayer(config, kind, rngs=nnx.Rngs(params=key)) for kind, key in layers])


class Prediction(nnx.Module):
    """Multi-token prediction: hidden states (B, S, D) for a target one position further, before `norm`; statistics.

    The k-th module of a decoder combines the hidden states before it at position i, and the embedding of the token at
    i + k, by norms and a projection, and passes both through a layer. The embedding and the head are those of the
    decoder. Source: DeepSeek-V3 (2024, arXiv:2412.19437), section 2.2.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.embedding_norm, self.hidden_norm = norm(config, rngs), norm(config, rngs)
        self.config, size = config, config.hidden_size
        options = linear_options(config, rngs)
        self.projection = nnx.LinearGeneral(2 * size, size, dot_general=dot_float32, **options)
        self.layer = DecoderLayer(config, rngs=rngs)
        self.norm = norm(config, rngs)

    def __call__(
        self, x_BSD: jax.Array, later_BSD: jax.Array, segment_ids_BS: jax.Array | None
    ) -> tuple[jax.Array, Aux]:
        # The order of published weights: the embedding comes first.
        both = jnp.concatenate([self.embedding_norm(later_BSD), self.hidden_norm(x_BSD)], axis=-1)
        both = constrain(both, (*token_dims("train"), "mlp"), axes=self.config.axes)  # its sums are split over tp
        return self.layer(self.projection(both).astype(x_BSD.dtype), "train", segment_ids_BS)
