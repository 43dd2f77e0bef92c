"""Shares of the FLOPs: a stage that does far more than the others is reported, and frozen copies are beside layers."""

import warnings

import jax.numpy as jnp
import pytest
from flax import nnx

from flax_mesh.mpmd import StagedModel, split_stages
from flax_mesh.mpmd.split.backward import differentiate
from flax_mesh.program.program import flops
from tests.mpmd.zoo.base import WIDTH, vectors
from tests.mpmd.zoo.models import BY_NAME

COUNT = 4  # layers and stages
X = vectors(4)


class Net(nnx.Module):
    def __init__(self, of: type[nnx.Variable] = nnx.Param, depth: int = COUNT):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(i)) for i in range(depth)])
        for layer in self.layers:
            setattr(layer, "kernel", of(layer.kernel[...]))  # noqa: B010 (another type than the class has)

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x

    def transposed(self, x):
        for layer in self.layers[::-1]:
            x = jnp.tanh(x @ layer.kernel[...].T)
        return x


class Frozen(nnx.Variable):
    """A variable that is not trained."""


class Pair(nnx.Module):
    """A model with a frozen copy."""

    def __init__(self, of: type[nnx.Variable] = Frozen, depth: int = COUNT):
        self.student, self.teacher = Net(), Net(of, depth)


def recursive(model, batch):
    x = batch["x"]
    for _ in range(4):
        x = model(x)
    return jnp.sum(x**2), len(x)


def autoencoder(model, batch):
    return jnp.sum((model.transposed(model(batch["x"])) - batch["y"]) ** 2), len(batch["x"])


def distilled(model, batch):
    """The model reads results of the frozen copy, so none of its layers may wait for a later layer of the copy."""
    return jnp.sum(model.student(model.teacher(batch["x"])) ** 2), len(batch["x"])


def shares(staged: StagedModel) -> list[float]:
    found = [sum(map(flops, stage.forward.eqns)) for stage in staged.cut(staged.example).stages]
    return [x / sum(found) for x in found]


def split(loss_fn, make, layers: str | tuple[str, ...] = "layers") -> StagedModel:
    return split_stages(loss_fn, make, X, layers=layers, num_stages=COUNT)


@pytest.mark.parametrize(
    ("loss_fn", "make", "layers", "cause"),
    [
        (recursive, Net, "layers", r"6%, 6%, 6%, 81% of the FLOPs: stage 3(?s:.*)nnx\.List\(\[\*layers, \*layers\]\)"),
        (autoencoder, Net, "layers", "13%, 61% of the FLOPs: stage 3(?s:.*)layers of earlier stages"),
        (distilled, Pair, "student/layers", r"stage 0(?s:.*)layers=\('student/layers', 'teacher/layers'\)"),
    ],
)
def test_a_stage_far_above_the_mean_is_reported_with_all_shares_and_a_repair(loss_fn, make, layers, cause):
    with pytest.warns(UserWarning, match=cause):
        staged = split(loss_fn, make, layers)
    assert max(shares(staged)) > 1.5 / COUNT and str(staged).endswith(staged.imbalance)


def test_the_repairs_balance_the_stages():
    class Listed(Net):
        def __init__(self):
            super().__init__()
            self.layers = nnx.List([*self.layers] * 4)

    once = lambda model, batch: (jnp.sum(model(batch["x"]) ** 2), len(batch["x"]))  # noqa: E731
    for staged in (split(once, Listed), split(distilled, Pair, ("teacher/layers", "student/layers"))):
        assert max(shares(staged)) < 0.3 and staged.imbalance == ""


@pytest.mark.parametrize(("name", "num_sent"), [("reference", 2), ("teacher", 1)])
def test_a_frozen_copy_is_beside_the_layers_that_it_copies_and_gets_no_gradients(name, num_sent):
    case = BY_NAME[name]
    staged = split(case.loss_fn, case.make, case.layers)
    assert max(shares(staged)) < 0.3 and staged.imbalance == ""
    for leaf, users in zip(staged.leaves, staged.users, strict=True):
        assert users == (int(leaf.path.split("/")[2]),), leaf.path
    assert "teacher/layers: a frozen copy of student/layers" in str(staged)
    for stage in staged.cut(staged.example).stages[1:]:
        found = differentiate(stage, [at for at, leaf in enumerate(staged.leaves) if leaf.trained])
        assert (len(found.received), len(found.floats_in)) == (2 * num_sent, num_sent)


@pytest.mark.parametrize("kinds", [{"of": nnx.Param}, {"depth": COUNT - 1}], ids=str)
def test_a_list_that_is_trained_or_has_another_length_is_no_copy(kinds):
    with warnings.catch_warnings(action="ignore"):
        assert not split(BY_NAME["reference"].loss_fn, lambda: Pair(**kinds), "student/layers").copies
