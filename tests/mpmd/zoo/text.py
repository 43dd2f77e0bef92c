"""Sequence models: decoders, encoder-decoders, dropout, random streams, recurrent layers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flax import nnx

from flax_mesh.models import make_decoder, next_token_loss
from tests.mpmd.runtime.pipelines import CONFIG, decoder_batch
from tests.mpmd.zoo.base import LENGTH, VOCAB, WIDTH, Case, Decoder, cross_entropy, language_loss, text
from tests.mpmd.zoo.side_values import HEADS, MLP, Attention, causal


class CrossLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attend_self = nnx.MultiHeadAttention(HEADS, WIDTH, use_bias=False, decode=False, rngs=rngs)
        self.attend_other = nnx.MultiHeadAttention(HEADS, WIDTH, use_bias=False, decode=False, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(3)])
        self.mlp = MLP(rngs)

    def __call__(self, x, memory, memory_mask):
        x = x + self.attend_self(self.norms[0](x), mask=causal())
        x = x + self.attend_other(self.norms[1](x), memory, mask=memory_mask)
        return x + self.mlp(self.norms[2](x))


class SelfLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attention, self.mlp = Attention(rngs), MLP(rngs)
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.norm1(x), mask=mask)[0]
        return x + self.mlp(self.norm2(x))


class Half(nnx.Module):
    """Encoder or decoder of a translation model."""

    def __init__(self, layer: Callable[[nnx.Rngs], Any], depth: int, rngs: nnx.Rngs):
        self.positions = nnx.Param(0.1 * rngs.params.normal((LENGTH, WIDTH)))
        self.layers = nnx.List([layer(rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, x, *context):
        x = x + self.positions
        for layer in self.layers:
            x = layer(x, *context)
        return self.norm(x)


class Translator(nnx.Module):
    """Encoder and decoder share one table for source, target and output. Every decoder layer attends to the encoder."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.shared = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.encoder, self.decoder = Half(SelfLayer, 3, rngs), Half(CrossLayer, 3, rngs)

    def __call__(self, source, target):
        mask = (source % 5 != 0)[:, None, None]
        memory = self.encoder(self.shared(source), mask)
        return self.shared.attend(self.decoder(self.shared(target), memory, mask))


def translation_loss(model, batch):
    source = batch["tokens"][:, ::-1]
    return cross_entropy(model(source, batch["tokens"]), batch)


class DropLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attention, self.mlp = Attention(rngs, rate=0.2), MLP(rngs)
        self.norm, self.drop = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        x = x + self.drop(self.attention(self.norm(x), mask=causal())[0])
        return x + self.drop(self.mlp(x))  # the same Dropout again, with its next counter


class Dropping(Decoder):
    layer = DropLayer

    def __init__(self):
        rngs = nnx.Rngs(params=0, dropout=1)
        super().__init__(rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def run(self, x):
        return self.drop(super().run(self.drop(x)))


class OneStream(Decoder):
    """One random stream for the entire model, whose counter increases through all layers. Skips layers at random."""

    layer = SelfLayer

    def __init__(self):
        self.rngs = nnx.Rngs(0, noise=1)
        super().__init__(rngs=self.rngs)

    def run(self, x):
        for layer in self.layers:
            kept = self.rngs.noise.bernoulli(0.8, (x.shape[0], 1, 1))
            x = x + kept / 0.8 * (layer(x, causal()) - x)
            x = x * (1 + 0.1 * self.rngs.noise.normal(x.shape))
        return x


def decoder(name: str, **kinds: Any) -> Case:
    """The decoder of flax_mesh.models."""
    return Case(name, lambda: make_decoder(replace(CONFIG, **kinds), nnx.Rngs(0)), next_token_loss, decoder_batch)


DECODERS = [
    decoder("decoder"),
    decoder("decoder_scanned", scan=True),
    decoder("decoder_remat", remat="full"),
    decoder("decoder_experts_scanned", num_experts=4, scan=True),
    decoder("decoder_untied", tied=False),
    decoder("decoder_periods", scan=True, sliding_window=5, layer_pattern="local,global"),
    decoder("decoder_periods_and_rest", scan=True, sliding_window=5, layer_pattern="local:2,global"),
]
CASES = [
    Case("encoder_decoder", Translator, translation_loss, text, layers=("encoder/layers", "decoder/layers")),
    Case("dropout", Dropping, language_loss, text),
    Case("one_random_stream", OneStream, language_loss, text),
    *DECODERS,
]
