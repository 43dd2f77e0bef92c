"""Lists, scanned stacks and single layers under `layers` of split_stages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_mesh.mpmd.split.split import split_stages

NAMES = ("inc", "down", "norm", "out")


class UNet(nnx.Module):
    """Layers as attributes. All leaves of `norm` and of `square` have the same leading size, as those of a stack."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.inc = nnx.Conv(2, 8, (3, 3), rngs=rngs)
        self.down = nnx.Sequential(nnx.Conv(8, 4, (3, 3), rngs=rngs), jnp.tanh, nnx.Dropout(0.1, rngs=rngs))
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.square = nnx.Linear(4, 4, rngs=rngs)
        self.out = nnx.Conv(12, 2, (1, 1), rngs=rngs)

    def __call__(self, x):
        wide = jnp.tanh(self.inc(x))
        x = self.square(self.norm(self.down(wide)))
        return self.out(jnp.concatenate([wide, x], -1))


class Scanned(nnx.Module):
    """A stack; its counter exists once."""

    def __init__(self, depth: int = 4):
        make = lambda key: nnx.Linear(8, 8, rngs=nnx.Rngs(key))  # noqa: E731
        linear = nnx.vmap(make)(jax.random.split(jax.random.key(0), depth))
        self.blocks = nnx.Dict({"linear": linear, "count": nnx.BatchStat(jnp.zeros(()))})

    def __call__(self, x):
        return nnx.scan(lambda x, layer: jnp.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, self.blocks.linear
        )


class Twice(nnx.Module):
    """The first half of the list also hangs at `early`, which comes before `layers` in the state."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        layers = [nnx.Linear(8, 8, rngs=rngs) for _ in range(4)]
        self.early = nnx.List(layers[:2])
        self.layers = nnx.List(layers)

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


class Inside(nnx.Module):
    def __init__(self, make=Scanned):
        inner = make()
        self.backbone = nnx.Dict(inner=inner)
        self.layers = inner.blocks if isinstance(inner, Scanned) else inner.layers

    def __call__(self, x):
        return self.backbone.inner(x)


def squared(model, x):
    return (model(x) ** 2).sum(), x.size


def split(make, shape, layers, num_stages, **kinds):
    return split_stages(squared, make, np.ones(shape, np.float32), layers=layers, num_stages=num_stages, **kinds)


def stages_of(staged):
    return {leaf.path: users for leaf, users in zip(staged.leaves, staged.users, strict=True)}


def test_modules_that_are_named_as_layers_are_one_layer_each():
    names = ("inc", "down", "norm", "square", "out")
    staged = split(UNet, (2, 4, 4, 2), names, 5)
    assert list(staged.ranks) == [(name, 0) for name in names]
    assert all(leaf.rows is None for leaf in staged.leaves)  # no kernel is cut
    for path, users in stages_of(staged).items():
        assert users == (names.index(path.split("/")[0]),), path
    lines = str(staged).splitlines()
    assert [line.split(";")[0] for line in lines if line.startswith("stage")] == [
        f"stage {k}: {name}" for k, name in enumerate(names)
    ]
    assert lines[-5:] == [f"{name}: one layer" for name in names]


@pytest.mark.parametrize("path", ["blocks", "blocks/linear"])
def test_a_scanned_stack_is_cut_between_its_layers(path):
    staged = split(Scanned, (2, 8), path, 2)
    assert {leaf.path: leaf.rows for leaf in staged.leaves if "kernel" in leaf.path and leaf.rows and leaf.rows[0]} == {
        "blocks/linear/kernel": (2, 4)
    }
    assert list(staged.ranks) == [(path, i) for i in range(4)]
    assert str(staged).splitlines()[-1] == f"{path}: a stack of 4"


def test_a_list_that_hangs_elsewhere_too_is_followed_whole():
    staged = split(Twice, (2, 8), "layers", 4)
    assert [users for _, users in sorted(stages_of(staged).items())] == [(k,) for k in range(4) for _ in range(2)]
    assert "early/0/kernel" in stages_of(staged)
    assert str(staged).splitlines()[-1] == "layers: a list of 4"


@pytest.mark.parametrize("make", [Scanned, Twice])
def test_a_list_or_stack_is_found_under_the_path_that_the_state_has(make):
    staged = split(lambda: Inside(make), (2, 8), "layers", 4)
    assert list(staged.ranks) == [("layers", i) for i in range(4)]
    assert sorted(users for users in stages_of(staged).values() if len(users) == 1)[-1] == (3,)


def test_layers_that_the_loss_does_not_call_are_reported():
    def first_three(model, x):
        for layer in list(model.layers)[:3]:
            x = layer(x)
        return (x**2).sum(), x.size

    staged = split_stages(first_three, Twice, np.ones((2, 8), np.float32), layers="layers", num_stages=2)
    assert str(staged).splitlines()[-1] == "layers: a list of 4, of which the loss calls 3"
