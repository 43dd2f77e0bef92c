"""The text of parameter groups and matrices, and learning rate schedules by name, against their formulas."""

import math
from typing import Any

import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_mesh.recipe.optimizers.config import OptimizerConfig
from flax_mesh.recipe.optimizers.groups import Group, Matrices, parse_groups, parse_matrices, trained_filter
from flax_mesh.recipe.optimizers.schedules import make_learning_rate_schedule


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
