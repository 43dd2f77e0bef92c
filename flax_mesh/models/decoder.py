"""A decoder-only language model in plain NNX: RMSNorm, rotary positions, grouped-query attention, SwiGLU or experts.

Shape letters: B batch, S sequence, D hidden, H query heads, K key-value heads, C head dim, F mlp, V vocab.
Architecture: Llama (Touvron et al. 2023), grouped queries (Ainslie et al. 2023), SwiGLU (Shazeer 2020); with experts as
in Mixtral (Jiang et al. 2024).
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from flax_mesh.axes import Mode
from flax_mesh.errors import ConfigError
from flax_mesh.mesh.context import current_mesh
from flax_mesh.models.attention import is_fused_attention
from flax_mesh.models.cache import STATE_DIMS, KVCache, by_kind, cache_dims
from flax_mesh.models.config import DecoderConfig
from flax_mesh.models.cross_entropy import project
from flax_mesh.models.layer import Block, DecoderLayer, Prediction
from flax_mesh.models.ops.later import later_targets, shifted
from flax_mesh.models.ops.lookup import lookup
from flax_mesh.models.ops.router import Aux, LayersAux, stacked
from flax_mesh.models.ops.scores import soft_cap
from flax_mesh.models.parts import dtypes, linear_options, norm, token_dims
from flax_mesh.models.settings.pattern import LayerKind
from flax_mesh.models.settings.remat import call_layers, parse_remat, remat_parts, scan_blocks, scan_layers
from flax_mesh.sharding.abstract import partitioned
from flax_mesh.sharding.constrain import constrain
from flax_mesh.sharding.explicit import on_auto_axes
from flax_mesh.text import array_text
from flax_mesh.tree import PyTree

_Pair = tuple[jax.Array, jax.Array]  # keys and values, or the states of a delta net


@partitioned(
    rules=[
        (r"embed/embedding$", ("vocab", "embed")),
        (r"attention/(q|gate)/kernel$", ("embed", "heads", "head_dim")),
        (r"attention/(k|v)/kernel$", ("embed", "kv_heads", "head_dim")),
        (r"attention/(q|kv)_up/kernel$", ("embed", "heads", "head_dim")),
        (r"attention/(q|kv)_down/kernel$", ("embed", None)),
        (r"attention/(q|gate)/bias$", ("heads", "head_dim")),
        (r"attention/(k|v)/bias$", ("kv_heads", "head_dim")),
        (r"attention/o/kernel$", ("heads", "head_dim", "embed")),
        (r"attention/sinks$", ("heads",)),
        (r"delta/(q|k|v|gate|beta|decay)/kernel$", ("embed", "heads", None)),
        (r"delta/(q|k|v)_conv$", (None, None, "heads", None)),
        (r"delta/(log_rate|decay_bias)$", ("heads", None)),
        (r"delta/o/kernel$", ("heads", None, "embed")),
        (r"mlp/(gate|up)/kernel$", ("embed", "mlp")),
        (r"mlp/(gate|up)/bias$", ("mlp",)),
        (r"mlp/down/kernel$", ("mlp", "embed")),
        (r"moe/router/kernel$", ("embed", "expert_gate")),
        (r"moe/(gate|up)/kernel$", ("experts", "embed", "mlp")),
        (r"moe/(gate|up)/bias$", ("experts", "mlp")),
        (r"moe/down/kernel$", ("experts", "mlp", "embed")),
        (r"moe/down/bias$", ("experts", "embed")),
        (r"shared_gate/kernel$", ("embed", None)),
        (r"(attention/(o|q_down|kv_down)|mlp/down|moe/router)/bias$|moe/balance$", ()),
        (r"head/kernel$", ("embed", "vocab")),
        (r"projection/kernel$", ("mlp", "embed")),
        (r"norm/scale$", ()),
    ],
    layers=("dense_layers", "layers"),
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
        self.dense_layers = nnx.List([])
        if count := config.dense_layers:
            self.dense_layers, keys = _make_layers(config.of_dense_layers, keys[:count]), keys[count:]
        self.layers = _make_layers(config, keys)
        self.norm = norm(config, rngs)
        if not config.tied:
            self.head = nnx.LinearGeneral(config.hidden_size, config.vocab_size, **linear_options(config, rngs))
        self.predictions = nnx.List([Prediction(config, rngs=rngs) for _ in range(config.prediction_layers)])

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
        return soft_cap(project(x_BSD, weights_DV, self.config.axes, mode), self.config.logit_softcap), stacked(aux)

    def hidden(
        self, tokens_BS: jax.Array, mode: Mode = "train", *, segment_ids: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, LayersAux]:
        """As `forward`, but with the two factors of the logits: hidden states (B, S, D) and output weights (D, V).

        The product is before `logit_softcap`. In a list of layers each layer has a dict of statistics.
        """
        out = ("batch", "sequence", "hidden"), (None if self.config.tied else "embed", "vocab"), ()
        if segment_ids is not None and (problem := _segments_problem(segment_ids, tokens_BS)):
            raise ConfigError(problem)
        call = lambda model, *arrays: model._hidden(mode, *arrays)  # noqa: E731
        return on_auto_axes(call, self, tokens_BS, segment_ids, out=out, axes=self.config.axes, mode=mode)

    def _hidden(
        self, mode: Mode, tokens_BS: jax.Array, segment_ids_BS: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, LayersAux]:
        config, (x_BSD, table_VD) = self.config, self._embed(tokens_BS, mode)
        # A kernel of attention contains dots, but is one opaque primitive.
        also = is_fused_attention if config.attention != "xla" else None
        call = lambda layer, x_BSD, kind: layer(x_BSD, mode, segment_ids_BS, kind)  # noqa: E731
        remat, aux = remat_parts(config.remat, config.num_layers, config.dense_layers), {}
        options = {"also": also, "scan": config.scan, "in_blocks": config.has_blocks}
        for (layers, kinds), text in zip(self._parts(), remat, strict=True):
            x_BSD, aux = call_layers(call, layers, x_BSD, text, kinds=kinds, **options)
        x_BSD = self._normed(x_BSD)
        return x_BSD, self._output_weights(table_VD, x_BSD), aux

    def predict(
        self, x_BSD: jax.Array, tokens_BS: jax.Array, targets_BS: jax.Array, segment_ids: jax.Array | None = None
    ) -> tuple[list[jax.Array], list[jax.Array], list[Aux]]:
        """Of each module of `predictions`, from the result of `hidden`: hidden states, their targets, statistics.

        The product of the hidden states (B, S, D) with the output weights predicts the targets (B, S).
        """
        out = ("batch", "sequence", "hidden"), ("batch", "sequence"), ()
        call = lambda model, *arrays: model._predict(*arrays)  # noqa: E731
        return on_auto_axes(call, self, x_BSD, tokens_BS, targets_BS, segment_ids, out=out, axes=self.config.axes)

    def _predict(
        self, x_BSD: jax.Array, tokens_BS: jax.Array, targets_BS: jax.Array, segment_ids_BS: jax.Array | None
    ) -> tuple[list[jax.Array], list[jax.Array], list[Aux]]:
        states, targets, aux = [], [], []
        also, remat = is_fused_attention if self.config.attention != "xla" else None, parse_remat(self.config.remat)
        for k, module in enumerate(self.predictions, 1):
            later_BSD, _ = self._embed(shifted(tokens_BS, k, 0), "train")
            call = lambda module, x_BSD, kind, later_BSD=later_BSD: module(x_BSD, later_BSD, segment_ids_BS)  # noqa: E731
            x_BSD, of_module = call_layers(call, [module], x_BSD, remat[-1].kind, also=also)
            states.append(self._normed(x_BSD, module.norm))
            targets.append(later_targets(targets_BS, k, segment_ids_BS))
            aux += of_module
        return states, targets, aux

    def _parts(self) -> list[tuple[PyTree, tuple[LayerKind, ...]]]:
        """The lists or stacks of layers in the order of their calls, with the kinds of their layers, which repeat."""
        kinds, count = self.config.kinds, self.config.dense_layers
        if not count:
            return [(self.layers, kinds)]
        turn = count % len(kinds)
        return [(self.dense_layers, kinds), (self.layers, kinds[turn:] + kinds[:turn])]

    def _normed(self, x_BSD: jax.Array, norm: Callable[[jax.Array], jax.Array] | None = None) -> jax.Array:
        x_BSD, scaling = (norm or self.norm)(x_BSD), self.config.logits_scaling
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
        logits_BV, keys, values, states = self._with_logits(call, tokens_BP, lengths_B)
        prompt = jnp.int32(tokens_BP.shape[1])
        lengths_B = constrain(jnp.array(lengths_B, jnp.int32), (None,), axes=self.config.axes, mode="decode")
        return logits_BV, KVCache(keys, values, lengths_B, prompt, jnp.full(len(tokens_BP), prompt), states)

    def decode(self, tokens_B: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Logits (B, V) float32 of the tokens after `tokens_B`, and the cache with them, in its slots `used_B`."""
        call = lambda model, *args: model._decode(*args)  # noqa: E731
        logits_BV, keys, values, states = self._with_logits(call, tokens_B, cache)
        return logits_BV, replace(cache, keys=keys, values=values, states=states, used_B=cache.used_B + 1)

    def _with_logits(self, call: Callable[..., object], *args: PyTree) -> tuple[jax.Array, PyTree, PyTree, PyTree]:
        """Logits (B, V) of the hidden states (B, 1, D) of `call(self, *args)`, and the arrays of its cache."""
        stack, heads = ("layers",) * self.config.scan, self.config.cached(current_mesh())[0]
        stored, axes = (*stack, *cache_dims(self.config.axes, heads)), self.config.axes
        embed = None if self.config.tied else "embed"
        out = (*token_dims("decode"), "hidden"), (embed, "vocab"), stored, stored, (*stack, *STATE_DIMS)
        x_B1D, weights_DV, *cached = on_auto_axes(call, self, *args, out=out, axes=axes, mode="decode")
        logits_B1V = project(x_B1D, weights_DV, axes, "decode")
        return soft_cap(logits_B1V, self.config.logit_softcap)[:, 0], cached[0], cached[1], cached[2]

    def _prefill(self, tokens_BP: jax.Array, lengths_B: jax.Array, num_slots: int) -> tuple[PyTree, ...]:
        x_BPD, table_VD = self._embed(tokens_BP, "prefill")

        def run(layer: DecoderLayer, x_BPD: jax.Array, kind: LayerKind) -> tuple[jax.Array, _Pair]:
            return layer.prefill(x_BPD, lengths_B, num_slots, kind)

        pairs: list[_Pair] = []
        for layers, kinds in self._runs():
            calls = [partial(run, kind=kind) for kind in kinds]
            if not self.config.scan:
                x_BPD, pair = calls[0](layers, x_BPD)
                pairs.append(pair)
            elif self.config.has_blocks:
                x_BPD, stacks = scan_blocks(calls, x_BPD, layers)
                pairs += stacks
            else:
                x_BPD, stack = scan_layers(calls, x_BPD, layers)
                pairs.append(stack)
        x_B1D = jnp.take_along_axis(x_BPD, (lengths_B - 1)[:, None, None], axis=1)
        x_B1D = self._normed(constrain(x_B1D, (*token_dims("decode"), "hidden"), axes=self.config.axes, mode="decode"))
        return x_B1D, self._output_weights(table_VD, x_B1D), *by_kind(pairs, self._kinds_of_pairs())

    def _decode(self, tokens_B: jax.Array, cache: KVCache) -> tuple[PyTree, ...]:
        x_B1D, table_VD = self._embed(tokens_B[:, None], "decode")
        pairs, first = cache.pairs(self._kinds_of_pairs()), 0

        def run(part: tuple[jax.Array, DecoderLayer], carry: PyTree, kind: LayerKind, at: int) -> tuple[PyTree, None]:
            # The stacks are part of the carry, which is updated in place; as a result of the loop they would be copied.
            (x_B1D, pairs), (index, layer) = carry, part
            x_B1D, pair = layer.decode(x_B1D, pairs[at], cache, index, kind)
            return (x_B1D, [*pairs[:at], pair, *pairs[at + 1 :]]), None

        for layers, kinds in self._runs():
            if not self.config.scan:
                x_B1D, pairs[first] = layers.decode(x_B1D, pairs[first], cache, None, kinds[0])
                first += 1
                continue
            count = len(kinds) if self.config.has_blocks else 1
            calls = [partial(run, kind=kind, at=i % count) for i, kind in enumerate(kinds)]
            stack = jnp.arange(len(pairs[first][0])), layers
            carry = x_B1D, pairs[first : first + count]
            if self.config.has_blocks:
                layers_of = lambda part: [(part[0], layer) for layer in part[1].each]  # noqa: E731
                carry, _ = scan_blocks(calls, carry, stack, layers_of)
            else:
                carry, _ = scan_layers(calls, carry, stack)
            x_B1D, pairs[first : first + count] = carry
            first += count
        x_B1D = self._normed(x_B1D)
        return x_B1D, self._output_weights(table_VD, x_B1D), *by_kind(pairs, self._kinds_of_pairs())

    def _runs(self) -> list[tuple[PyTree, tuple[LayerKind, ...]]]:
        """Stacks with the kinds of their layers, which repeat; or single layers, each with its kind."""
        if self.config.scan:
            return self._parts()
        runs = []
        for layers, kinds in self._parts():
            each = [layer for block in layers for layer in block.each] if self.config.has_blocks else layers
            runs += [(layer, (kinds[i % len(kinds)],)) for i, layer in enumerate(each)]
        return runs

    def _kinds_of_pairs(self) -> list[LayerKind]:
        """A kind for every pair of arrays in a cache."""
        each = [kinds if self.config.has_blocks else kinds[:1] for _, kinds in self._runs()]
        return [kind for kinds in each for kind in kinds]


def _make_layers(config: DecoderConfig, keys: jax.Array) -> PyTree:
    make = lambda key: DecoderLayer(config, rngs=nnx.Rngs(params=key))  # noqa: E731
    if config.has_blocks:
        make, keys = partial(Block, config), keys.reshape(-1, len(config.kinds))
    return nnx.vmap(make)(keys) if config.scan else nnx.List([make(key) for key in keys])


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
