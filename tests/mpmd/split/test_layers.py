"""Lists, scanned stacks and single layers under `layers` of split_stages."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from flax_mesh.mpmd import split_stages
from tests.mpmd.zoo.base import WIDTH, squared_loss, vectors
from tests.mpmd.zoo.calls import Attributes, ListedElsewhere


class Scanned(nnx.Module):
    """A stack; its counter exists once."""

    def __init__(self):
        make = lambda key: nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(key))  # noqa: E731
        linear = nnx.vmap(make)(jax.random.split(jax.random.key(0), 4))
        self.blocks = nnx.Dict({"linear": linear, "count": nnx.BatchStat(jnp.zeros(()))})

    def __call__(self, x):
        call = nnx.scan(lambda x, layer: jnp.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return call(x, self.blocks.linear)


class Periods(nnx.Module):
    """Every second layer has another activation: a scan over pairs of the first four layers, and the fifth one."""

    def __init__(self):
        make = lambda key: nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(key))  # noqa: E731
        self.blocks = nnx.vmap(make)(jax.random.split(jax.random.key(0), 5))

    def __call__(self, x):
        kernels = self.blocks.kernel[...]

        def two(x, pair):
            x = jnp.tanh(x @ pair[0])
            return jnp.sin(x @ pair[1]), None

        return jnp.tanh(jax.lax.scan(two, x, kernels[:4].reshape(2, 2, WIDTH, WIDTH))[0] @ kernels[4])


class Inside(nnx.Module):
    def __init__(self, make):
        inner = make()
        self.backbone = nnx.Dict(inner=inner)
        self.layers = inner.blocks if isinstance(inner, Scanned) else inner.layers

    def __call__(self, x):
        return self.backbone.inner(x)


def split(make, layers, num_stages, loss_fn=squared_loss, **kinds):
    return split_stages(loss_fn, make, vectors(2), layers=layers, num_stages=num_stages, **kinds)


def stages_of(staged):
    return {leaf.path: users for leaf, users in zip(staged.leaves, staged.users, strict=True)}


def test_modules_that_are_named_as_layers_are_one_layer_each():
    names = ("first", "second", "norm", "out")
    staged = split(Attributes, names, 4)
    assert list(staged.ranks) == [(name, 0) for name in names]
    assert all(leaf.rows is None for leaf in staged.leaves)  # no kernel is cut
    for path, users in stages_of(staged).items():
        assert users == (names.index(path.split("/")[0]),), path
    lines = [line.split(";")[0] for line in str(staged).splitlines() if not line.startswith("cuts=")]
    received = ["  receives f32[2,32], 256 B"]
    assert lines[:4] == ["stage 0: first", "stage 1: second", *received, "stage 2: norm"]
    assert lines[4:] == [*received, "stage 3: out", *received, *(f"{name}: one layer" for name in names)]


@pytest.mark.parametrize("path", ["blocks", "blocks/linear"])
def test_a_scanned_stack_is_cut_between_its_layers(path):
    staged = split(Scanned, path, 2)
    rows = {leaf.path: leaf.rows for leaf in staged.leaves if "kernel" in leaf.path and leaf.rows and leaf.rows[0]}
    assert rows == {"blocks/linear/kernel": (2, 4)}
    assert list(staged.ranks) == [(path, i) for i in range(4)]
    assert str(staged).splitlines()[-1] == f"{path}: a stack of 4"


CALLS = {  # cuts -> by stage (scans over whole periods, layers that are called one by one)
    (2,): [(1, 0), (1, 1)],
    (1,): [(0, 1), (1, 2)],
    (3,): [(1, 1), (0, 2)],
    (1, 2, 3): [(0, 1), (0, 1), (0, 1), (0, 2)],
}


@pytest.mark.parametrize("cuts", CALLS)
def test_a_stack_that_is_scanned_in_periods_is_cut_between_any_layers(cuts):
    staged = split(Periods, "blocks", len(cuts) + 1, cuts=cuts)
    assert list(staged.ranks) == [("blocks", i) for i in range(5)]
    assert max(staged.costs[:4]) < 1.01 * min(staged.costs[:4])
    users = {leaf.rows: users for leaf, users in zip(staged.leaves, staged.users, strict=True)}
    assert users == {rows: (k,) for k, rows in enumerate(itertools.pairwise((0, *cuts, 5)))}
    programs = [[eqn.primitive.name for eqn in stage.forward.eqns] for stage in staged.cut(staged.example).stages]
    assert [(names.count("scan"), names.count("dot_general")) for names in programs] == CALLS[cuts]


@pytest.mark.slow
@pytest.mark.parametrize("cuts", CALLS)
def test_stages_of_a_stack_scanned_in_periods_equal_the_model(cuts):
    for split_backward in (False, True):
        split(Periods, "blocks", len(cuts) + 1, cuts=cuts).check(split_backward=split_backward)


def test_a_list_that_hangs_elsewhere_too_is_followed_whole():
    staged = split(ListedElsewhere, "layers", 4)
    assert [users for _, users in sorted(stages_of(staged).items())] == [(k,) for k in range(4) for _ in range(2)]
    assert "early/0/kernel" in stages_of(staged)
    assert str(staged).splitlines()[-1] == "layers: a list of 4"


@pytest.mark.parametrize("make", [Scanned, ListedElsewhere])
def test_a_list_or_stack_is_found_under_the_path_that_the_state_has(make):
    staged = split(lambda: Inside(make), "layers", 4)
    assert list(staged.ranks) == [("layers", i) for i in range(4)]
    assert sorted(users for users in stages_of(staged).values() if len(users) == 1)[-1] == (3,)


def test_layers_that_the_loss_does_not_call_are_reported():
    def first_three(model, batch):
        x = batch["x"]
        for layer in list(model.layers)[:3]:
            x = layer(x)
        return (x**2).sum(), x.size

    staged = split(ListedElsewhere, "layers", 2, first_three)
    assert str(staged).splitlines()[-1] == "layers: a list of 4, of which the loss calls 3"


def test_one_layer_that_is_in_the_list_several_times_is_split_between_its_calls():
    class Shared(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))] * 4)

        def __call__(self, x):
            for layer in self.layers:
                x = jnp.tanh(layer(x))
            return x

    staged = split(Shared, "layers", 2)
    assert set(stages_of(staged).values()) == {(0, 1)} and str(staged).count("receives") == 1
    forwards = [stage.forward for stage in staged.cut(vectors(2)).stages]
    assert [sum(eqn.primitive.name == "dot_general" for eqn in one.eqns) for one in forwards] == [2, 2]
