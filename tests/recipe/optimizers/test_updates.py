"""The updates of every optimizer by name equal the updates of plain optax, without a model; the moving average too."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest

from flax_mesh.recipe.optimizers.average import average_factor, average_parameters
from flax_mesh.recipe.optimizers.make import make_optimizer
from flax_mesh.tree import named_leaves, nest
from tests.recipe.optimizers.plain import MODEL, PLAIN, SETTINGS, assert_close, average_of, config_of

SHAPES = {
    "embed/embedding": (32, 16),
    "layers/0/attention/o/kernel": (4, 8, 16),
    "layers/0/mlp/up/kernel": (16, 32),
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
    (found, _), (wrong, _) = (updated(make_optimizer(x)) for x in (config, replace(config, momentum=0.79)))
    expected, _ = updated(optax.chain(optax.clip_by_global_norm(SETTINGS.clip_norm), make()))
    assert_close(found[-1], expected[-1])
    if config.name != "adamw":  # the oracle itself: a wrong momentum must be found
        with pytest.raises(AssertionError):
            assert_close(wrong[-1], expected[-1])


def test_the_moving_average_is_the_debiased_one_of_optax():
    history, state = updated(optax.chain(optax.sgd(0.1), average_parameters(0.7)))
    average = {path: average_factor(0.7, len(history)) * x for path, x in named_leaves(state[-1].average)}
    assert_close(average, average_of(history, 0.7))
