"""Random attentions in blocks equal the attentions as they were written, and have no array of scores."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from flax_mesh.blockwise.transform import blockwise_attention
from tests.blockwise.chains import Chain, chains, program_of, rare_chains
from tests.blockwise.compare import PLANTED, apart, gradients, largest_square, plant

MOST = 1e-5
SAMPLE = (
    Chain(
        "merged_groups", 45, 34, 9, ("causal:where:least", "documents:add:1e9"), "sink_in_front", ("dropout",), "one"
    ),
    Chain("grouped", 40, 40, 17, (), "absent_selected", ("gate_of_keys",), "one"),
    Chain("keys_first", 37, 37, 16, ("table", "quotient:where:1e4", "cap"), "signed_factor", ("gate_of_keys",), "two"),
)


def exact(fn, args):
    with jax.enable_x64(True):
        wide = [x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in jax.tree.leaves(args)]
        return gradients(fn, jax.tree.unflatten(jax.tree.structure(args), wide))[0]


def problem_of(chain):
    """What is wrong with a chain in blocks; "" if nothing is."""
    fn, args = program_of(chain)
    lines = []
    blockwise = blockwise_attention(fn, block=chain.block, say=lines.append)
    expected, _ = gradients(fn, args)
    if not all(np.isfinite(x).all() for x in expected):
        return ""
    found, jaxpr = gradients(blockwise, args)
    rounded = "bfloat16" in (*chain.scores, *chain.weights)
    difference, most = apart(found, expected), 3e-2 if rounded else MOST
    if not difference <= most:
        if rounded:  # blocks round other numbers, so they may differ by what the rounding changes
            names = [tuple(name for name in ops if name != "bfloat16") for ops in (chain.scores, chain.weights)]
            unrounded, _ = program_of(chain._replace(scores=names[0], weights=names[1]))
            most = max(most, 2 * apart(expected, exact(unrounded, args)))
        reference = exact(fn, args)
        if not apart(found, reference) <= max(most, 8 * apart(expected, reference)):
            return f"{difference:.1e} from the program, {apart(found, reference):.1e} from float64, {lines}"
    if not lines:
        return "no line"
    rewritten = not any("stays" in x for x in lines) and chain.queries == chain.keys
    square = largest_square(jaxpr, chain.keys) if rewritten else 0
    return f"an array of {square} elements is left, {lines}" if square else ""


@pytest.mark.parametrize("chain", SAMPLE, ids=range(len(SAMPLE)))
def test_attentions_of_a_sample_in_blocks_equal_those_as_written(chain):
    assert problem_of(chain) == ""


@pytest.mark.slow
@pytest.mark.parametrize("mistake", PLANTED)
def test_random_attentions_find_a_planted_mistake(mistake, monkeypatch):
    plant(mistake, monkeypatch)
    some = settings(max_examples=60, deadline=None, derandomize=True, phases=[Phase.generate], database=None)
    assert problem_of(hypothesis.find(chains(), lambda chain: bool(problem_of(chain)), settings=some))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [chains, rare_chains])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_random_attention_in_blocks_equals_that_as_written(strategy, data):
    assert problem_of(data.draw(strategy())) == ""
