"""The updates of every optimizer by name equal the updates of plain optax, without a model; the moving average too."""

import math
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_mesh.recipe.optimizers.average import average_factor, average_parameters
from flax_mesh.recipe.optimizers.config import OptimizerConfig
from flax_mesh.recipe.optimizers.groups import Group, Matrices, parse_groups, parse_matrices, trained_filter
from flax_mesh.recipe.optimizers.make import clip_by_global_norm, make_optimizer
from flax_mesh.recipe.optimizers.schedules import make_learning_rate_schedule
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


# --- the text of parameter groups and matrices, and learning rate schedules by name, against their formulas ---


def test_groups_are_patterns_and_words_and_matrices_patterns_and_dims():
    groups, problems = parse_groups("^embed learning_rate*0.1 weight_decay*0;  a{1,2}$ frozen ;b learning_rate*2;")
    assert problems == []
    assert groups == [Group("^embed", 0.1, 0.0), Group("a{1,2}$", is_frozen=True), Group("b", 2.0)]
    assert parse_groups("") == ([], [])
    assert parse_matrices("q/kernel 0>1,2; o 0,1>2; mlp") == (
        [Matrices("q/kernel", (0,), (1, 2)), Matrices("o", (0, 1), (2,)), Matrices("mlp")],
        [],
    )


@settings(max_examples=30)
@given(st.text())
def test_any_text_is_groups_or_problems(text):
    for parse in (parse_groups, parse_matrices):
        _, problems = parse(text)
        assert all(isinstance(line, str) for line in problems)


def test_filters_of_equal_settings_are_equal():
    """They are part of the definition of a state, which is compared between calls of make()."""
    text = "a frozen; b weight_decay*0"
    assert trained_filter(nnx.Param, text) == trained_filter(nnx.Param, text)
    assert hash(trained_filter(nnx.Param, text)) == hash(trained_filter(nnx.Param, text))
    assert trained_filter(nnx.Param, "b weight_decay*0") is nnx.Param
    assert trained_filter(nnx.Param, text) != trained_filter(nnx.Param, "a frozen")


FIRST, PEAK, END, WARMUP, DECAY = 0.2, 1.0, 0.1, 4, 24


def learning_rate(config, step) -> Any:
    return make_learning_rate_schedule(config)(step)


def warmup(step):
    return FIRST + (PEAK - FIRST) * step / WARMUP


def line(step, start):
    return PEAK + (END - PEAK) * min((step - start) / (DECAY - start), 1)


def part(step):
    return min((step - WARMUP) / (DECAY - WARMUP), 1)


FORMULAS = {
    "cosine": lambda step: END + (PEAK - END) * (1 + math.cos(math.pi * part(step))) / 2,
    "linear": lambda step: line(step, WARMUP),
    "constant": lambda step: PEAK,
    "wsd": lambda step: PEAK if step < 21 else line(step, 21),  # 90% of 24
    "wsd from 10": lambda step: PEAK if step < 10 else line(step, 10),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_schedule_follows_its_formula(name):
    start = 10 if name.endswith("10") else None
    config = OptimizerConfig(
        schedule=name.split()[0], learning_rate=PEAK, end_learning_rate=END, warmup_steps=WARMUP, decay_steps=DECAY,
        decay_start=start,
    )  # fmt: skip
    assert config.problems() == []
    for step in range(2 * DECAY):
        expected = warmup(step) if step < WARMUP else FORMULAS[name](step)
        assert learning_rate(config, step) == pytest.approx(expected, rel=1e-5), step


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "wsd"])
def test_without_a_warm_up_the_first_step_has_the_full_learning_rate(name):
    config = OptimizerConfig(schedule=name, learning_rate=PEAK, warmup_steps=0, decay_steps=DECAY)
    assert learning_rate(config, 0) == PEAK


def test_the_decay_of_wsd_begins_at_the_end_of_a_late_warm_up():
    late = OptimizerConfig(schedule="wsd", learning_rate=PEAK, warmup_steps=98, decay_steps=100)
    assert [learning_rate(late, step) for step in (98, 100)] == pytest.approx([PEAK, 3e-5])
