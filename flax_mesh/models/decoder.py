"""A decoder-only language model in plain NNX: RMSNorm, rotary positions, grouped-query attention, SwiGLU or experts.

Shape letters: B batch, S sequence, D hidden, H query heads, K key-value heads, C head dim, F mlp, V vocab.
Architecture: Llama (Touvron et al. 2023), grouped queries (Ainslie et al. 2023), SwiGLU (Shazeer 2020); with experts as
in Mixtral (Jiang et al. 2024).
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flax_mesh.axes import Mode
from flax_mesh.errors import ConfigError
from flax_mesh.mesh.context import current_mesh
from flax_mesh.models.attention import is_fused_attention
from flax_mesh.models.cache import KVCache, cache_dims
from flax_mesh.models.config import DecoderConfig, dtypes, linear_options, norm, token_dims
from flax_mesh.models.cross_entropy import cross_entropy, project, token_losses
from flax_mesh.models.layer import DecoderLayer
from flax_mesh.models.ops.lookup import lookup
from flax_mesh.models.ops.router import Aux, router_losses
from flax_mesh.models.ops.scores import soft_cap
from flax_mesh.models.pattern import LayerKind
from flax_mesh.models.remat import call_layers, scan_layers
from flax_mesh.sharding.abstract import partitioned
from flax_mesh.sharding.constrain import constrain
from flax_mesh.sharding.explicit import on_auto_axes
from flax_mesh.text import array_text
from flax_mesh.tree import PyTree

_Carry = tuple[jax.Array, jax.Array, jax.Array]  # hidden states, and the keys and values of a stack


@partitioned(
    rules=[
        (r"embed/embedding$", ("vocab", "embed")),
        (r"attention/q/kernel$", ("embed", "heads", "head_dim")),
        (r"attention/(k|v)/kernel$", ("embed", "kv_heads", "head_dim")),
        (r"attention/q/bias$", ("heads", "head_dim")),
        (r"attention/(k|v)/bias$", ("kv_heads", "head_dim")),
        (r"attention/o/kernel$", ("heads", "head_dim", "embed")),
        (r"attention/sinks$", ("heads",)),
        (r"mlp/(gate|up)/kernel$", ("embed", "mlp")),
        (r"mlp/(gate|up)/bias$", ("mlp",)),
        (r"mlp/down/kernel$", ("mlp", "embed")),
        (r"moe/router/kernel$", ("embed", "expert_gate")),
        (r"moe/(gate|up)/kernel$", ("experts", "embed", "mlp")),
        (r"moe/(gate|up)/bias$", ("experts", "mlp")),
        (r"moe/down/kernel$", ("experts", "mlp", "embed")),
        (r"moe/down/bias$", ("experts", "embed")),
        (r"shared_gate/kernel$", ("embed", None)),
        (r"(attention/o|mlp/down|moe/router)/bias$", ()),
        (r"head/kernel$", ("embed", "vocab")),
        (r"norm/scale$", ()),
    ],
    layers="layers",
)
class Decoder(nnx.Module):
    """Token ids (B, S) int32 -> logits (B, S, V) float32."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        if problems := config.problems():
            raise ConfigError(problems)
        if (mesh := current_mesh()) is not None and (copies := config.copies_on(mesh)):
            warnings.warn(copies, stacklevel=5)
            config = config.on_mesh(mesh)
        self.config = config
        self.axes = config.axes
        self.embed = nnx.Embed(config.vocab_size, config.hidden_size, rngs=rngs, **dtypes(config))
        # One key per layer, so that a list and a stack of layers have bitwise equal initial values.
        keys = jax.random.split(rngs.params(), config.num_layers)
        make_layer = lambda key: DecoderLayer(config, rngs=nnx.Rngs(params=key))  # noqa: E731
        self.layers: PyTree = nnx.vmap(make_layer)(keys) if config.scan else nnx.List([make_layer(key) for key in keys])
        self.norm = norm(config, rngs)
        if not config.tied:
            self.head = nnx.LinearGeneral(config.hidden_size, config.vocab_size, **linear_options(config, rngs))

    def __call__(
        self, tokens_BS: jax.Array, mode: Mode = "train", *, segment_ids: jax.Array | None = None
    ) -> jax.Array:
        """`segment_ids` (B, S) integers: tokens attend only to tokens with the same id, such as one packed document.

        The id of padding is 0: it does not count in the statistics of the routers.
        """
        return self.forward(tokens_BS, mode, segment_ids=segment_ids)[0]

    def forward(
        self, tokens_BS: jax.Array, mode: Mode = "train", *, segment_ids: jax.Array | None = None
    ) -> tuple[jax.Array, Aux]:
        """Logits, and the statistics of the routers: the dict of `MoE` with a leading layer dim, {} without experts."""
        x_BSD, weights_DV, aux = self.hidden(tokens_BS, mode, segment_ids=segment_ids)
        return soft_cap(project(x_BSD, weights_DV, self.config.axes, mode), self.config.logit_softcap), aux

    def hidden(
        self, tokens_BS: jax.Array, mode: Mode = "train", *, segment_ids: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, Aux]:
        """As `forward`, but with the two factors of the logits: hidden states (B, S, D) and output weights (D, V).

        The product is before `logit_softcap`.
        """
        out = ("batch", "sequence", "hidden"), (None if self.config.tied else "embed", "vocab"), ()
        if segment_ids is not None and (problem := _segments_problem(segment_ids, tokens_BS)):
            raise ConfigError(problem)
        call = lambda model, *arrays: model._hidden(mode, *arrays)  # noqa: E731
        return on_auto_axes(call, self, tokens_BS, segment_ids, out=out, axes=self.config.axes, mode=mode)

    def _hidden(
        self, mode: Mode, tokens_BS: jax.Array, segment_ids_BS: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, Aux]:
        config, (x_BSD, table_VD) = self.config, self._embed(tokens_BS, mode)
        # A kernel of attention contains dots, but is one opaque primitive.
        also = is_fused_attention if config.attention != "xla" else None
        call = lambda layer, x_BSD, kind: layer(x_BSD, mode, segment_ids_BS, kind)  # noqa: E731
        x_BSD, aux = call_layers(
            call, self.layers, x_BSD, config.remat, also=also, scan=config.scan, kinds=config.kinds
        )
        x_BSD = self._normed(x_BSD)
        return x_BSD, self._output_weights(table_VD, x_BSD), aux

    def _normed(self, x_BSD: jax.Array) -> jax.Array:
        x_BSD, scaling = self.norm(x_BSD), self.config.logits_scaling
        return x_BSD if scaling == 1 else (x_BSD / scaling).astype(x_BSD.dtype)

    def _embed(self, tokens_BS: jax.Array, mode: Mode) -> tuple[jax.Array, jax.Array]:
        """Embedded tokens (B, S, D), and the table (V, D)."""
        axes = self.config.axes
        # The table stays split over the vocabulary: each shard looks up its rows, and a sum combines them.
        table_VD = self.embed.embedding[...].astype(self.config.dtype)
        table_VD = constrain(table_VD, ("vocab", None), axes=axes, mode=mode)
        x_BSD = lookup(table_VD, tokens_BS)
        if self.config.embedding_scale != 1:
            x_BSD = x_BSD * jnp.asarray(self.config.embedding_scale, x_BSD.dtype)
        return constrain(x_BSD, (*token_dims(mode), "hidden"), axes=axes, mode=mode), table_VD

    def _output_weights(self, table_VD: jax.Array, x_BSD: jax.Array) -> jax.Array:
        return table_VD.T if self.config.tied else self.head.kernel[...].astype(x_BSD.dtype)

    def prefill(self, tokens_BP: jax.Array, lengths_B: jax.Array, num_slots: int) -> tuple[jax.Array, KVCache]:
        """Logits (B, V) float32 of the token after each prompt, and a cache of the prompts with `num_slots` slots.

        Row b of `tokens_BP` has its prompt in the first `lengths_B[b]` tokens; the others have no effect. B must be a
        multiple of `cache.row_multiple`, P and `num_slots` of `cache.slot_multiple`.
        """
        call = lambda model, *args: model._prefill(*args, num_slots)  # noqa: E731
        logits_BV, keys, values = self._with_logits(call, tokens_BP, lengths_B)
        prompt = jnp.int32(tokens_BP.shape[1])
        used_B = jnp.full(len(tokens_BP), tokens_BP.shape[1], jnp.int32)
        return logits_BV, KVCache(keys, values, jnp.array(lengths_B, jnp.int32), prompt, used_B)

    def decode(self, tokens_B: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Logits (B, V) float32 of the tokens after `tokens_B`, and the cache with them, in its slots `used_B`."""
        call = lambda model, *args: model._decode(*args)  # noqa: E731
        logits_BV, keys, values = self._with_logits(call, tokens_B, cache)
        return logits_BV, replace(cache, keys=keys, values=values, used_B=cache.used_B + 1)

    def _with_logits(self, call: Callable[..., object], *args: PyTree) -> tuple[jax.Array, PyTree, PyTree]:
        """Logits (B, V) of the hidden states (B, 1, D) of `call(self, *args)`, and its keys and values."""
        stored = ("layers",) * self.config.scan + cache_dims(self.config.axes)
        axes, embed = self.config.axes, None if self.config.tied else "embed"
        out = (*token_dims("decode"), "hidden"), (embed, "vocab"), stored, stored
        x_B1D, weights_DV, keys, values = on_auto_axes(call, self, *args, out=out, axes=axes, mode="decode")
        logits_B1V = project(x_B1D, weights_DV, axes, "decode")
        return soft_cap(logits_B1V, self.config.logit_softcap)[:, 0], keys, values

    def _prefill(self, tokens_BP: jax.Array, lengths_B: jax.Array, num_slots: int) -> tuple[PyTree, ...]:
        x_BPD, table_VD = self._embed(tokens_BP, "prefill")
        kinds = self.config.kinds

        def run(layer: DecoderLayer, x_BPD: jax.Array, kind: LayerKind) -> tuple[jax.Array, PyTree]:
            x_BPD, keys, values = layer.prefill(x_BPD, num_slots, kind)
            return x_BPD, (keys, values)

        if self.config.scan:
            calls = [partial(run, kind=kind) for kind in kinds]
            x_BPD, (keys, values) = scan_layers(calls, x_BPD, self.layers)
        else:
            keys, values = [], []
            for i, layer in enumerate(self.layers):
                x_BPD, (k_BTKC, v_BTKC) = run(layer, x_BPD, kinds[i % len(kinds)])
                keys.append(k_BTKC)
                values.append(v_BTKC)
        x_B1D = jnp.take_along_axis(x_BPD, (lengths_B - 1)[:, None, None], axis=1)
        x_B1D = self._normed(constrain(x_B1D, (*token_dims("decode"), "hidden"), axes=self.config.axes, mode="decode"))
        return x_B1D, self._output_weights(table_VD, x_B1D), keys, values

    def _decode(self, tokens_B: jax.Array, cache: KVCache) -> tuple[PyTree, ...]:
        x_B1D, table_VD = self._embed(tokens_B[:, None], "decode")
        keys, values, kinds = cache.keys, cache.values, self.config.kinds
        if self.config.scan:

            def run(part: tuple[jax.Array, DecoderLayer], carry: _Carry, kind: LayerKind) -> tuple[_Carry, None]:
                # The stack is part of the carry, which is updated in place; as a result of the loop it would be copied.
                (x_B1D, keys, values), (index, layer) = carry, part
                return layer.decode(x_B1D, keys, values, cache, index, kind=kind), None

            indices = jnp.arange(self.config.num_layers)
            calls = [partial(run, kind=kind) for kind in kinds]
            (x_B1D, keys, values), _ = scan_layers(calls, (x_B1D, keys, values), (indices, self.layers))
        else:
            keys, values = list(keys), list(values)
            for i, layer in enumerate(self.layers):
                kind = kinds[i % len(kinds)]
                x_B1D, keys[i], values[i] = layer.decode(x_B1D, keys[i], values[i], cache, kind=kind)
        x_B1D = self._normed(x_B1D)
        return x_B1D, self._output_weights(table_VD, x_B1D), keys, values


def make_decoder(config: DecoderConfig, rngs: nnx.Rngs) -> Decoder:
    """Make a Decoder; to be used as `make_model` of a recipe.

    Example:
        >>> from flax_mesh.models import DecoderConfig, make_decoder
        >>> model = nnx.eval_shape(lambda: make_decoder(DecoderConfig(num_layers=2), nnx.Rngs(0)))  # allocates nothing
        >>> len(model.layers)
        2
    """
    return Decoder(config, rngs=rngs)


def _segments_problem(segment_ids: jax.Array, tokens_BS: jax.Array) -> str:
    if getattr(segment_ids, "shape", None) == tokens_BS.shape and jnp.issubdtype(segment_ids.dtype, jnp.integer):
        return ""
    text = array_text(segment_ids) if hasattr(segment_ids, "dtype") else type(segment_ids).__name__
    return f"segment_ids must be integers of the shape of the tokens, {tokens_BS.shape}, got {text}"


def _tokens_of(batch: object, function: str) -> tuple[jax.Array, jax.Array]:
    """Inputs and targets; ConfigError if a recipe's own batches do not have them."""
    arrays = batch if isinstance(batch, Mapping) else {}
    tokens = [arrays.get(name) for name in ("inputs", "targets")]
    if any(x is None or x.ndim != 2 or not jnp.issubdtype(x.dtype, jnp.integer) for x in tokens):
        names = {name: array_text(x) for name, x in arrays.items() if hasattr(x, "dtype")} or type(batch).__name__
        raise ConfigError(
            f"{function} takes a batch with 'inputs' and 'targets', integers of shape (batch, sequence), got {names}; "
            "write a loss_fn for other batches"
        )
    return tokens[0], tokens[1]  # pyright: ignore[reportReturnType] (neither is None)


def next_token_loss(model: Decoder, batch: dict[str, jax.Array]) -> tuple[PyTree, ...]:
    """(summed cross-entropy in nats, number of tokens) of targets (B, S).

    Negative targets do not count, whether -1, -100 or another number. A target at or above the size of the vocabulary
    makes the loss NaN, as an input does.

    If the batch has "segment_ids", integers (B, S), tokens attend only to tokens with the same id: documents that are
    packed into one row do not see each other. The target of the last token of a document is then best set to -1. The id
    of padding is 0.

    With experts (loss_sum, weight, metrics):

        loss_sum = cross-entropy sum + weight * sum over layers of (a load_balance_loss + z router_z_loss)

    with the coefficients a and z of these names in the config, and the values of `router_losses`. Divided by the summed
    weight of all microbatches it is the mean over microbatches, weighted by their number of targets. The metrics are
    weighted likewise: the cross-entropy alone, both losses as means over layers, and expert_load_max of the worst
    layer. Tokens without a target count in the losses of the router, padding (segment 0) does not.

    Example:
        >>> from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss
        >>> model = make_decoder(DecoderConfig(num_layers=1), nnx.Rngs(0))
        >>> tokens = jnp.zeros((2, 8), int)
        >>> loss_sum, weight = next_token_loss(model, {"inputs": tokens, "targets": tokens.at[0].set(-1)})
        >>> int(weight)  # negative targets do not count
        8
    """
    config, (loss, targets_BS, aux) = model.config, _of_targets(cross_entropy, model, batch, "next_token_loss")
    weight = jnp.sum(targets_BS >= 0, dtype=jnp.float32)
    if not aux:
        return loss, weight
    losses = router_losses(aux)
    metrics = {"cross_entropy": loss}
    for name, combine in (("load_balance_loss", jnp.mean), ("router_z_loss", jnp.mean), ("expert_load_max", jnp.max)):
        metrics[name] = weight * combine(losses[name])
    for name in ("load_balance_loss", "router_z_loss"):
        loss = loss + weight * getattr(config, name) * jnp.sum(losses[name])
    return loss, weight, metrics


def token_log_probs(model: Decoder, batch: dict[str, jax.Array]) -> jax.Array:
    """Logarithms of the probabilities of the targets, (B, S) float32; 0 where the target is negative.

    The batch is as for `next_token_loss`, and minus the sum is its cross-entropy. Losses of whole completions are made
    from it, such as the loss of recipes/dpo.py. With `model.loss_chunk`, only the logits of that many tokens per device
    exist at a time; the backward pass computes them again. The losses of routers are not part of it.

    Example:
        >>> from flax_mesh.models import DecoderConfig, make_decoder, token_log_probs
        >>> model = make_decoder(DecoderConfig(num_layers=1), nnx.Rngs(0))
        >>> tokens = jnp.zeros((2, 8), int)
        >>> log_probs = token_log_probs(model, {"inputs": tokens, "targets": tokens.at[0].set(-1)})
        >>> log_probs.shape, (log_probs < 0).sum(axis=1).tolist()
        ((2, 8), [0, 8])
    """
    return -_of_targets(token_losses, model, batch, "token_log_probs")[0]


def scores_at(
    model: Decoder, tokens_BS: jax.Array, positions_BT: jax.Array, targets_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities (B, T) float32 of targets after the tokens at positions, and whether they are the largest."""
    axes, dims = model.config.axes, token_dims("decode")  # no mesh axis splits the second one

    def scores(x_BSD: jax.Array, weights_DV: jax.Array, positions_BT: jax.Array, targets_BT: jax.Array) -> PyTree:
        x_BTD = jnp.take_along_axis(x_BSD, positions_BT[..., None], axis=1)
        x_BTD = constrain(x_BTD, (*dims, "hidden"), axes=axes, mode="decode")
        logits_BTV = soft_cap(project(x_BTD, weights_DV, axes, "decode"), model.config.logit_softcap)
        is_target_BTV = jnp.arange(logits_BTV.shape[-1]) == targets_BT[..., None]
        log_probs_BT = jnp.sum(logits_BTV, axis=-1, where=is_target_BTV) - jax.nn.logsumexp(logits_BTV, axis=-1)
        return log_probs_BT, jnp.argmax(logits_BTV, axis=-1) == targets_BT

    arrays = *model.hidden(tokens_BS)[:2], positions_BT, targets_BT
    return on_auto_axes(scores, *arrays, out=[dims, dims], axes=axes, mode="decode")


def _of_targets(
    losses: Callable[..., jax.Array], model: Decoder, batch: dict[str, jax.Array], name: str
) -> tuple[jax.Array, jax.Array, Aux]:
    """`losses` of the targets of a batch for the function `name`, the targets, and the statistics of the routers."""
    inputs_BS, targets_BS = _tokens_of(batch, name)
    # Not passed as None, since a subclass may not take them.
    packed: dict[str, Any] = {key: batch[key] for key in ("segment_ids",) if key in batch}
    x_BSD, weights_DV, aux = model.hidden(inputs_BS, **packed)
    config = model.config
    options = {"axes": config.axes, "chunk": config.loss_chunk, "cap": config.logit_softcap}
    return losses(x_BSD, weights_DV, targets_BS, **options), targets_BS, aux


def flops_per_token(config: DecoderConfig, num_parameters: int, sequence_length: int) -> float:
    """FLOPs of forward and backward for one token: 6 (N - N_idle) + 6 L D S, with causal attention.

    N_idle are the parameters that a token does not multiply: the embedding of a model with an untied head, and the
    experts that the token is not routed to. S is the sequence length, D = heads * head_dim. Recomputation is not
    counted: this is the numerator of MFU, not of hardware utilization (PaLM, appendix B).

    Example:
        >>> from flax_mesh.models import DecoderConfig, flops_per_token
        >>> f"{flops_per_token(DecoderConfig(), num_parameters=1_000_000, sequence_length=128):.2e}"
        '6.79e+06'
    """
    idle = 0 if config.tied else config.vocab_size * config.hidden_size
    if config.num_experts:
        expert = 3 * config.hidden_size * config.mlp_size
        idle += config.num_layers * (config.num_experts - config.experts_per_token) * expert
    attention = 6 * config.num_layers * config.num_heads * config.head_dim * sequence_length
    return 6.0 * (num_parameters - idle) + attention
