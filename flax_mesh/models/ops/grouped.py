"""The product of rows with the matrix of their group, without the matrices of other groups.

XLA has a kernel for `jax.lax.ragged_dot` on TPUs only. On CPUs and GPUs it multiplies each row with the matrices of all
groups, and stores the rows once per group. There, a loop over tiles of rows visits each tile once for every group that
has rows in it:

    group of each row   0 0 0 1 | 1 1 1 2 | 2 2 2 2         12 rows, 3 groups, tiles of 4 rows
    (tile, group)       (0, 0) (0, 1) (1, 1) (1, 2) (2, 2)  at most tiles + groups - 1 visits

Shape letters: A rows, G groups, K contracted, N columns, V visits.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

_LEAST = 16  # rows of a tile
_TILES = 4  # of an average group: visits of tiles with rows of two groups add at most a quarter to the work


class _Visits(NamedTuple):
    """For each visit the group, the first row of its tile, and the first and the end of the rows that it computes."""

    group: jax.Array
    start: jax.Array
    low: jax.Array
    high: jax.Array


def grouped_dot(x_AK: jax.Array, kernels_GKN: jax.Array, sizes_G: jax.Array, platform: str) -> jax.Array:
    """Row i of `x_AK` @ the matrix of its group: (A, N). The first `sizes_G[0]` rows belong to group 0, and so on.

    Rows beyond the last group are zero on CPUs and GPUs, and undefined on TPUs. `platform`: of the devices. On CPUs and
    GPUs `jax.jvp` of the product is an error, but `jax.jvp` of its gradient is not.
    """
    if platform not in ("cpu", "gpu"):
        return jax.lax.ragged_dot(x_AK, kernels_GKN, sizes_G)
    arrays = x_AK, kernels_GKN, sizes_G
    axes = frozenset().union(*map(_axes, arrays))
    return _product(*(_vary(x, axes) for x in arrays))


@jax.custom_vjp
def _product(x_AK: jax.Array, kernels_GKN: jax.Array, sizes_G: jax.Array) -> jax.Array:
    return _rows(x_AK, kernels_GKN, sizes_G, contracted=1)


def _forward(x_AK: jax.Array, kernels_GKN: jax.Array, sizes_G: jax.Array):
    return _rows(x_AK, kernels_GKN, sizes_G, contracted=1), (x_AK, kernels_GKN, sizes_G)


def _backward(residuals: tuple[jax.Array, ...], gradient_AN: jax.Array):
    x_AK, kernels_GKN, sizes_G = residuals
    matrices_GKN = _matrices(x_AK, kernels_GKN, sizes_G, gradient_AN)
    return _rows(gradient_AN, kernels_GKN, sizes_G, contracted=2), matrices_GKN, None


_product.defvjp(_forward, _backward)


def _rows(x: jax.Array, kernels: jax.Array, sizes_G: jax.Array, contracted: int) -> jax.Array:
    """Each row times the matrix of its group, which is contracted along the dim `contracted` of `kernels`."""
    tile = _tile(x.shape[0], kernels.shape[0])

    def visit(out: jax.Array, at: _Visits) -> tuple[jax.Array, None]:
        kernel = jax.lax.dynamic_index_in_dim(kernels, at.group, keepdims=False)
        product = jax.lax.dot_general(_slice(x, at, tile), kernel, (((1,), (contracted - 1,)), ((), ())))
        new = jnp.where(_is_computed(at, tile), product, _slice(out, at, tile))
        return jax.lax.dynamic_update_slice_in_dim(out, new, at.start, axis=0), None

    out = jnp.zeros((x.shape[0], kernels.shape[3 - contracted]), jnp.promote_types(x.dtype, kernels.dtype))
    return jax.lax.scan(visit, _vary(out, _axes(x)), _visits(sizes_G, x.shape[0], tile))[0]


def _matrices(x: jax.Array, kernels: jax.Array, sizes_G: jax.Array, gradient: jax.Array) -> jax.Array:
    """The gradient of the matrices: for each group the product of its rows of `x` and of `gradient`."""
    tile = _tile(x.shape[0], kernels.shape[0])
    dtype = jnp.promote_types(kernels.dtype, jnp.float32)  # the sum of a group's tiles is rounded once

    def visit(total: jax.Array, at: _Visits) -> tuple[jax.Array, None]:
        rows = jnp.where(_is_computed(at, tile), _slice(x, at, tile), 0)
        part = jax.lax.dot_general(
            rows, _slice(gradient, at, tile), (((0,), (0,)), ((), ())), preferred_element_type=dtype
        )
        new = jax.lax.dynamic_index_in_dim(total, at.group, keepdims=False) + part
        return jax.lax.dynamic_update_index_in_dim(total, new, at.group, axis=0), None

    total = _vary(jnp.zeros(kernels.shape, dtype), _axes(x))
    return jax.lax.scan(visit, total, _visits(sizes_G, x.shape[0], tile))[0].astype(kernels.dtype)


def _tile(num_rows: int, num_groups: int) -> int:
    size = -(-num_rows // (_TILES * num_groups * _LEAST)) * _LEAST
    return min(size, num_rows)


def _visits(sizes_G: jax.Array, num_rows: int, tile: int) -> _Visits:
    """The visits in the order of their rows, then visits without rows, up to the largest possible number of visits."""
    ends_G = jnp.cumsum(sizes_G)
    starts_G = ends_G - sizes_G
    first_G = starts_G // tile
    counts_G = jnp.where(sizes_G > 0, (ends_G - 1) // tile - first_G + 1, 0)
    most = -(-num_rows // tile) + sizes_G.size - 1
    at_V, done_G = jnp.arange(most), jnp.cumsum(counts_G)
    group_V = jnp.minimum(jnp.sum(done_G[:, None] <= at_V[None], axis=0), sizes_G.size - 1)
    tile_V = first_G[group_V] + at_V - (done_G - counts_G)[group_V]
    low_V = jnp.maximum(starts_G[group_V], tile_V * tile)
    high_V = jnp.where(at_V < done_G[-1], ends_G[group_V], 0)
    # The last tile starts earlier if there are too few rows for it; the rows before it are not computed again.
    return _Visits(group_V, jnp.clip(tile_V * tile, 0, num_rows - tile), low_V, high_V)


def _slice(x: jax.Array, at: _Visits, tile: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, at.start, tile, axis=0)


def _is_computed(at: _Visits, tile: int) -> jax.Array:
    rows = at.start + jnp.arange(tile)
    return ((at.low <= rows) & (rows < at.high))[:, None]


def _axes(x: jax.Array) -> frozenset[str]:
    """The axes of a shard_map around the call along which `x` differs."""
    return jax.typeof(x).manual_axis_type.varying


def _vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """`x`, marked as different along the `axes` of a shard_map; the gradient is summed over those that are new."""
    new = tuple(sorted(axes - _axes(x)))
    return jax.lax.pcast(x, new, to="varying") if new else x
