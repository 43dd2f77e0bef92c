"""Models with variables that change, and models whose activations are complex, of few bits, or random."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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


class RememberingLayer(Layer):
    """Reads its input of the previous microbatch, as in Transformer-XL."""

    decay = 0.0

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.recall, self.memory = nnx.Linear(WIDTH, WIDTH, rngs=rngs), Memory(jnp.zeros((ROWS, WIDTH)))

    def __call__(self, x):
        y = x + jnp.tanh(self.linear(x) + self.recall(self.memory[...]))
        self.memory[...] = self.decay * self.memory[...] + jax.lax.stop_gradient(x) if self.decay else x
        return y


class DecayingLayer(RememberingLayer):
    decay = 0.5


class Remembering(Model):
    layer = RememberingLayer


class Decaying(Model):
    layer = DecayingLayer


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
    """All layers read statistics of the first one: those of the previous microbatch, then those of this one."""

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
    """A parameter that all layers use and that the call clips: every stage clips its own copy."""

    def __init__(self):
        super().__init__()
        self.kernel = nnx.Param(0.3 * jax.random.normal(jax.random.key(3), (WIDTH, WIDTH)))

    def __call__(self, x):
        self.kernel[...] = jnp.clip(self.kernel[...], -0.2, 0.2)
        for layer in self.layers:
            x = layer(x) + jnp.sin(x @ self.kernel)
        return x


class Teacher(nnx.Module):
    """A moving average of the model, which computes the targets of the last stage."""

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


TABLE = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH) / 64


class Assigned(Model):
    """Variables whose new values no equation computes: a literal, a constant, an input, parameters that are copied."""

    def __init__(self):
        super().__init__()
        self.flag, self.constant = Memory(jnp.asarray(False)), Memory(jnp.zeros((ROWS, WIDTH)))
        self.input, self.target = Memory(jnp.zeros((ROWS, WIDTH))), Memory(jnp.zeros((WIDTH, WIDTH)))
        self.copies = nnx.List([Memory(jnp.zeros((WIDTH, WIDTH))) for _ in range(2)])  # nothing reads them

    def __call__(self, x):
        first, *_, last = (layer.linear.kernel for layer in self.layers)
        y = jnp.where(self.flag[...], x, 2 * x) + self.constant[...] + self.input[...]
        y = super().__call__(y) + x @ self.target[...]
        self.flag[...], self.constant[...] = jnp.asarray(True), jnp.asarray(TABLE)
        self.input[...], self.target[...] = x, last[...]
        self.copies[0][...], self.copies[1][...] = last[...], first[...]
        return y


class Swapped(Model):
    """Pairs of variables that change places: of the first stage, in a jit, of two stages, and without a reader."""

    def __init__(self):
        super().__init__()
        size = (ROWS, WIDTH)
        self.pairs = nnx.List([nnx.List([Memory(jnp.zeros(size)), Memory(jnp.ones(size))]) for _ in range(4)])
        self.delayed = nnx.List([Memory(jnp.zeros(size)) for _ in range(2)])  # the last results; nothing reads them

    def __call__(self, x):
        plain, in_jit, across, unread = self.pairs
        y = super().__call__(x + plain[0][...] - 0.5 * in_jit[0][...] + across[0][...]) + across[1][...]
        for a, b in (plain, across, unread):
            a[...], b[...] = b[...], a[...]
        a, b = in_jit
        a[...], b[...] = jax.jit(lambda a, b: (b, a))(a[...], b[...])
        self.delayed[0][...], self.delayed[1][...] = self.delayed[1][...], y
        return y


class SpectralLayer(Layer):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.SpectralNorm(nnx.Linear(WIDTH, WIDTH, rngs=rngs), rngs=rngs)


class Spectral(Model):
    layer = SpectralLayer


class Fourier(Model):
    """A complex residual stream, with layers that act on its real part."""

    def __call__(self, x):
        z = jnp.fft.fft(x)
        for layer in self.layers:
            z = z * jnp.tanh(layer(z.real))
        return jnp.abs(z)


class ComplexState(Model):
    """A diagonal state-space model: real parameters, a complex state."""

    def __call__(self, x):
        z = x + 0j
        for layer in self.layers:
            decay = jax.lax.complex(-jnp.exp(layer.linear.kernel[1]), layer.linear.kernel[0])
            z = jnp.exp(decay) * z + layer.linear(x)
        return (z * jnp.conj(z)).real


class ComplexLayer(Layer):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, param_dtype=jnp.complex64, rngs=rngs)

    def __call__(self, x):
        y = self.linear(x)
        return x + y / (1 + jnp.abs(y))  # tanh has poles in the complex plane


class ComplexParameters(Model):
    layer = ComplexLayer

    def __call__(self, x):
        return jnp.abs(super().__call__(x))


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
    Case("memory_of_the_input", Remembering, squared_loss, vectors),
    Case("decaying_memory", Decaying, squared_loss, vectors),
    Case("statistics_of_the_first_layer", Following, squared_loss, vectors),
    Case("clipped_kernel", ClippedKernel, squared_loss, vectors),
    Case("teacher", Teacher, teacher_loss, vectors, layers="student/layers"),
    Case("unread_variables", Unread, squared_loss, vectors),
    Case("spectral_norm", Spectral, squared_loss, vectors),
    Case("assigned", Assigned, squared_loss, vectors),
    Case("swapped", Swapped, squared_loss, vectors),
    Case("changed_parameters", lambda: changed.Net(nnx.Rngs(0)), changed.loss_fn, changed.make_batch),
    Case("changed_stack", lambda: changed.Stack(nnx.Rngs(0)), changed.loss_fn, changed.make_batch),
    Case("fourier", Fourier, squared_loss, vectors),
    Case("complex_state", ComplexState, squared_loss, vectors),
    Case("complex_parameters", ComplexParameters, squared_loss, vectors),
    Case("bfloat16_stream", Half, squared_loss, vectors),
    Case("empty_parameters_and_keys", Noisy, noisy_loss, vectors_and_keys, unused=("empty/0", "empty/1")),
]
