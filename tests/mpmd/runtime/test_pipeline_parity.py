"""What the split assumes of derivative rules. tests/mpmd/zoo compares pipelines of models that have them."""

import jax
import jax.numpy as jnp

from flax_mesh.mpmd.split.assign import is_expensive
from flax_mesh.mpmd.split.jaxpr import trace
from tests.mpmd.fuzz.operations import RULES


def test_custom_jvp_rules_are_linear_and_may_be_repeated_and_custom_vjp_rules_run_once():
    for fn in (jax.nn.relu, jax.nn.silu, jax.nn.logsumexp):
        program, _ = trace(fn, jnp.ones(8))
        assert not any(is_expensive(eqn) for eqn in program.eqns)
    for feature, fn in RULES.values():
        program, _ = trace(fn, jnp.ones(8))
        assert feature != "nonlinear_rule" or any(is_expensive(eqn) for eqn in program.eqns)
    product = jax.custom_jvp(lambda x: x @ x)
    product.defjvp(lambda primals, tangents: (product(*primals), tangents[0]))
    program, _ = trace(product, jnp.ones((8, 8)))
    assert all(is_expensive(eqn) for eqn in program.eqns)
