"""The updates of every optimizer by name equal the updates of plain optax, without a model; the moving average too."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest

from flax_mesh.recipe.optimizers.average import average_factor, average_parameters
from flax_mesh.recipe.optimizers.make import clip_by_global_norm, make_optimizer
from flax_mesh.tree import named_leaves, nest
from tests.recipe.optimizers.plain import MODEL, PLAIN, SETTINGS, assert_close, average_of, config_of

SHAPES = {  # few different ones, because each is compiled
    "embed/embedding": (16, 16),
    "layers/0/attention/o/kernel": (4, 4, 16),
    "layers/0/mlp/up/kernel": (16, 16),
    "layers/0/norm/scale": (16,),
}


def values(seed, size):
    rng = np.random.default_rng(seed)
    return nest((path, jax.numpy.asarray(size * rng.normal(size=shape), "float32")) for path, shape in SHAPES.items())


def updated(optimizer, steps=3) -> tuple[list[dict[str, jax.Array]], Any]:
    """The parameters after every step, and the last state of the optimizer."""
    tree: Any = values(0, 1.0)
    history, state = [], optimizer.init(tree)
    for step in range(steps):
        updates, state = optimizer.update(values(step + 1, 0.1), state, tree)
        tree = optax.apply_updates(tree, updates)
        history.append(dict(named_leaves(tree)))
    return history, state


@pytest.mark.parametrize("name", PLAIN)
def test_updates_of_an_optimizer_by_name_equal_plain_optax(name):
    settings, make = PLAIN[name]
    matrices = MODEL.matrices() if name == "muon" else ""
    config = config_of("one", **settings, matrices=matrices).optimizer
    found, _ = updated(make_optimizer(config))
    expected, _ = updated(optax.chain(optax.clip_by_global_norm(SETTINGS.clip_norm), make()))
    assert_close(found[-1], expected[-1])
    if config.name != "adamw":  # the oracle itself: a wrong momentum must be found
        wrong, _ = updated(make_optimizer(replace(config, momentum=0.79)))
        with pytest.raises(AssertionError):
            assert_close(wrong[-1], expected[-1])


TYPES = [("bfloat16", 1.0, 34.641), ("float16", 577.5, 20005.2), ("float32", 1.0, 34.641)]


@pytest.mark.parametrize(("dtype", "value", "norm"), TYPES)
def test_the_clip_of_gradients_in_a_half_type_has_the_norm_of_float64(dtype, value, norm):
    """In bfloat16, the sum of 300 * 4 squares would stop at 1024; in float16, these squares are infinite."""
    grads: Any = {str(at): jax.numpy.full(4, value, dtype) for at in range(300)}
    for most in (1.0, 1.001 * norm):
        updates: Any = clip_by_global_norm(most).update(grads, optax.EmptyState())[0]
        assert {x.dtype.name for x in updates.values()} == {dtype}
        squares = sum((np.asarray(x, np.float64) ** 2).sum() for x in updates.values())
        np.testing.assert_allclose(squares**0.5, min(most, norm), rtol=2.0**-8 if dtype == "bfloat16" else 1e-3)


@pytest.mark.parametrize("groups", ["", "embed learning_rate*1"])
def test_optimizers_by_name_clip_gradients_in_a_half_type_by_the_norm_of_float64(groups):
    """The clip precedes every optimizer; the update of sgd is the clipped gradient."""
    settings = replace(SETTINGS, name="sgd", momentum=0.0, weight_decay=0.0, groups=groups)
    optimizer = make_optimizer(replace(settings, clip_norm=1.0), lambda count: 1.0)
    grads = {"embed": jax.numpy.ones(1024, "bfloat16"), **{str(at): jax.numpy.ones(4, "bfloat16") for at in range(44)}}
    updates, _ = optimizer.update(grads, optimizer.init(grads), grads)
    squares = sum((np.asarray(x, np.float64) ** 2).sum() for x in jax.tree.leaves(updates))
    np.testing.assert_allclose(squares**0.5, 1.0, rtol=2.0**-8)


def test_the_moving_average_is_the_debiased_one_of_optax():
    history, state = updated(optax.chain(optax.sgd(0.1), average_parameters(0.7)))
    average = {path: average_factor(0.7, len(history)) * x for path, x in named_leaves(state[-1].average)}
    assert_close(average, average_of(history, 0.7))
