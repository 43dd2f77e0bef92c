"""Complex activations: gradients as in the plain step."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.mpmd.runtime.test_pipeline import compare

pytestmark = pytest.mark.usefixtures("quick_compilation")

WIDTH = 8


def with_schedules(cases, quick):
    """Every case with and without a split backward; those that are not in `quick` are slow."""
    return [
        pytest.param(case, name, marks=() if quick.get(case) == name else pytest.mark.slow)
        for case in cases
        for name in ("1f1b", "zb-h1")
    ]


def batches(count, steps=2):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(2 * count, WIDTH)).astype(np.float32) for _ in range(steps)]


def square_loss(model, x):
    return jnp.sum(jnp.square(model(x))), x.size


def equals_plain_step(cls, name="1f1b", **kinds):
    return compare(lambda: cls(nnx.Rngs(0)), square_loss, batches(3), 3, optax.sgd(0.1), name=name, **kinds)


class Layers(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return x


# Complex activations


class Fourier(Layers):
    """A complex residual stream, with layers that act on its real part."""

    def __call__(self, x):
        z = jnp.fft.fft(self.embed(x))
        for layer in self.layers:
            z = z * jnp.tanh(layer(z.real))
        return jnp.abs(z)


class StateSpace(Layers):
    """A diagonal state-space model: real parameters, a complex state."""

    def __call__(self, x):
        z = self.embed(x) + 0j
        for layer in self.layers:
            decay = jax.lax.complex(-jnp.exp(layer.kernel[1]), layer.kernel[0])
            z = jnp.exp(decay) * z + layer(x)
        return (z * jnp.conj(z)).real


class ComplexParams(Layers):
    """Complex parameters in the embedding, which is outside the layers, and in the layers."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        make = partial(nnx.Linear, WIDTH, WIDTH, param_dtype=jnp.complex64, rngs=rngs)
        self.embed, self.layers = make(), nnx.List([make() for _ in range(2)])

    def __call__(self, x):
        return jnp.abs(super().__call__(x))


COMPLEX = with_schedules([Fourier, StateSpace, ComplexParams], quick={Fourier: "zb-h1", ComplexParams: "1f1b"})


@pytest.mark.parametrize(("cls", "name"), COMPLEX)
def test_complex_activations_have_gradients(cls, name):
    pipeline, _ = equals_plain_step(cls, name)
    (received,) = [v.aval.dtype for v in pipeline.staged.cut(pipeline.staged.example).stages[1].received]
    assert received == jnp.complex64
