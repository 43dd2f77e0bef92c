"""The text of parameter groups and matrices, and its mistakes."""

from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from flax_mesh.train.optimizers.groups import Group, Matrices, parse_groups, parse_matrices, trained_filter


def test_groups_are_patterns_and_words_and_matrices_patterns_and_dims():
    groups, problems = parse_groups("^embed learning_rate*0.1 weight_decay*0;  a{1,2}$ frozen ;b learning_rate*2;")
    assert problems == []
    assert groups == [Group("^embed", 0.1, 0.0), Group("a{1,2}$", is_frozen=True), Group("b", 2.0)]
    assert parse_groups("") == ([], [])
    assert parse_matrices("q/kernel 0>1,2; o 0,1>2; mlp") == (
        [Matrices("q/kernel", (0,), (1, 2)), Matrices("o", (0, 1), (2,)), Matrices("mlp")],
        [],
    )


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
