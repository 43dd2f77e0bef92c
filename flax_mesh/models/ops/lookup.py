"""Rows of a half-precision table, with a gradient that is summed in float32."""

import jax
import jax.numpy as jnp


def lookup(table_VD: jax.Array, ids: jax.Array) -> jax.Array:
    """`table_VD[ids]`. The gradient of a row is summed in float32 over the ids that are equal, and rounded once.

    The gradient of `jnp.take` is summed in the dtype of the table: for a row of bfloat16 that 4096 tokens look up, each
    with a gradient of 1, it is 256, because 256 + 1 is rounded to 256.
    """
    return _rounded(table_VD, ids) if table_VD.dtype.itemsize < 4 else jnp.take(table_VD, ids, axis=0)


@jax.custom_jvp
def _rounded(table_VD: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.take(table_VD, ids, axis=0)


@_rounded.defjvp
def _tangent(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (table_VD, ids), (change_VD, _) = primals, tangents
    return _rounded(table_VD, ids), jnp.take(change_VD.astype(jnp.float32), ids, axis=0).astype(table_VD.dtype)
