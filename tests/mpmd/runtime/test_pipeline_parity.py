"""Complex activations, variables that are assigned rather than computed, and custom_vjp rules: as in the plain step."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flax_mesh.mpmd.split.assign import is_expensive
from flax_mesh.mpmd.split.jaxpr import trace
from tests.mpmd.runtime.test_pipeline import compare

pytestmark = pytest.mark.usefixtures("quick_unless_slow")

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


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "name"), COMPLEX)
def test_complex_activations_have_gradients(cls, name):
    pipeline, _ = equals_plain_step(cls, name)
    (received,) = [v.aval.dtype for v in pipeline.staged.cut(pipeline.staged.example).stages[1].received]
    assert received == jnp.complex64


# Variables whose new value no equation computes


class Stored(Layers):
    """`before` reads and `after` assigns the variables; both depend on the values of the previous microbatch."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        zeros, ones = np.zeros((2, WIDTH), np.float32), np.ones((2, WIDTH), np.float32)
        self.a, self.b = nnx.BatchStat(jnp.asarray(zeros)), nnx.BatchStat(jnp.asarray(ones))
        self.flag = nnx.BatchStat(jnp.asarray(False))

    def __call__(self, x):
        y = super().__call__(self.before(x))
        self.after(x, y)
        return y

    def before(self, x):
        return x + self.a[...]

    def after(self, x, y):
        raise NotImplementedError


class Literal(Stored):
    def before(self, x):
        return jnp.where(self.flag[...], x, 2 * x)

    def after(self, x, y):
        self.flag[...] = jnp.asarray(True)


class Constant(Stored):
    def after(self, x, y):
        self.a[...] = jnp.asarray(np.arange(2 * WIDTH, dtype=np.float32).reshape(2, WIDTH))


class Input(Stored):
    def after(self, x, y):
        self.a[...] = x


class Parameter(Stored):
    """The target of a layer of the last stage, read there."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.target = nnx.BatchStat(jnp.zeros((WIDTH, WIDTH)))

    def __call__(self, x):
        y = super().__call__(x) + x @ self.target[...]
        self.target[...] = self.layers[1].kernel[...]
        return y

    def after(self, x, y):
        pass


class UnreadCopy(Stored):
    """Copies of a parameter of each stage, which nothing reads."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.copies = nnx.List([nnx.BatchStat(jnp.zeros((WIDTH, WIDTH))) for _ in range(2)])

    def after(self, x, y):
        self.copies[0][...], self.copies[1][...] = self.layers[1].kernel[...], self.embed.kernel[...]


class Swap(Stored):
    def after(self, x, y):
        self.a[...], self.b[...] = self.b[...], self.a[...]


class SwapInJit(Stored):
    def after(self, x, y):
        self.a[...], self.b[...] = jax.jit(lambda a, b: (b, a))(self.a[...], self.b[...])


class Delay(Stored):
    """The last two activations of the last stage; nothing else reads them."""

    def before(self, x):
        return x

    def after(self, x, y):
        self.a[...], self.b[...] = self.b[...], y


class UnreadSwap(Stored):
    def before(self, x):
        return x

    after = Swap.after


ASSIGNED = with_schedules(
    [Literal, Constant, Input, Parameter, UnreadCopy, Swap, SwapInJit, Delay, UnreadSwap],
    quick={Literal: "1f1b", Input: "1f1b", Parameter: "zb-h1", Swap: "zb-h1", Delay: "1f1b"},
)


@pytest.mark.sampled
@pytest.mark.parametrize(("cls", "name"), ASSIGNED)
def test_variables_that_are_assigned_have_their_new_values(cls, name):
    equals_plain_step(cls, name)


class SwapAcrossStages(Stored):
    def __call__(self, x):
        y = Layers.__call__(self, x + self.a[...]) + self.b[...]
        self.a[...], self.b[...] = self.b[...], self.a[...]
        return y


def test_a_swap_of_variables_of_different_stages_equals_the_plain_step():
    equals_plain_step(SwapAcrossStages)


# custom_vjp


@jax.custom_vjp
def clipped(x):
    """The identity. Its backward rule clips the gradient, so the sum of two clipped gradients is another one."""
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


def in_scan(x):
    return jax.lax.scan(lambda total, _: (total + clipped(x), None), jnp.zeros_like(x), length=1)[0]


CLIPS = {
    "plain": clipped,
    "jit": jax.jit(clipped),
    "remat": jax.checkpoint(clipped),
    "scan": in_scan,
    "cond": lambda x: jax.lax.cond(jnp.sum(x) > -1e3, clipped, lambda x: x, x),
    "vmap": jax.vmap(clipped),
    "nested": jax.jit(jax.checkpoint(lambda x: jax.jit(clipped)(x))),
}


class Clipped(Layers):
    """The rule applies to a tied table, to a value of the first stage that the second one also uses, and to the sum."""

    clip = staticmethod(clipped)

    def __call__(self, x):
        table = self.clip(self.embed.kernel[...])
        x = 5 * x @ table
        both = self.clip(x)
        x = both
        for layer in self.layers:
            x = x + jnp.tanh(layer(x)) + both
        return 3 * x @ table.T


@pytest.mark.sampled
@pytest.mark.parametrize(("kind", "name"), with_schedules(CLIPS, quick={"plain": "zb-h1", "nested": "1f1b"}))
def test_a_custom_vjp_rule_that_is_not_linear_runs_once(kind, name):
    equals_plain_step(type("Clipped", (Clipped,), {"clip": staticmethod(CLIPS[kind])}), name)


def test_custom_jvp_rules_are_linear_and_may_be_repeated():
    for fn in (jax.nn.relu, jax.nn.silu, jax.nn.logsumexp):
        program, _ = trace(fn, jnp.ones(WIDTH))
        assert not any(is_expensive(eqn) for eqn in program.eqns)
    for fn in CLIPS.values():
        program, _ = trace(fn, jnp.ones(WIDTH))
        assert any(is_expensive(eqn) for eqn in program.eqns)
