"""Models that differ in how their layers are called: methods, orders, keywords, pytrees, remat, jit, scan."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from tests.mpmd.zoo.base import WIDTH, Case, Decoder, cross_entropy, language_loss, squared_loss, text, vectors


class Block(nnx.Module):
    """Pre-norm residual block with a method besides `__call__`."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))

    def mix(self, x, *, strength=1.0):
        return x + strength * jnp.cumsum(self(x), axis=1) / x.shape[1]


class Language(Decoder):
    layer = Block


class ByMethod(Language):
    """Another method than `__call__`, in another order than in the list."""

    def run(self, x):
        for i in (2, 0, 3):
            x = self.layers[i].mix(x, strength=0.5)
        return self.layers[1](x)


class ListedTwice(Language):
    """Two groups of shared layers, as in ALBERT."""

    def make_layers(self, depth, rngs):
        first, second = Block(rngs), Block(rngs)
        return nnx.List([first, first, second, second])


class ListedAlternating(Language):
    """Layers a, b, a, b: no split has both calls of a in one stage."""

    def make_layers(self, depth, rngs):
        first, second = Block(rngs), Block(rngs)
        return nnx.List([first, second] * (depth // 2))


class Looped(Language):
    """Calls the entire stack twice, as in a looped transformer, and every layer twice in a row."""

    def run(self, x):
        for layer in [*self.layers, *self.layers]:
            x = layer(layer(x))
        return x


class PairBlock(nnx.Module):
    """Two streams, an optional value and an accumulated one in a dict, as in protein folding models."""

    def __init__(self, rngs: nnx.Rngs):
        self.single, self.pair = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, state: dict[str, Any]) -> dict[str, Any]:
        single, bias = state["single"], state["bias"]
        pair = self.pair(state["pair"] if bias is None else state["pair"] + bias)
        single = single + jnp.tanh(self.single(single)) * jax.nn.sigmoid(pair)
        return {"single": single, "pair": pair, "bias": None, "norms": (*state["norms"], jnp.sum(single**2, (1, 2)))}


class Dicts(Language):
    layer = PairBlock

    def __call__(self, tokens):
        x = self.embed(tokens)
        state = {"single": x, "pair": jnp.sin(x), "bias": jnp.arange(1.0 * WIDTH), "norms": ()}
        for layer in self.layers:
            state = layer(state)
        return self.head(self.norm(state["single"])), jnp.stack(state["norms"], -1)


def dict_loss(model, batch):
    logits, norms = model(batch["tokens"])
    loss, weight, metrics = cross_entropy(logits, batch)
    return loss + 1e-3 * norms.sum(), weight, metrics | {"norms": norms.sum(), "first": norms[:, 0].sum()}


class RematModel(Language):
    """All layers are in a remat, which is in a jit."""

    @nnx.jit
    @nnx.remat
    def __call__(self, tokens):
        return super().__call__(tokens)


class CheckpointedGroups(Language):
    """One checkpoint for every three layers, so that stage boundaries are inside checkpoints."""

    def run(self, x):
        for at in range(0, len(self.layers), 3):

            def group(x, at=at):
                for layer in self.layers[at : at + 3]:
                    x = layer(x)
                return x

            x = jax.checkpoint(group)(x)
        return x


class PerExample(Language):
    """Layers for one sequence, mapped over the batch at each call."""

    def run(self, x):
        for layer in self.layers:
            x = nnx.vmap(lambda layer, x: layer.mix(x[None])[0], in_axes=(None, 0))(layer, x)
        return x


class Attributes(nnx.Module):
    """Layers without a list; arrays of a stack would share their leading size, as in `norm` and `second`."""

    def __init__(self):
        rngs = nnx.Rngs(params=1, dropout=2)
        self.first, self.second = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), nnx.Linear(2 * WIDTH, 2 * WIDTH, rngs=rngs)
        self.norm, self.out = nnx.LayerNorm(2 * WIDTH, rngs=rngs), nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        wide = jnp.tanh(self.first(x))
        return self.out(self.norm(wide + jnp.tanh(self.second(wide))))


class ListedElsewhere(nnx.Module):
    """In the state, the first half of the layers is under `early`."""

    def __init__(self):
        rngs = nnx.Rngs(params=1)
        layers = [nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)]
        self.early, self.layers = nnx.List(layers[:2]), nnx.List(layers)

    def __call__(self, x):
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return x


class Scanned(Language):
    """Layers created by nnx.vmap and called in nnx.scan, with remat inside."""

    def make_layers(self, depth, rngs):
        @nnx.split_rngs(splits=depth)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs):
            return self.layer(rngs)

        return stack(rngs)

    def run(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x, layer):
            return nnx.remat(lambda layer, x: layer(x))(layer, x)

        return forward(x, self.layers)


class NoisyBlock(Block):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.drop, self.average = nnx.Dropout(0.2, rngs=rngs), nnx.BatchStat(jnp.zeros((WIDTH,)))

    def __call__(self, x):
        y = self.drop(super().__call__(x) - x)
        self.average[...] = 0.9 * self.average[...] + 0.1 * jax.lax.stop_gradient(y).mean((0, 1))
        return x + y - self.average


class ScannedNoisy(Scanned):
    """Random streams and variables that change inside the stack."""

    layer = NoisyBlock


class ScannedInJax(Scanned):
    """jax.lax.scan over the state of the stack, with a constant, a second scanned input and an output per layer."""

    def __call__(self, tokens):
        graphdef, stacked = nnx.split(self.layers)
        mask = (tokens > 2)[..., None]
        scales = jnp.linspace(0.5, 1.0, 4)

        def body(x, layer):
            state, scale = layer
            y = x + scale * mask * (nnx.merge(graphdef, state)(x) - x)
            return y, jnp.mean((y - x) ** 2, (1, 2))

        x, moved = jax.lax.scan(body, self.embed(tokens), (stacked, scales))
        return self.head(self.norm(x)), moved


def moved_loss(model, batch):
    logits, moved = model(batch["tokens"])
    loss, weight, metrics = cross_entropy(logits, batch)
    return loss + 0.1 * moved.sum(), weight, metrics | {"moved_last": moved[-1].sum()}


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x):
        h = linen.Dense(2 * x.shape[-1])(linen.LayerNorm()(x))
        return x + linen.Dense(x.shape[-1])(linen.silu(h))


class LinenLayers(Language):
    def make_layers(self, depth, rngs):
        x = jnp.zeros((1, 1, WIDTH))
        return nnx.List([nnx.bridge.ToNNX(LinenBlock(), rngs=rngs).lazy_init(x) for _ in range(depth)])


class SowingBlock(Block):
    def __call__(self, x):
        y = super().__call__(x)
        self.sow(nnx.Intermediate, "change", jnp.sum((y - x) ** 2))
        return y


class Sowing(Language):
    layer = SowingBlock


def popped_loss(model, batch):
    """As in the Flax guides: the values that the layers sow are popped after the call."""
    loss, weight, metrics = language_loss(model, batch)
    change = sum(jax.tree.leaves(nnx.pop(model, nnx.Intermediate)))
    return loss + 1e-3 * change, weight, metrics | {"change": change}


def captured_loss(model, batch):
    """The newer API: nnx.capture returns the values that the layers sow, and the model does not store them."""
    forward: Any = nnx.capture(nnx.Intermediate)(lambda model: model(batch["tokens"]))
    logits, sown = forward(model)
    loss, weight, metrics = cross_entropy(logits, batch)
    change = sum(jax.tree.leaves(sown))
    return loss + 1e-3 * change, weight, metrics | {"change": change}


def sequential() -> nnx.Module:
    """Layers and functions in one list. The model itself is the list."""
    rngs = nnx.Rngs(3)
    parts = [f for _ in range(4) for f in (nnx.Linear(WIDTH, WIDTH, rngs=rngs), jax.nn.gelu)]
    return nnx.Sequential(nnx.LayerNorm(WIDTH, rngs=rngs), *parts, nnx.Linear(WIDTH, WIDTH, rngs=rngs))


CASES = [
    Case("residual", Language, language_loss, text),
    Case("by_method", ByMethod, language_loss, text),
    Case("listed_twice", ListedTwice, language_loss, text),
    Case("listed_alternating", ListedAlternating, language_loss, text),
    Case("looped", Looped, language_loss, text),
    Case("dicts", Dicts, dict_loss, text),
    Case("remat_model", RematModel, language_loss, text),
    Case("checkpointed_groups", lambda: CheckpointedGroups(6), language_loss, text),
    Case("per_example", PerExample, language_loss, text),
    Case("attributes", Attributes, squared_loss, vectors, layers=("first", "second", "norm", "out")),
    Case("listed_elsewhere", ListedElsewhere, squared_loss, vectors),
    Case("scanned", Scanned, language_loss, text),
    Case("scanned_noisy", ScannedNoisy, language_loss, text),
    Case("scanned_in_jax", ScannedInJax, moved_loss, text),
    Case("linen_layers", LinenLayers, language_loss, text),
    Case("sow_popped", Sowing, popped_loss, text),
    Case("sow_captured", Sowing, captured_loss, text),
    Case("sequential", sequential, squared_loss, vectors),
]
