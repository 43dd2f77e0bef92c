"""Trained parameters that the forward pass changes keep the change, as with nnx.value_and_grad."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flax_mesh.step.loss import run_loss, traced_loss
from flax_mesh.train import make_train_step
from flax_mesh.tree import named_leaves
from tests.mpmd.zoo.base import initial_state
from tests.step import changed

pytestmark = pytest.mark.usefixtures("quick_unless_slow")
OPTIMIZER = optax.adamw(1e-2, eps=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("make_model", [lambda: changed.Net(nnx.Rngs(0)), lambda: changed.Stack(nnx.Rngs(0))])
@pytest.mark.parametrize("count", [1, 3])
def test_a_step_equals_a_loop_of_value_and_grad(make_model, count):
    state = initial_state(make_model, OPTIMIZER)
    step = make_train_step(changed.loss_fn, state, num_microbatches=count)
    model = make_model()
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)

    def loss_of(model, part):
        loss, weight, _ = changed.loss_fn(model, part)
        return loss, weight

    plain = nnx.jit(nnx.value_and_grad(loss_of, has_aux=True))
    for seed in range(2):
        batch = changed.make_batch(6, seed)
        state, metrics = step(state, batch)
        parts = [jax.tree.map(lambda x, i=i: jnp.split(x, count)[i], batch) for i in range(count)]
        sums, grads = zip(*(plain(model, part) for part in parts), strict=True)
        losses, weights = zip(*sums, strict=True)
        total = sum(weights)
        mean = jax.tree.map(lambda *g, total=total: sum(g) / total, *grads)
        optimizer.update(model, mean)
        np.testing.assert_allclose(metrics["loss"], sum(losses) / total, rtol=1e-5)
        np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(mean), rtol=1e-5)
        for (path, x), (_, y) in zip(
            named_leaves(state.to_nnx()["model"]), named_leaves(nnx.state(model)), strict=True
        ):
            if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6, err_msg=path)


def test_the_optimizer_updates_the_changed_value():
    state = initial_state(lambda: changed.Net(nnx.Rngs(0), (changed.Clipped,)), optax.sgd(0.0))
    kernel = np.asarray(state.merge()[0].layers[0].linear.kernel[...])
    state, _ = make_train_step(changed.loss_fn, state)(state, changed.make_batch(4))
    assert np.abs(kernel).max() > 0.2
    np.testing.assert_array_equal(state.merge()[0].layers[0].linear.kernel[...], np.clip(kernel, -0.2, 0.2))


def test_a_change_of_shape_or_dtype_is_refused_with_all_paths():
    class Cast(changed.Clipped):
        def __call__(self, x):
            kernel, bias = self.linear.kernel, self.linear.bias
            kernel.set_value(kernel[...].astype(jnp.bfloat16))
            assert bias is not None
            bias.set_value(jnp.zeros(()))
            return x

    state = initial_state(lambda: changed.Net(nnx.Rngs(0), (Cast,)), OPTIMIZER)
    message = r"linear/bias changed from f32\[8\] to f32\[\], .*linear/kernel changed from f32\[8,8\] to bf16\[8,8\]"
    with pytest.raises(ValueError, match=message):
        make_train_step(changed.loss_fn, state)(state, changed.make_batch(4))


def test_unchanged_parameters_are_no_results_of_the_forward_pass():
    model = changed.Stack(nnx.Rngs(0), changed.Unchanged)
    _, *variables = nnx.split(model, nnx.Param, ...)
    batch = changed.make_batch(4)

    def loss_of(params):
        return run_loss(changed.loss_fn, model, nnx.Param, (params, variables[1]), batch, (0, 0, 0), ())

    results = lambda loss_of: jax.tree.leaves(loss_of(variables[0])[1][2][0])  # noqa: E731
    given = jax.tree.leaves(variables[0])
    assert [a is b for a, b in zip(results(traced_loss(loss_of, variables[0])), given, strict=True)] == [True] * 6
    # The scan of a remat returns all of its parameters, as copies.
    assert [a is b for a, b in zip(results(loss_of), given, strict=True)].count(False) == 2
