"""Matching layers only once is equivalent to matching every path: patterns that distinguish numbers are detected."""

import re

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from flax_mesh import PartitionRules, match_partition_rules
from flax_mesh.sharding.table import has_numbers, ignores_numbers, without_numbers
from flax_mesh.tree import nest

P = PartitionSpec


IGNORE_NUMBERS = r"""
    q/kernel$  layers/\d+/(q|k)/kernel  layers/\d\d/q  layers/./q  layers/[0-9]+/q  ^(?:decoder/)?layers/[^/]+/mlp
    block_0/kernel  conv1|conv2(?=/bias)  (?i)KERNEL  (?<!bias)/scale  .*
"""


@pytest.mark.parametrize("pattern", IGNORE_NUMBERS.split())
def test_patterns_that_ignore_numbers(pattern):
    assert ignores_numbers(pattern)


@pytest.mark.parametrize(
    ("pattern", "match", "mismatch"),
    [
        ("layers/1/q", "layers/1/q", "layers/2/q"),
        ("[1-3]/q", "layers/1/q", "layers/4/q"),
        (r"(\d)\1/q", "layers/11/q", "layers/12/q"),
        (r"(?P<n>\d)(?P=n)/q", "layers/11/q", "layers/12/q"),
        (r"\x31/q", "layers/1/q", "layers/2/q"),
        (r"\N{DIGIT ONE}/q", "layers/1/q", "layers/2/q"),
        ("a?1/q", "layers/1/q", "layers/2/q"),
        ("a|1/q", "1/q", "2/q"),
        (r"\[0-9]|1/q", "1/q", "2/q"),
        ("(?<=1)/q", "layers/1/q", "layers/2/q"),
        (r"layers(?!/1)/\d", "layers/2", "layers/1"),
    ],
)
def test_patterns_that_distinguish_numbers(pattern, match, mismatch):
    assert re.search(pattern, match) and not re.search(pattern, mismatch)
    assert without_numbers(match) == without_numbers(mismatch)
    assert not ignores_numbers(pattern)
    leaf = jax.ShapeDtypeStruct((4,), jnp.float32)
    tree = nest((f"{path}/w", leaf) for path in (match, mismatch))
    specs = match_partition_rules([(pattern, P("tp")), ("", P())], tree)
    assert specs == nest([(f"{match}/w", P("tp")), (f"{mismatch}/w", P())])


def test_numbers_are_path_components_of_ascii_digits():
    assert without_numbers("layers/12/block_0/3x/²/7") == "layers/00/block_0/3x/²/0"
    assert has_numbers("blocks/0/layers") and not has_numbers("block_0/layers/²")


def test_stacks_with_numbers_in_their_path_are_distinguished():
    rules = PartitionRules([("w", ("mlp",))], layers=["blocks/0/layers"])
    leaf = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    specs = match_partition_rules(rules, {"blocks": [{"layers": {"w": leaf}}, {"layers": {"w": leaf}}]})
    assert [block["layers"]["w"] for block in specs["blocks"]] == [P(None, "tp"), P("tp")]


CHARACTERS = "019.^$|/+*?()"
CLASSES = r"a _ ab a0 b_1 \d \w \1 \b \/ [^/] [0-9] [a0-4] \x30 \[0-9]"
GROUPS = ["(?=1)", "(?!a0)", "(?<=/)", "(?<!1)", "(?i:A)", "(?:a|0)", "(?P<n>.)", "(?P=n)", "{2}"]
pieces = st.sampled_from([*CHARACTERS, *CLASSES.split(), *GROUPS])


def compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


patterns = st.lists(pieces, min_size=1, max_size=5).map("".join).filter(compiles)
parts = st.sampled_from(["a", "ab", "a0", "a1", "b_1", "A", "0", "1", "9", "00", "10", "19", "q"])
paths = st.lists(parts, min_size=1, max_size=4).map("/".join)


@settings(max_examples=150, deadline=None)
@given(st.lists(patterns, min_size=1, max_size=4), st.lists(paths, min_size=1, max_size=8, unique=True))
def test_the_first_rule_found_in_a_path_applies_to_every_leaf(patterns, paths):
    table = [*((pattern, P(f"axis_{i}")) for i, pattern in enumerate(patterns)), ("", P("rest"))]
    tree = nest((f"{path}/w", jax.ShapeDtypeStruct((4,), jnp.float32)) for path in paths)
    specs = match_partition_rules(PartitionRules(table), tree)
    first = lambda path: next(spec for pattern, spec in table if re.search(pattern, path))  # noqa: E731
    assert specs == nest((f"{path}/w", first(f"{path}/w")) for path in paths)


@settings(max_examples=300, deadline=None)
@given(patterns, paths)
def test_patterns_that_ignore_numbers_match_the_same_span_without_them(pattern, path):
    if ignores_numbers(pattern):
        found, again = re.search(pattern, path), re.search(pattern, without_numbers(path))
        assert (found and found.span()) == (again and again.span())
