"""Matrix products of half-precision arrays with float32 accumulation, forward and backward."""

from collections.abc import Iterable
from functools import partial

import jax
import jax.numpy as jnp


def dot_float32(
    x: jax.Array, w: jax.Array, dimension_numbers: jax.lax.DotDimensionNumbers, **kinds: object
) -> jax.Array:
    """`jax.lax.dot_general` with a float32 result, for trailing dims of `x` against leading dims of `w`.

    With `preferred_element_type=float32` alone, the backward pass multiplies the float32 cotangent, and a GPU runs both
    of its products at the rate of TF32, half the rate of bf16. Here the cotangent is first rounded to the dtype of `x`.
    This loses no precision if the result is rounded to that dtype next, as in a residual stream. All three products
    accumulate in float32, over the shards of a mesh too. A custom VJP has no forward-mode derivative, so float32 arrays
    use plain `dot_general`.
    """
    (x_dims, w_dims), (x_batch, w_batch) = dimension_numbers
    k = len(w_dims)
    assert not (x_batch or w_batch) and tuple(w_dims) == tuple(range(k)) and tuple(x_dims) == _last(x, k)
    return _dot(x, w, x_dims, w_dims) if x.dtype == jnp.float32 else _rounded(x, w, k)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rounded(x: jax.Array, w: jax.Array, k: int) -> jax.Array:
    return _dot(x, w, _last(x, k), range(k))


def _forward(x: jax.Array, w: jax.Array, k: int) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _rounded(x, w, k), (x, w)


def _backward(k: int, saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    g, m = g.astype(x.dtype), w.ndim - k
    rows = range(x.ndim - k)
    return _dot(g, w, _last(g, m), _last(w, m)).astype(x.dtype), _dot(x, g, rows, rows).astype(w.dtype)


_rounded.defvjp(_forward, _backward)


def _dot(a: jax.Array, b: jax.Array, a_dims: Iterable[int], b_dims: Iterable[int]) -> jax.Array:
    dims = ((tuple(a_dims), tuple(b_dims)), ((), ()))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def _last(x: jax.Array, n: int) -> tuple[int, ...]:
    return tuple(range(x.ndim - n, x.ndim))
