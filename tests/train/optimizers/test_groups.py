"""The text of parameter groups and matrices, and its mistakes."""

import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from flax_mesh.train.optimizers.config import OptimizerConfig
from flax_mesh.train.optimizers.groups import Group, Matrices, parse_groups, parse_matrices, trained_filter


def test_groups_are_patterns_and_words():
    groups, problems = parse_groups("^embed learning_rate*0.1 weight_decay*0;  a{1,2}$ frozen ;b learning_rate*2;")
    assert problems == []
    assert groups == [Group("^embed", 0.1, 0.0), Group("a{1,2}$", is_frozen=True), Group("b", 2.0)]
    assert parse_groups("") == ([], [])


def test_matrices_are_patterns_and_dims():
    assert parse_matrices("q/kernel 0>1,2; o 0,1>2; mlp") == (
        [Matrices("q/kernel", (0,), (1, 2)), Matrices("o", (0, 1), (2,)), Matrices("mlp")],
        [],
    )


@pytest.mark.parametrize(
    ("settings", "problems"),
    [
        ({"groups": "embed"}, ["optimizer.groups: 'embed' has no words; write PATTERN WORDS"]),
        ({"groups": "embed learning_rate=0.1"}, ["optimizer.groups: 'learning_rate=0.1' of 'embed' is neither frozen"]),
        ({"groups": "a learning_rate*-1; b weight_decay*x; c learning_rate*inf"}, ["optimizer.groups: "] * 3),
        ({"groups": "a frozen learning_rate*2"}, ["optimizer.groups: 'a' is frozen, so its factors have no effect"]),
        ({"groups": "a learning_rate*2 learning_rate*3"}, ["optimizer.groups: 'a' has 'learning_rate*3' twice"]),
        ({"groups": "( frozen"}, ["optimizer.groups: '(' must be a regular expression, but missing )"]),
        ({"no_decay": "["}, ["optimizer.no_decay: '[' must be a regular expression, but unterminated character set"]),
        ({"name": "muon", "matrices": "a 0>0"}, ["optimizer.matrices: '0>0' of 'a' must be input and output dims"]),
        ({"name": "muon", "matrices": "a 0"}, ["optimizer.matrices: '0' of 'a' must be input and output dims"]),
        ({"name": "muon", "matrices": "("}, ["optimizer.matrices: '(' must be a regular expression"]),
        (
            {"matrices": "a"},
            ["optimizer.matrices=a has no effect with optimizer.name=adamw, only with muon"],
        ),
        (
            {"momentum": 0.5},
            ["optimizer.momentum=0.5 has no effect with optimizer.name=adamw, only with muon or"],
        ),
        (
            {"name": "sgd", "b1": 0.5, "epsilon": 1e-6, "momentum": 0.0, "moment_dtype": "float32"},
            [
                "optimizer.b1=0.5 has no effect with optimizer.name=sgd, only with adamw or muon; remove it",
                "optimizer.epsilon=1e-06 has no effect with optimizer.name=sgd, only with adamw or muon; remove it",
                "optimizer.moment_dtype=float32 has no effect with optimizer.name=sgd without momentum; remove it, or",
            ],
        ),
        (
            {"name": "adafactor", "b2": 0.9, "moment_dtype": "bfloat16"},
            [
                "optimizer.b2=0.9 has no effect with optimizer.name=adafactor, only with adamw or muon; remove it",
                "optimizer.moment_dtype=bfloat16 has no effect with optimizer.name=adafactor without momentum; remove",
            ],
        ),
        ({"name": "adafactor", "momentum": 0.9, "moment_dtype": "bfloat16"}, []),
        ({"name": "sgd", "moment_dtype": "bfloat16"}, []),
        ({"decay_start": 500}, ["optimizer.decay_start=500 has no effect with optimizer.schedule=cosine, only with"]),
    ],
)
def test_each_mistake_is_one_line(settings, problems):
    found = OptimizerConfig(**settings).problems()
    assert len(found) == len(problems)
    for line, start in zip(found, problems, strict=True):
        assert line.startswith(start) and "\n" not in line


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
