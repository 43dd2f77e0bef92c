"""Models with variables that change, and models whose activations are complex, of few bits, or random."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tests.mpmd.zoo.base import WIDTH, Case, squared_loss, vectors
from tests.step import changed

ROWS = 2  # of a microbatch


class Memory(nnx.Variable):
    """A value of the previous microbatch."""


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


class Model(nnx.Module):
    layer: type[Layer] = Layer

    def __init__(self, depth: int = 4):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([self.layer(rngs) for _ in range(depth)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Counting(Model):
    """All layers read a counter, which is changed before them; another one is changed after them."""

    def __init__(self):
        super().__init__()
        self.before, self.after = Memory(jnp.zeros(())), Memory(jnp.zeros(()))

    def __call__(self, x):
        self.before[...] += 1
        for layer in self.layers:
            x = layer(x) * (1 + 0.1 * self.before[...]) / (1 + 0.3 * self.after[...])
        self.after[...] += self.before[...]
        return x


class Following(Model):
    """All layers read statistics of the first layer, from the previous microbatch and then from this one."""

    def __init__(self):
        super().__init__()
        self.mean = Memory(jnp.zeros((WIDTH,)))

    def __call__(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x - 0.5 * self.mean[...])
            if i == 0:
                previous = self.mean[...]
                self.mean[...] = 0.5 * previous + 0.5 * jax.lax.stop_gradient(x).mean(0)
            x = x + 0.1 * previous
        return x


class ClippedKernel(Model):
    """A parameter that all layers use and that the call clips: every stage clips a separate copy."""

    def __init__(self):
        super().__init__()
        self.kernel = nnx.Param(0.3 * jax.random.normal(jax.random.key(3), (WIDTH, WIDTH)))

    def __call__(self, x):
        self.kernel[...] = jnp.clip(self.kernel[...], -0.2, 0.2)
        for layer in self.layers:
            x = layer(x) + jnp.sin(x @ self.kernel)
        return x


class Teacher(nnx.Module):
    """A model with a frozen copy, which computes targets: a moving average of the model, or a reference model."""

    def __init__(self):
        self.student, self.teacher = Model(), Model()
        for layer in self.teacher.layers:
            linear: Any = layer.linear
            linear.kernel, linear.bias = Memory(linear.kernel[...]), Memory(linear.bias[...])


def teacher_loss(model, batch):
    target = model.teacher(batch["x"])
    found = jnp.sum((model.student(batch["x"]) - target) ** 2)
    for of_teacher, of_student in zip(model.teacher.layers, model.student.layers, strict=True):
        for name in ("kernel", "bias"):
            old, new = getattr(of_teacher.linear, name), getattr(of_student.linear, name)
            old[...] = 0.9 * old[...] + 0.1 * jax.lax.stop_gradient(new[...])
    return found, batch["x"].shape[0]


def reference_loss(model, batch):
    """As in direct preference optimization: x is preferred to y, compared with the reference model."""
    margin = [jnp.sum(net(batch["x"]) - net(batch["y"]), -1) for net in (model.student, model.teacher)]
    return -jnp.sum(jax.nn.log_sigmoid(margin[0] - margin[1])), batch["x"].shape[0]


class UnreadLayer(Layer):
    """Writes variables that no layer reads: of its input, of its output, a constant, and another variable."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.input, self.output = Memory(jnp.zeros((WIDTH,))), Memory(jnp.zeros((WIDTH,)))
        self.constant, self.copy = Memory(jnp.zeros((WIDTH,))), Memory(jnp.zeros((WIDTH,)))

    def __call__(self, x):
        y = super().__call__(x)
        self.copy[...] = self.output[...]
        self.input[...], self.output[...] = (jax.lax.stop_gradient(z).mean(0) for z in (x, y))
        self.constant[...] = jnp.ones((WIDTH,))
        return y


class Unread(Model):
    layer = UnreadLayer


class SpectralLayer(Layer):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.SpectralNorm(nnx.Linear(WIDTH, WIDTH, rngs=rngs), rngs=rngs)


class Spectral(Model):
    layer = SpectralLayer


class HalfLayer(Layer):
    """Pre-norm in float32 of a residual stream in bfloat16, as in language models."""

    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(WIDTH, dtype=jnp.float32, rngs=rngs)
        self.up = nnx.Linear(WIDTH, WIDTH, dtype=jnp.bfloat16, use_bias=False, rngs=rngs)

    def __call__(self, x):
        added = self.up(self.norm(x).astype(x.dtype))
        return (x.astype(jnp.float32) + added.astype(jnp.float32)).astype(x.dtype)


class Half(Model):
    layer = HalfLayer

    def __call__(self, x):
        return super().__call__(x.astype(jnp.bfloat16)).astype(jnp.float32)


class Noisy(Model):
    """Parameters without elements; the batch has a random key for every row, and a None."""

    def __init__(self):
        super().__init__()
        self.empty = nnx.List([nnx.Param(jnp.zeros((0, WIDTH))) for _ in range(2)])


def noisy_loss(model, batch):
    noise = jax.vmap(lambda key: jax.random.normal(key, (WIDTH,)))(batch["key"])
    return squared_loss(model, batch | {"x": batch["x"] + noise})


def vectors_and_keys(rows: int) -> dict[str, Any]:
    return vectors(rows) | {"key": jax.random.split(jax.random.key(1), rows), "extra": None}


CASES = [
    Case("counter", Counting, squared_loss, vectors),  # the first one, which runs by default, is cheap
    Case("statistics_of_the_first_layer", Following, squared_loss, vectors),
    Case("clipped_kernel", ClippedKernel, squared_loss, vectors),
    Case("teacher", Teacher, teacher_loss, vectors, layers="student/layers"),
    Case("reference", Teacher, reference_loss, vectors, layers="student/layers"),
    Case("unread_variables", Unread, squared_loss, vectors),
    Case("spectral_norm", Spectral, squared_loss, vectors),
    Case("changed_parameters", lambda: changed.Net(nnx.Rngs(0)), changed.loss_fn, changed.make_batch),
    Case("changed_stack", lambda: changed.Stack(nnx.Rngs(0)), changed.loss_fn, changed.make_batch),
    Case("bfloat16_stream", Half, squared_loss, vectors),
    Case("empty_parameters_and_keys", Noisy, noisy_loss, vectors_and_keys, unused=("empty/0", "empty/1")),
]
