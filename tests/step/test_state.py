"""TrainState.with_state: a train state with the leaves of another tree with the same paths."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flax_mesh import abstract_state, create_mesh, init_state, named_leaves
from flax_mesh.train import abstract_train_state, init_train_state
from flax_mesh.tree import map_named


def make():
    model = nnx.Dict(layers=nnx.List([nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(11)]))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


@pytest.fixture(scope="module")
def abstract():
    return abstract_state(make, create_mesh((1,), ("fsdp",), devices=jax.devices()[:1]), [(".*", ())])


@pytest.mark.parametrize("kind", [lambda state: state, nnx.State.to_pure_dict])
def test_with_state_takes_the_leaves_and_keeps_the_definition(kind, abstract):
    layout, state = abstract_train_state(make, abstract), init_state(make, abstract)
    got = layout.with_state(kind(state))
    assert got.definition is layout.definition
    named = layout.with_state(map_named(lambda path, _: path, layout.to_nnx()))
    assert named.leaves[0] == "model/layers/0/bias"
    kernels = [layer.kernel[...] for layer in got.merge()[0].layers]  # more than ten layers: as text, 10 sorts before 2
    expected = dict(named_leaves(state))
    assert len(kernels) == 11
    assert all(np.array_equal(kernel, expected[f"model/layers/{i}/kernel"]) for i, kernel in enumerate(kernels))


def test_with_state_names_every_path_that_differs(abstract):
    layout = abstract_train_state(make, abstract)
    other = {"model": abstract["model"], "more": 1, "optimizer": {"step": 0}}
    with pytest.raises(ValueError, match="must have the same paths as `to_nnx\\(\\)`") as error:
        layout.with_state(other)
    lines = str(error.value).splitlines()[1:]
    moments = [f"optimizer/opt_state/0/{m}/layers/{{0..10}}/{p}" for m in ("mu", "nu") for p in ("bias", "kernel")]
    missing = ["optimizer/opt_state/0/count", *moments]
    assert lines == ["  more: unknown", *(f"  {path}: missing" for path in missing)]


def test_with_state_refuses_leaves_with_the_same_path():
    """Both would get the value of one of them."""

    def make():
        model = nnx.Dict({"a/b": nnx.Param(jnp.zeros(2)), "a": nnx.Dict(b=nnx.Param(jnp.ones(2)))})
        return model, nnx.Optimizer(model, optax.sgd(1e-3), wrt=nnx.Param)

    abstract = abstract_state(make, create_mesh(), [(".*", ())])
    with pytest.raises(ValueError, match="  model/a/b: 2 leaves have this path"):
        init_train_state(make, abstract)
