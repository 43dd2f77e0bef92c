"""`check` finds mistakes that were made in other splits of models, or nearly made in this one."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from flax_mesh.mpmd import CutError, StagedModel, split_stages
from flax_mesh.mpmd.split import assign, backward, trace
from flax_mesh.mpmd.split.stages import split_stages as staging
from flax_mesh.program.program import is_var
from tests.mpmd.zoo.base import WIDTH, vectors

SIDE = 5  # the width of the second stream, which no other value has
X = vectors(4)


@jax.custom_vjp
def clipped(x):
    """Identity; the gradient is clipped, so its rule is not linear."""
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear, self.back = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Linear(SIDE, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))

    def side(self, x):
        return jnp.tanh(x @ self.linear.kernel[:, :SIDE].astype(x.dtype))


class Net(nnx.Module):
    """Two layers, a gate with this value at the start, and a counter that both layers read."""

    def __init__(self, gate: float):
        self.layers = nnx.List([Layer(nnx.Rngs(seed)) for seed in (0, 1)])
        self.gate = nnx.Param(jnp.full((WIDTH,), gate))
        self.calls, self.ready = nnx.Variable(jnp.zeros((), jnp.int32)), nnx.Variable(jnp.zeros(()))


def second_stream(scale: float = 1.0, dtype: type | None = None):
    """A loss with a second stream over the cut, whose gradient has this share, beside a value of `dtype`."""

    def loss_fn(model, batch):
        first, second = model.layers
        x = first(batch["x"])
        side = first.side(x)
        beside = {} if dtype is None else {"beside": jnp.mean(x.astype(dtype).astype(jnp.float32))}
        out = second(x) + scale * model.gate * second.back(side)
        return jnp.sum((out - batch["y"]) ** 2), len(out), beside

    return loss_fn


def complex_stream(model, batch):
    first, second = model.layers
    x = batch["x"] @ jax.lax.complex(first.linear.kernel[...], first.linear.kernel[...].T)
    return jnp.sum(second((x * second.linear.kernel[0]).imag) ** 2), len(x)


def constant_value(model, batch):
    model.ready[...] = jnp.ones(())
    return second_stream()(model, batch)


def nonlinear_rule(model, batch):
    first, second = model.layers
    x = first(batch["x"])
    y = clipped(x)
    return jnp.sum(second(y) ** 2) + jnp.sum(second.linear(x)) + jnp.sum(first.side(y)), len(x)


def auxiliary_loss(model, batch):
    """A loss in bfloat16, and a small one of a value of the first layer, computed after the last layer."""
    first, second = model.layers
    x = first(batch["x"]).astype(jnp.bfloat16)
    side = first.side(x)
    out = second(x).astype(jnp.float32)
    return jnp.sum(out**2) + 0.01 * jnp.sum((side * second.back.kernel[:, 0]).astype(jnp.float32) ** 2), len(x)


def counted(model, batch):
    first, second = model.layers
    model.calls[...] += 1
    scale = 1 / model.calls[...]
    x = jnp.sin(first(batch["x"] * scale) @ second.linear.kernel[...])
    return jnp.sum(second(x) * scale), len(x)


def without_gradient(monkeypatch):
    has = backward._has_gradient
    monkeypatch.setattr(backward, "_has_gradient", lambda v: has(v) and v.aval.shape[-1:] != (SIDE,))


def without_complex_gradient(monkeypatch):
    monkeypatch.setattr(backward, "_has_gradient", lambda v: jnp.issubdtype(v.aval.dtype, jnp.floating))


def without_constants(monkeypatch):
    with_copies = trace._with_copies

    def without(program, updates):
        kept = [at for at, atom in enumerate(program.outputs) if at not in updates or is_var(atom)]
        assert len(kept) < len(program.outputs)
        new = {i: updates[at] for i, at in enumerate(kept) if at in updates}
        updates.clear()
        updates.update(new)
        return with_copies(program._replace(outputs=tuple(program.outputs[at] for at in kept)), updates)

    monkeypatch.setattr(trace, "_with_copies", without)


def rules_repeated(monkeypatch):
    monkeypatch.setattr(assign.is_expensive, "__defaults__", (assign.EXPENSIVE,))


def with_stale_state(monkeypatch):
    """Only the first stage that reads a variable returns its new value."""
    cut_stages = assign.cut_stages

    def cut(program, stages, num_stages, updates, is_data):
        first, last = cut_stages(program, stages, num_stages, updates, is_data)
        kept = [i for i, at in enumerate(last.outputs) if at not in first.outputs]
        assert len(kept) < len(last.outputs)
        sent = len(last.sent)
        outputs = (*last.forward.outputs[:sent], *(last.forward.outputs[sent + i] for i in kept))
        forward = last.forward._replace(outputs=outputs)
        return first, last._replace(outputs=tuple(last.outputs[i] for i in kept), forward=forward)

    monkeypatch.setattr(assign, "cut_stages", cut)
    monkeypatch.setattr(staging, "check_states", lambda *args: None)  # it would refuse these stages


OF_FIRST = "the gradient of layers/0/"
# name -> (loss, value of the gate, mistake, place that the error names)
PLANTED = {
    "zero gates": (second_stream(), 0.0, without_gradient, OF_FIRST),
    "complex activations": (complex_stream, 1.0, without_complex_gradient, OF_FIRST),
    "a constant new value": (constant_value, 1.0, without_constants, "the new value of ready"),
    "a nonlinear rule in two stages": (nonlinear_rule, 1.0, rules_repeated, OF_FIRST),
    "a small auxiliary loss": (auxiliary_loss, 1.0, without_gradient, OF_FIRST),
    "a stream": (second_stream(), 1.0, without_gradient, OF_FIRST),
    "beside bfloat16": (second_stream(0.05, jnp.bfloat16), 1.0, without_gradient, OF_FIRST),
    "beside float8": (second_stream(1.0, jnp.float8_e4m3fn), 1.0, without_gradient, OF_FIRST),
    "stale state": (counted, 1.0, with_stale_state, "on microbatch 1 the"),
}


def split(name: str) -> StagedModel:
    loss_fn, gate, _, _ = PLANTED[name]
    return split_stages(loss_fn, lambda: Net(gate), X, num_stages=2, num_microbatches=2)


@pytest.mark.sampled
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_found(name: str, monkeypatch):
    split(name).check(X)
    _, _, plant, message = PLANTED[name]
    plant(monkeypatch)
    with pytest.raises(CutError, match=message):
        split(name).check(X)
