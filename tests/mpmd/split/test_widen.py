"""A program in half precision, widened, is the same program in float32."""

import jax
import jax.numpy as jnp
import numpy as np

from flax_mesh.mpmd.split.widen import call_widened, rough_outputs
from flax_mesh.program.program import trace

X, W = np.random.default_rng(0).normal(size=(2, 4, 4)).astype(np.float32)


def dtypes(x, w):
    found = jnp.einsum("ab,cb->ac", x, w, preferred_element_type=x.dtype) + jnp.arange(4, dtype=x.dtype)
    found = found.at[jnp.array([0, 2, 2])].add(x[:3]) * jnp.asarray(1.5, x.dtype).astype(jnp.float32)
    return found.astype(x.dtype), jnp.sort(x, -1), jax.lax.top_k(x, 2), jnp.cumsum(x, 0), jnp.max(x), jnp.argmax(x)


def test_a_widened_program_is_the_program_in_float32():
    """Loops, branches and calls: tests/program."""
    half = jax.ShapeDtypeStruct(X.shape, jnp.bfloat16)
    program, _ = trace(dtypes, half, half)
    want, have = jax.tree.leaves(dtypes(X, W)), jax.tree.leaves(call_widened(program, [X, W]))
    assert [x.dtype for x in have] == [x.dtype for x in want] and not any(rough_outputs(program))
    for a, b in zip(want, have, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_kernel_runs_in_its_own_type_and_its_results_are_rough():
    def fn(x, key):
        bits = jax.lax.bitcast_convert_type(x, jnp.uint16)
        noise = jax.random.normal(key, (3,), x.dtype)  # exact bits become a value: not rough
        return x.astype(jnp.float8_e4m3fn) * 2, bits, jnp.sin(bits.astype(jnp.float32)), noise

    program, _ = trace(fn, jax.ShapeDtypeStruct((3,), jnp.bfloat16), jax.random.key(0))
    assert rough_outputs(program) == [False, True, True, False]
    x = np.array([1.01, 2, 3], np.float32)
    doubled, bits, _, noise = jax.tree.leaves(call_widened(program, [x, jax.random.key(0)]))
    np.testing.assert_array_equal(doubled, 2 * x)
    np.testing.assert_array_equal(bits, jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16))
    assert doubled.dtype == noise.dtype == jnp.float32
