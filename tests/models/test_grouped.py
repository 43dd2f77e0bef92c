"""Products of rows with the matrix of their group, compared with a loop over rows; their cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mesh.models.ops.grouped import _tile, _visits, grouped_dot

K, N = 5, 7
visits_of = jax.jit(_visits, static_argnums=(1, 2))
SIZES = {  # rows of each group -> number of rows
    "even": ([16, 16, 16, 16], 64),
    "uneven, and none": ([40, 0, 3, 21], 64),
    "one group has all rows": ([0, 0, 64, 0], 64),
    "one group": ([50], 50),
    "no multiple of a tile": ([33, 1, 30, 9], 73),
    "rows without a group": ([20, 0, 17, 5], 90),
    "no row has a group": ([0, 0], 40),
    "fewer rows than a tile": ([1, 0, 2], 3),
    "more groups than rows": ([0, 1, 0, 0, 1, 1, 0, 0], 3),
}


@pytest.mark.parametrize("name", SIZES)
def test_each_row_is_multiplied_with_the_matrix_of_its_group_alone(name):
    sizes, num_rows = SIZES[name]
    rng = np.random.default_rng(0)
    x, g = rng.normal(size=(num_rows, K)).astype("f"), rng.normal(size=(num_rows, N)).astype("f")
    kernels = rng.normal(size=(len(sizes), K, N)).astype("f")
    groups = np.repeat(np.arange(len(sizes)), sizes)

    def products(x, kernels, sizes, g):
        out, pull = jax.vjp(lambda x, w: grouped_dot(x, w, sizes, "cpu"), x, kernels)
        return out, *pull(g)

    results = jax.jit(products)(x, kernels, np.asarray(sizes), g)
    expected = np.zeros((num_rows, N), "f"), np.zeros((num_rows, K), "f"), np.zeros_like(kernels)
    for row, group in enumerate(groups):
        expected[0][row], expected[1][row] = x[row] @ kernels[group], kernels[group] @ g[row]
        expected[2][group] += np.outer(x[row], g[row])
    for found, wanted in zip(results, expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_gradients_of_float64_are_sums_in_float64_and_have_derivatives():
    rng = np.random.default_rng(0)
    x, kernels, sizes = rng.normal(size=(50, K)), rng.normal(size=(2, K, N)), np.array([20, 30])
    with jax.enable_x64(True):
        gradient = jax.grad(lambda w: jnp.sum(jnp.sin(grouped_dot(jnp.asarray(x), w, jnp.asarray(sizes), "cpu"))))
        found, change = jax.jit(lambda w: jax.jvp(gradient, (w,), (w,)))(kernels)
    for group, rows in enumerate((slice(0, 20), slice(20, 50))):
        y = x[rows] @ kernels[group]
        np.testing.assert_allclose(found[group], x[rows].T @ np.cos(y), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(change[group], x[rows].T @ (-np.sin(y) * y), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SIZES)
def test_visits_compute_every_row_of_a_group_once(name):
    sizes, num_rows = SIZES[name]
    tile = _tile(num_rows, len(sizes))
    visits = visits_of(np.asarray(sizes), num_rows, tile)
    computed = []
    for group, start, low, high in zip(*map(np.asarray, visits), strict=True):
        computed += [(row, group) for row in range(start, start + tile) if low <= row < high]
    assert computed == list(enumerate(np.repeat(np.arange(len(sizes)), sizes)))


def test_grouped_products_take_at_most_a_quarter_more_work_than_needed():
    """Which `jax.lax.ragged_dot` on CPUs and GPUs multiplies by the number of groups."""
    rows, groups = 4096, 8
    tile = _tile(rows, groups)
    visits = jax.eval_shape(lambda sizes: _visits(sizes, rows, tile), jax.ShapeDtypeStruct((groups,), "int32"))
    assert visits.group.size * tile <= 1.25 * rows
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((rows, 64), (groups, 64, 48))]
    loss = lambda x, w: grouped_dot(x, w, jnp.full(groups, rows // groups), "cpu").sum()  # noqa: E731
    memory = jax.jit(jax.grad(loss, (0, 1))).lower(*shapes).compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 3 * rows * 64 * 4  # no rows once per group
