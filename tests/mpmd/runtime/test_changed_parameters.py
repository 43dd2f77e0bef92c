"""Parameters that the forward pass changes: a pipeline keeps the change, as the plain step does."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flax_mesh.mpmd import split_stages
from tests.mpmd.runtime.test_pipeline import PLAIN_SGD, build, compare, groups, net_batch, net_loss
from tests.mpmd.runtime.test_pipeline import Net as Tied
from tests.step import changed

pytestmark = pytest.mark.usefixtures("quick_unless_slow")


def net():
    return changed.Net(nnx.Rngs(0))


def stack():
    return changed.Stack(nnx.Rngs(0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "name", "remat"),
    [
        (net, "zb-h1", "none"),
        (stack, "1f1b", "none"),
        *(
            pytest.param(make, name, remat, marks=pytest.mark.slow)
            for make in (net, stack)
            for name in ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v")
            for remat in ("none", "cheap", "full")
        ),
    ],
)
def test_changed_parameters_equal_those_of_the_plain_step(make, name, remat):
    batches = [changed.make_batch(8, seed) for seed in range(2)]
    _, state = compare(make, changed.loss_fn, batches, 4, PLAIN_SGD, name=name, remat=remat, split={"layers": "layers"})
    assert state is not None


def test_without_an_update_the_state_has_the_changed_values():
    pipeline = build(net, changed.loss_fn, changed.make_batch(4), 2, optax.sgd(0.0))
    kernel = np.asarray(net().layers[0].linear.kernel[...])
    state, _ = pipeline.step(pipeline.init_state(), changed.make_batch(4))
    assert np.abs(kernel).max() > 0.2
    np.testing.assert_array_equal(pipeline.model(state).layers[0].linear.kernel[...], np.clip(kernel, -0.2, 0.2))


def test_only_changed_parameters_are_results_of_the_stages():
    staged = split_stages(changed.loss_fn, net, changed.make_batch(4), num_stages=2)
    paths = {staged.leaves[at].path for at in staged.cut(staged.example).updates.values()}
    assert paths == {"layers/0/linear/kernel", "layers/1/linear/bias", "layers/2/normed/layer_instance/kernel"}
    make = lambda: changed.Stack(nnx.Rngs(0), changed.Unchanged)  # noqa: E731
    staged = split_stages(changed.loss_fn, make, changed.make_batch(4), num_stages=2, layers="layers")
    assert not staged.cut(staged.example).updates  # although the scan of a remat returns all parameters
    assert not staged.cut(staged.example, train=False).updates


class ClippedTable(Tied):
    """The table is clipped by the embedding, in the first stage, and used by the head, in the last."""

    def __call__(self, x):
        self.embed.embedding[...] = jnp.clip(self.embed.embedding[...], -0.2, 0.2)
        return super().__call__(x)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_a_changed_parameter_that_other_stages_use_equals_the_plain_step(size):
    make = lambda: ClippedTable(nnx.Rngs(0))  # noqa: E731
    compare(make, net_loss, [net_batch(4), net_batch(4, 1)], 2, PLAIN_SGD, mesh=groups(pp=size))


def test_nothing_compiles_after_the_first_step(compilations):
    pipeline = build(net, changed.loss_fn, changed.make_batch(4), 2, optax.adamw(1e-3))
    state = pipeline.init_state()
    state, _ = pipeline.step(state, changed.make_batch(4))
    compilations.clear()
    old = jax.tree.leaves(state)
    state, _ = pipeline.step(state, changed.make_batch(4, 1))
    assert not compilations and old
