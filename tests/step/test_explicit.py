"""Steps of models that are written for Explicit axes, and errors about the types of mesh axes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from flax_mesh import abstract_state, create_mesh, shard
from flax_mesh.errors import ShardingError
from flax_mesh.train import abstract_train_state, init_train_state, make_eval_step, make_train_step
from flax_mesh.tree import named_leaves

pytestmark = pytest.mark.usefixtures("quick_unless_slow")
ROWS = ("fsdp", "dp")


def mesh_of(axis_types):
    return create_mesh((2, 2, 2), ("dp", "fsdp", "tp"), axis_types=axis_types)


class WrittenLayer(nnx.Module):
    """Computes `operation(x, kernel)`."""

    def __init__(self, rngs: nnx.Rngs, operation: Callable[..., Any]):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (8, 8)), out_sharding=("fsdp", "tp"))
        self.operation = operation

    def __call__(self, x):
        return self.operation(x, self.kernel[...])


def sum_loss(model, x):
    return jnp.sum(model(x) ** 2), 16


def state_of(create, operation, mesh):
    """`create` is `init_train_state` or, for steps that are only traced, `abstract_train_state`."""

    def make():
        rngs = nnx.Rngs(0)
        model = nnx.Sequential(WrittenLayer(rngs, operation), WrittenLayer(rngs, operation))
        return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    return create(make, abstract_state(make, mesh))


def product(x, w):
    return jnp.einsum("bd,de->be", x, jax.sharding.reshard(w, P(None, "tp")), out_sharding=P(ROWS, None))


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_a_step_and_an_evaluation_equal_those_on_auto_axes(num_microbatches):
    found = []
    for axis_types, operation in (("explicit", product), ("auto", jnp.matmul)):
        mesh = mesh_of(axis_types)
        state = state_of(init_train_state, operation, mesh)
        batch = shard(np.linspace(-1, 1, 128, dtype=np.float32).reshape(16, 8), P(ROWS), mesh)
        sums = make_eval_step(sum_loss, state)(state, batch)
        shardings = [x.sharding for x in state.leaves]
        state, metrics = make_train_step(sum_loss, state, num_microbatches=num_microbatches)(state, batch)
        assert [x.sharding for x in state.leaves] == shardings
        # After one step of SGD the trace is the gradient.
        found.append([*metrics.values(), sums["loss"], *(x for p, x in named_leaves(state.to_nnx()) if "trace" in p)])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


AMBIGUOUS = "every operation must determine the sharding of its result"
NOT_EXPLICIT = "refer to Explicit axes, but the axes of this mesh are Auto"


@pytest.mark.parametrize(
    ("axis_types", "operation", "layer", "what", "repair"),
    [
        ("explicit", lambda x, w: x @ w, 1, AMBIGUOUS, "Pass out_sharding= to the operation"),
        ("explicit", lambda x, w: x + w.sum(0), 0, AMBIGUOUS, "jax.sharding.reshard"),
        ("auto", lambda x, w: jnp.einsum("bd,de->be", x, w, out_sharding=P("dp")), 0, NOT_EXPLICIT, "'explicit'"),
        ("auto", lambda x, w: x @ w + jax.sharding.reshard(x, P("dp")), 0, NOT_EXPLICIT, "mesh.axis_types=explicit"),
        ("auto", lambda x, w: w.at[x[:, 0].astype(int)].get(out_sharding=P("dp")), 0, NOT_EXPLICIT, "'explicit'"),
    ],
)
@pytest.mark.parametrize("evaluated", [False, True])
def test_errors_name_the_module_and_the_line(axis_types, operation, layer, what, repair, evaluated):
    mesh = mesh_of(axis_types)
    state = state_of(abstract_train_state, operation, mesh)
    run = make_eval_step(sum_loss, state) if evaluated else make_train_step(sum_loss, state)
    batch = shard(np.ones((16, 8), np.float32), P("dp", "fsdp" if "sum" in operation.__code__.co_names else None), mesh)
    place = rf"layers/{layer} \(WrittenLayer\): \S*test_explicit.py:\d+ \(<lambda>\): .*lambda x, w: "
    with pytest.raises(ShardingError, match=rf"{what}.*\n{place}.*\n(.*\n)+.*{repair}"):
        run(state, batch)


def test_an_error_of_the_constructor_names_the_line():
    class Wrong(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jax.sharding.reshard(jnp.ones((8, 8)), P("fsdp")), out_sharding=("fsdp", None))

    message = rf"{NOT_EXPLICIT}.*\n\S*test_explicit.py:\d+ \(\S*Wrong.__init__\): self.kernel = "
    with pytest.raises(ShardingError, match=message):
        abstract_state(Wrong, mesh_of("auto"))
    (leaf,) = jax.tree.leaves(abstract_state(Wrong, mesh_of("explicit")))
    assert leaf.sharding.spec == P("fsdp", None)


def test_an_error_on_explicit_axes_has_that_on_auto_axes_as_its_cause():
    """The model is written for Auto axes, and its last line is the mistake: on Explicit axes an earlier one fails."""

    def make():
        axes = jax.sharding.get_abstract_mesh().axis_types
        place = jax.sharding.reshard if AxisType.Explicit in axes else jax.lax.with_sharding_constraint
        split = [place(jnp.ones((8, 8)), spec) for spec in (P(None, "tp"), P("tp", None))]
        return {"made": nnx.Linear(8, 8, rngs=nnx.Rngs(0)), "wrong": split[0] @ split[1]}["mad"]

    with pytest.raises(ShardingError, match=AMBIGUOUS) as info:
        abstract_state(make, mesh_of("explicit"))
    assert info.value.__cause__ is not None and repr(info.value.__cause__.__cause__) == "KeyError('mad')"


def test_an_error_that_has_a_cause_keeps_it():
    def make():
        try:
            raise KeyError(len(calls))
        except KeyError as error:
            calls.append(error)
            raise TypeError("no such kernel") from error

    calls = []
    with pytest.raises(TypeError, match="no such kernel") as info:
        abstract_state(make, mesh_of("explicit"))
    assert len(calls) == 2 and info.value.__cause__ is calls[1]
    assert isinstance(calls[1].__context__, TypeError) and calls[1].__context__.__cause__ is calls[0]
