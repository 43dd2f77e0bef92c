"""The optimizer's part of a step: norms of half types, the loss as an argument, updates that are always zero."""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flax_mesh import create_mesh
from flax_mesh.errors import ConfigError
from flax_mesh.mpmd import MpmdMesh, Pipeline, split_stages
from flax_mesh.step.optimizer import update_parameters
from flax_mesh.train import make_train_step
from flax_mesh.tree import map_named, named_leaves
from tests.step.net import batch, layout, make, start

pytestmark = pytest.mark.usefixtures("quick_unless_slow")


class Piece(nnx.Module):
    """Small parameters, whose gradients are `scale` for every row of the batch."""

    def __init__(self, sizes: Sequence[int], dtype: str, scale: float):
        self.scale = scale
        self.parts = nnx.List([nnx.Param(jnp.ones(size, dtype)) for size in sizes])

    def __call__(self, x):
        return x * jnp.stack([jnp.sum(part[...].astype(jnp.float32)) for part in self.parts]).sum() * self.scale


class Pieces(nnx.Module):
    def __init__(self, dtype: str, scale: float):
        self.layers = nnx.List([Piece(sizes, dtype, scale) for sizes in ([1024, 4, 4, 4], [4, 4, 4, 4])])


def sum_of_pieces(model, x):
    return sum(layer(x).sum() for layer in model.layers), len(x)


def plain(maker, optimizer, loss_fn, steps, count=1, **options):
    def create():
        model = maker()
        return model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    state, rows = start(create), []
    step = make_train_step(loss_fn, state, num_microbatches=count, **options)
    for each in steps:
        state, row = step(state, each)
        rows.append(row)
    return state, rows


def pipelined(maker, optimizer, loss_fn, steps, count=2, **options):
    mesh = MpmdMesh(create_mesh((2,), ("pp",), devices=jax.devices()[:2]), "pp")
    staged = split_stages(loss_fn, maker, steps[0], mesh=mesh, schedule="1f1b", num_microbatches=count)
    pipeline = Pipeline(staged, optimizer, **options)
    state, rows = pipeline.init_state(), []
    for each in steps:
        state, row = pipeline.step(state, each)
        rows.append(row)
    return state, rows


TYPES = [("bfloat16", 1.0), ("float16", 600.0), ("float32", 1.0)]
KINDS: list[Any] = [(plain, 1), (plain, 2), (pipelined, 2)]


@pytest.mark.sampled
@pytest.mark.parametrize(("run", "count"), KINDS)
@pytest.mark.parametrize(("dtype", "scale"), TYPES)
def test_the_norm_of_gradients_in_a_half_type_equals_float64(dtype, scale, run, count):
    """In bfloat16, 1024 + 4 is 1024, and in float16 the square of 600 is infinite."""
    maker, rows = lambda: Pieces(dtype, scale), np.ones((2, 1), np.float32)
    _, (row,) = run(maker, optax.sgd(0.0), sum_of_pieces, [rows], count)
    np.testing.assert_allclose(row["grad_norm"], scale * 1052**0.5, rtol=1e-6)


def kernels_and(optimizer):
    """`optimizer` for biases; the update of kernels is zero."""
    label = lambda params: map_named(lambda path, _: "zero" if "kernel" in path else "rest", params)  # noqa: E731
    return optax.partition({"zero": optax.set_to_zero(), "rest": optimizer}, label)


def row_loss(model, b):
    errors = ((model.layers[1](jnp.tanh(model.layers[0](b["x"]))) - 1.0) ** 2).mean(-1)
    return (errors * b["w"]).sum(), b["w"].sum()


def by_rate(optimizer):
    return optax.chain(optimizer, optax.scale_by_schedule(lambda count: 0.5 * count))


BATCH = batch(live=np.array([1, 1, 1, 0] * 4, np.float32))
FROZEN = {
    "partition": kernels_and(optax.adam(0.1)),
    "times a rate": by_rate(kernels_and(optax.sgd(0.1))),
    "every second step": optax.MultiSteps(kernels_and(optax.sgd(0.1)), 2),
    "masked": optax.chain(
        optax.sgd(0.1), optax.masked(optax.set_to_zero(), lambda p: map_named(lambda path, _: "kernel" in path, p))
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", FROZEN)
def test_a_parameter_whose_update_is_always_zero_counts_in_no_norm(name):
    """It has a gradient, unlike a parameter that the rate 0 does not move."""
    model = make()()[0]
    grads = nnx.grad(lambda model: jnp.divide(*row_loss(model, BATCH)))(model)
    squares = {path: float((x**2).sum()) for path, x in named_leaves(nnx.state(grads, nnx.Param))}
    of_biases = sum(x for path, x in squares.items() if "bias" in path)
    assert sum(squares.values()) > 1.1 * of_biases
    with pytest.warns(UserWarning, match=r"by zero.*: layers/\{0..1\}/kernel. They count neither in grad_norm") as said:
        _, (row,) = plain(lambda: make()()[0], FROZEN[name], row_loss, [BATCH])
    assert len(said) == 1
    assert "updates 2 of 4 trained arrays" in str(said[0].message)
    np.testing.assert_allclose(row["grad_norm"], of_biases**0.5, rtol=1e-5)


LOOPS = {
    "rows of a scan": (lambda g, p: jax.lax.scan(lambda c, x: (c, x * 0.0), p, p)[1], True),
    "the variable of a scan": (lambda g, p: jax.lax.scan(lambda c, x: (c * x, None), 0.0, p)[0] * p, True),
    "the variable of a loop": (lambda g, p: jax.lax.fori_loop(0, 3, lambda i, c: c * p, 0 * p), True),
    "a variable that grows": (lambda g, p: jax.lax.fori_loop(0, 3, lambda i, c: c + 1, 0 * p), False),
    "zero times the gradient": (lambda g, p: 0 * g, False),
}


@pytest.mark.parametrize("name", LOOPS)
def test_an_update_that_a_loop_computes_is_zero_if_every_iteration_keeps_it(name):
    update, is_zero = LOOPS[name]
    model = nnx.Dict(w=nnx.Param(jnp.ones(3)))
    optimizer = nnx.Optimizer(model, optax.stateless(lambda g, p: jax.tree.map(update, g, p)), wrt=nnx.Param)
    with pytest.warns(UserWarning, match="updates 1 of 1") if is_zero else contextlib.nullcontext():
        assert update_parameters(optimizer, model, nnx.state(model, nnx.Param), jnp.zeros(())) == [is_zero]


class UpdatesOneAgain(nnx.Optimizer):
    def update(self, model, grads, **kwargs):
        super().update(model, grads, **kwargs)
        first = jax.tree.leaves(grads)[:1]
        self.tx.update(first, self.tx.init(first), first)


def test_a_subclass_may_call_its_transformation_with_other_arrays():
    def create():
        model = make()()[0]
        return model, UpdatesOneAgain(model, optax.sgd(0.1), wrt=nnx.Param)

    state = layout(create)
    _, metrics = make_train_step(row_loss, state).eval_shape(state, BATCH)
    assert metrics["grad_norm"].shape == ()


@pytest.mark.slow
def test_norms_without_frozen_parameters_are_equal_in_a_pipeline_and_the_rate_zero_freezes_none():
    maker, results = lambda: make()()[0], []
    for run in (plain, pipelined):
        with pytest.warns(UserWarning, match="updates 2 of 4 trained arrays by zero"):
            results.append(run(maker, FROZEN["partition"], row_loss, [BATCH], skip_nonfinite=True)[1][0])
    every = plain(maker, optax.sgd(0.0), row_loss, [BATCH])[1][0]
    np.testing.assert_allclose(results[0]["grad_norm"], results[1]["grad_norm"], rtol=1e-6)
    assert every["grad_norm"] > results[0]["grad_norm"]
    assert results[0]["skipped"] == results[1]["skipped"] == 0


WITH_LOSS = {
    "plateau": optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.5)),
    "polyak": optax.polyak_sgd(max_learning_rate=0.3),
    "momo": optax.contrib.momo(0.1),
    "lbfgs": optax.lbfgs(0.1, linesearch=None),
}
RUNS: list[Any] = [(name, plain) for name in WITH_LOSS] + [("plateau", pipelined), ("momo", pipelined)]


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "run"), RUNS)
def test_an_optimizer_that_takes_the_loss_equals_plain_optax(name, run):
    model, optimizer = make(WITH_LOSS[name])()
    value_and_grad = nnx.jit(nnx.value_and_grad(lambda model: jnp.divide(*row_loss(model, BATCH))))
    for _ in range(3):
        value, grads = value_and_grad(model)
        optimizer.update(model, grads, value=value)
    result, _ = run(lambda: make()()[0], WITH_LOSS[name], row_loss, [BATCH] * 3)
    trained = dict(named_leaves(result.to_nnx()["model"]))
    for path, x in named_leaves(nnx.state(model, nnx.Param)):
        np.testing.assert_allclose(trained[path], x, rtol=1e-4, atol=1e-6, err_msg=path)


@pytest.mark.parametrize("name", ["lbfgs", "backtracking", "sophia"])
def test_an_optimizer_that_calls_the_loss_function_is_refused(name):
    search = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5))
    optimizer: Any = {"lbfgs": optax.lbfgs(), "backtracking": search, "sophia": optax.contrib.sophia(0.1)}[name]
    with pytest.raises(ConfigError, match=r"calls the loss function.*Use one without a line search"):
        make_train_step(row_loss, state := layout(make(optimizer))).eval_shape(state, BATCH)
