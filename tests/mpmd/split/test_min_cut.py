"""What crosses a cut: never more bytes than any other set from which the rest can be made."""

from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from flax_mesh.mpmd import split_stages
from flax_mesh.mpmd.split.min_cut import minimum_cut
from tests.mpmd.runtime.test_pipeline import compare, groups


@st.composite
def graphs(draw) -> tuple[dict[int, list[int] | None], dict[int, int | None], list[int]]:
    """(parents, weights, wanted) of up to 7 nodes, whose parents come before them."""
    size = draw(st.integers(1, 7))
    parents: dict[int, list[int] | None] = {}
    for node in range(size):
        before = st.lists(st.integers(0, node - 1), max_size=3, unique=True) if node else st.just([])
        parents[node] = draw(st.none() | before)
    weights = {node: draw(st.none() | st.integers(0, 4)) for node in range(size)}
    wanted = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=3, unique=True))
    return parents, weights | {node: draw(st.integers(0, 4)) for node in wanted}, wanted


def is_enough(chosen, parents, wanted) -> bool:
    there: dict[int, bool] = {}
    for node in sorted(parents):
        above = parents[node]
        there[node] = node in chosen or (above is not None and all(there[p] for p in above))
    return all(there[node] for node in wanted)


@settings(max_examples=300, deadline=None)
@given(graphs())
def test_no_other_set_is_lighter_or_as_light_with_fewer(case):
    parents, weights, wanted = case
    chosen = minimum_cut(wanted, parents.__getitem__, weights.__getitem__)
    assert is_enough(chosen, parents, wanted)
    assert all(weights[node] is not None for node in chosen)

    def price(nodes) -> tuple[Any, int]:
        return sum(weights[node] for node in nodes), len(nodes)

    free = [node for node in parents if weights[node] is not None]
    every = (set(nodes) for count in range(len(free) + 1) for nodes in combinations(free, count))
    assert price(chosen) == min(price(nodes) for nodes in every if is_enough(nodes, parents, wanted))


def test_of_equal_cuts_the_nearest_is_taken():
    parents = {0: None, 1: [0], 2: [1], 3: [2], 4: [2]}
    weights = {0: 4, 1: 4, 2: 4, 3: 4, 4: 4}
    assert minimum_cut([3, 4], parents.__getitem__, weights.__getitem__) == {2}
    assert minimum_cut([3], parents.__getitem__, weights.__getitem__) == {3}


def test_a_long_chain_is_cut_in_no_time():
    parents = {node: [node - 1] if node % 3 else None if node == 0 else [node - 1, -node] for node in range(3000)}
    parents |= {-node: None for node in range(3000)}
    assert minimum_cut([2999], parents.__getitem__, lambda node: 8) == {2999}


class Block(nnx.Module):
    """Pre-norm in float32 of a stream in half precision, as language models have it."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(16, dtype=jnp.float32, rngs=rngs)
        self.up = nnx.Linear(16, 16, dtype=jnp.bfloat16, use_bias=False, rngs=rngs)

    def __call__(self, x):
        added = self.up(self.norm(x).astype(x.dtype))
        return (x.astype(jnp.float32) + added.astype(jnp.float32)).astype(x.dtype)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([Block(rngs) for _ in range(4)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def loss_fn(model, batch):
    return jnp.mean(model(batch["x"].astype(jnp.bfloat16)).astype(jnp.float32) ** 2)


def split(loss=loss_fn, make: Any = Net, num_stages=2, **options):
    batch = {"x": jax.ShapeDtypeStruct((2, 8, 16), jnp.float32)}
    mesh = Mesh(np.array(jax.devices()[:1]), ("dp",))
    return split_stages(loss, lambda: make(nnx.Rngs(0)), batch, num_stages=num_stages, mesh=mesh, **options)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_stream_in_half_precision_crosses_once_and_in_half_precision(num_stages):
    """Of it the next stage makes the sum in float32, the norm's mean and what it divides."""
    staged = split(num_stages=num_stages)
    received = [
        [v.aval.str_short(short_dtypes=True) for v in stage.received] for stage in staged.cut(staged.example).stages
    ]
    assert received == [[], *[["bf16[2,8,16]"]] * (num_stages - 1)]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_training_in_half_precision_has_the_numbers_of_one_device(name):
    """What is made again is what was sent before, and gradients come back in the precision of the stream."""
    rng = np.random.default_rng(0)
    batches = [{"x": rng.normal(size=(8, 8, 16)).astype(np.float32)} for _ in range(2)]
    options = {"name": name, "mesh": groups(pp=4), "rtol": 1e-5}
    compare(lambda: Net(nnx.Rngs(0)), loss_fn, batches, 4, optax.sgd(0.1), **options)


class Wide(nnx.Module):
    """Its second layer begins with a product of two halves of what the first gives: a table of no parameters."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)])

    def __call__(self, x):
        x = self.layers[0](x)
        table = jax.jit(jnp.einsum, static_argnums=0)("bsd,btd->bst", x, x)  # expensive, whatever it is wrapped in
        return self.layers[1](custom(table))


@jax.custom_jvp
def custom(x):
    return _wider(x)


@custom.defjvp
def _custom_jvp(primals, tangents):
    return jax.jvp(_wider, primals, tangents)


def _wider(x):
    return jnp.einsum("bst,btu->bsu", x, jnp.concatenate([x, 2 * x], axis=-1))


def test_a_product_inside_of_a_custom_derivative_is_not_made_twice():
    staged = split(lambda model, batch: jnp.mean(model(batch["x"])), Wide)
    first, second = staged.cut(staged.example).stages
    assert [v.aval.str_short(short_dtypes=True) for v in second.received] == [
        "f32[2,8,16]"
    ]  # though twice as large as what it is made of
    names = [eqn.primitive.name for eqn in second.forward.eqns]
    assert "custom_jvp_call" not in names and names.count("dot_general") == 1
    assert "custom_jvp_call" in [eqn.primitive.name for eqn in first.forward.eqns]
