"""Models that differ in the use of parameters: tied, shared, borrowed, frozen, unused, regularized, averaged."""

import jax
import jax.numpy as jnp
from flax import nnx

from tests.mpmd.zoo.base import WIDTH, Case, Decoder, language_loss, squared_loss, text, vectors


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.out(jnp.tanh(self.linear(x)))


class Model(Decoder):
    layer, tied = Layer, True


class BorrowedKernel(Model):
    """The head projects with a kernel of the first layer, which the last stage therefore needs as well."""

    def run(self, x):
        return super().run(x) @ self.layers[0].linear.kernel


class Positions(Model):
    """Tables computed once: learned positions for all layers, a mask from the batch, constant slopes."""

    def __init__(self):
        super().__init__()
        self.positions = nnx.Param(0.1 * jax.random.normal(jax.random.key(7), (6, WIDTH)))

    def __call__(self, tokens):
        x, table = self.embed(tokens), jnp.sin(self.positions[...])
        mask = jnp.tril(jnp.ones((6, 6))) * (tokens % 4 > 0)[:, None]
        slopes = jnp.exp2(-jnp.arange(6.0))
        weights = jax.nn.softmax(jnp.where(mask > 0, -slopes, -1e9))
        for layer in self.layers:
            x = layer(x + table) + weights @ x
        return self.embed.attend(x)


class Unused(Model):
    """A skipped layer, a head that is never called, and a parameter used only under stop_gradient."""

    def __init__(self):
        super().__init__(5)
        self.old_head = nnx.Linear(WIDTH, 3, rngs=nnx.Rngs(1))
        self.target = nnx.Param(jnp.ones((WIDTH,)))

    def run(self, x):
        for i in (0, 1, 3, 4):
            x = self.layers[i](x)
        return x * jax.lax.stop_gradient(self.target[...])


UNUSED = ("layers/2/linear/kernel", "layers/2/linear/bias", "layers/2/out/kernel")
UNUSED += ("old_head/kernel", "old_head/bias", "target")


def lora(rank: int = 2) -> Model:
    """A model with adapters added to its layers after construction."""
    model, rngs = Model(), nnx.Rngs(9)
    for layer in model.layers:
        adapted = nnx.LoRA(WIDTH, rank, WIDTH, base_module=layer.linear, rngs=rngs)
        setattr(layer, "linear", adapted)  # noqa: B010 (another type than the class has)
    return model


def frozen_leaves(path, _):
    """Selects the kernels of the last three layers."""
    return path[0] == "layers" and path[1] > 0 and path[-1] == "kernel"


def regularised_loss(model, batch):
    """Weight decay in the loss, which therefore depends on every parameter of every stage."""
    loss, weight, metrics = language_loss(model, batch)
    squares = sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(nnx.state(model, nnx.Param)))
    return loss + 1e-3 * weight * squares, weight, metrics | {"squares": squares}


class Average(nnx.Variable):
    """A running average, as used for codes and activations."""


class AveragingLayer(Layer):
    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.average = Average(jnp.zeros((WIDTH,)))

    def __call__(self, x):
        y = super().__call__(x)
        self.average[...] = 0.9 * self.average[...] + 0.1 * jax.lax.stop_gradient(y - x).mean(0)
        return y - 0.1 * self.average


class Averages(nnx.Module):
    """A custom Variable type that changes, in the layers and outside. One variable is read before it is written."""

    def __init__(self, depth: int = 4):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([AveragingLayer(rngs) for _ in range(depth)])
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.first, self.last = Average(jnp.zeros((WIDTH,))), Average(jnp.ones(()))

    def __call__(self, x):
        self.calls[...] += 1
        scale = self.last[...]
        self.first[...] = 0.9 * self.first[...] + 0.1 * x.mean(0)
        for layer in self.layers:
            x = layer(x)
        self.last[...] = 0.5 * scale + 0.5 * jax.lax.stop_gradient(jnp.mean(x**2)) / jnp.maximum(self.calls[...], 1)
        return x / (0.1 + scale)


class DataDependentLoop(Model):
    """A loop whose number of iterations depends on the batch."""

    def __call__(self, tokens):
        rounds = jnp.max(tokens) % 3 + 1
        norm = jax.lax.while_loop(lambda c: c[0] < rounds, lambda c: (c[0] + 1, c[1] * 0.5), (0, jnp.ones(())))[1]
        return self.embed.attend(self.run(self.embed(tokens)) * norm)


CASES = [
    Case("data_dependent_loop", DataDependentLoop, language_loss, text),
    Case("tied_embedding", Model, language_loss, text),
    Case("borrowed_kernel", BorrowedKernel, language_loss, text),
    Case("position_tables", Positions, language_loss, text),
    Case("unused_parameters", Unused, language_loss, text, unused=UNUSED),
    Case("lora", lora, language_loss, text, wrt=nnx.LoRAParam),
    Case("frozen", Model, language_loss, text, wrt=nnx.All(nnx.Param, frozen_leaves)),
    Case("regularised", Model, regularised_loss, text),
    Case("averages", Averages, squared_loss, vectors),
]
