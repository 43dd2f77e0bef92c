"""Models whose layers pass more than one value: caches, a shared bias, statistics of experts, integers of the batch."""

import jax
import jax.numpy as jnp
from flax import nnx

from tests.mpmd.zoo.base import LENGTH, VOCAB, WIDTH, Case, Decoder, cross_entropy, language_loss, text

HEADS, HEAD = 2, WIDTH // 2


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, rate: float = 0.0):
        self.qkv = nnx.LinearGeneral(WIDTH, (3, HEADS, HEAD), use_bias=False, rngs=rngs)
        self.out = nnx.LinearGeneral((HEADS, HEAD), WIDTH, axis=(-2, -1), use_bias=False, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x, *, mask=None, bias=None):
        q, k, v = jnp.moveaxis(self.qkv(x), -3, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / HEAD**0.5
        if bias is not None:
            scores = scores + bias
        if mask is not None:
            scores = jnp.where(mask, scores, -1e9)
        weights = self.drop(jax.nn.softmax(scores))
        return self.out(jnp.einsum("bhqk,bkhd->bqhd", weights, v)), (k, v)


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.gate_up = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


def causal(length: int = LENGTH) -> jax.Array:
    return jnp.tril(jnp.ones((length, length), bool))[None, None]


class CachingLayer(nnx.Module):
    """Returns (cache, x) and takes its mask and bias as keyword arguments."""

    def __init__(self, rngs: nnx.Rngs):
        self.attention, self.mlp = Attention(rngs), MLP(rngs)
        self.input_norm, self.post_norm = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, x, *, attention_mask, bias):
        y, cache = self.attention(self.input_norm(x), mask=attention_mask, bias=bias)
        x = x + y
        return cache, x + self.mlp(self.post_norm(x))


class CachingDecoder(nnx.Module):
    """A tied decoder: computes mask and bias once, and returns the caches of all layers with the logits."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embedder = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = nnx.List(CachingLayer(rngs) for _ in range(5))
        self.final_norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x = self.embedder(tokens) * WIDTH**0.5
        bias = -jnp.abs(jnp.arange(LENGTH) - jnp.arange(LENGTH)[:, None]) / 4.0
        mask = causal() & (tokens > 0)[:, None, None]
        caches = []
        for layer in self.layers:
            cache, x = layer(x, attention_mask=mask, bias=bias)
            caches.append(cache)
        logits = self.embedder.attend(self.final_norm(x))
        return 5.0 * jnp.tanh(logits / 5.0), caches


def caching_loss(model, batch):
    logits, caches = model(batch["tokens"])
    loss, weight, metrics = cross_entropy(logits, batch)
    return loss, weight, metrics | {"second_keys": jnp.sum(caches[1][0] ** 2)}


class T5Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, first: bool):
        self.attention, self.mlp, self.norm = Attention(rngs), MLP(rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        self.relative_bias = nnx.Embed(2 * LENGTH, HEADS, rngs=rngs) if first else None

    def __call__(self, x, bias=None):
        if self.relative_bias is not None:
            at = jnp.arange(LENGTH)
            bias = jnp.moveaxis(self.relative_bias(at[:, None] - at + LENGTH), -1, 0)[None]
        x = x + self.attention(self.norm(x), bias=bias)[0]
        return x + self.mlp(x), bias


class FirstLayerBias(Decoder):
    """All layers use the bias of a table in the first layer."""

    def make_layers(self, depth, rngs):
        return nnx.List([T5Layer(rngs, i == 0) for i in range(depth)])

    def run(self, x):
        bias = None
        for layer in self.layers:
            x, bias = layer(x, bias=bias)
        return x


CASES = [
    Case("caching_decoder", CachingDecoder, caching_loss, text),
    Case("first_layer_bias", FirstLayerBias, language_loss, text),
]
