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

from flax_mesh import abstract_state, create_mesh, current_mesh, shard
from flax_mesh.errors import ShardingError
from flax_mesh.train import init_train_state, make_eval_step, make_train_step
from flax_mesh.tree import named_leaves

pytestmark = pytest.mark.usefixtures("quick_unless_slow")

NAMES, SHAPE, WIDTH, VOCAB = ("dp", "fsdp", "tp"), (2, 2, 2), 8, 16
ROWS = ("fsdp", "dp")
OPTIMIZER = optax.sgd(0.1, momentum=0.9)  # after one step the trace is the gradient


def is_explicit() -> bool:
    mesh = current_mesh()
    return mesh is not None and AxisType.Explicit in mesh.axis_types


def out(*spec: Any) -> Any:
    return {"out_sharding": P(*spec)} if is_explicit() else {}


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        key = rngs.params()
        self.up = nnx.Param(0.3 * jax.random.normal(key, (WIDTH, 16), **out("fsdp", "tp")), out_sharding=("fsdp", "tp"))
        self.down = nnx.Linear(16, WIDTH, rngs=rngs, kernel_metadata={"out_sharding": ("tp", None)})

    def __call__(self, x):
        up = jax.sharding.reshard(self.up[...], P(None, "tp")) if is_explicit() else self.up[...]
        h = jnp.einsum("btd,df->btf", x, up, **out(ROWS, None, "tp"))
        return x + self.down(jax.nn.silu(h), **out(ROWS, None, None))


class Net(nnx.Module):
    """With `out_sharding=` where its mesh is Explicit, as the guides of JAX write models."""

    def __init__(self, rngs: nnx.Rngs):
        self.table = nnx.Param(0.3 * jax.random.normal(rngs.params(), (VOCAB, WIDTH)), out_sharding=("tp", None))
        self.layers = nnx.List([Layer(rngs) for _ in range(2)])

    def __call__(self, tokens):
        x = self.table[...].at[tokens].get(**out(ROWS, None, None))
        for layer in self.layers:
            x = nnx.remat(Layer.__call__)(layer, x)
        return jnp.einsum("btd,vd->btv", x, self.table[...], **out(ROWS, None, "tp"))


def loss_fn(model, batch):
    logits = model(batch["x"])
    picked = batch["y"][..., None] == jnp.arange(VOCAB)
    losses = jax.nn.logsumexp(logits, -1) - jnp.where(picked, logits, 0).sum(-1)
    return losses.sum(), batch["y"].size


def make_net():
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)


def batch_of(mesh=None, rows=16):
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, VOCAB, (rows, 4)).astype(np.int32) for name in "xy"}
    return batch if mesh is None else shard(batch, P(ROWS), mesh)


def mesh_of(axis_types, shape=SHAPE):
    return create_mesh(shape, NAMES, devices=jax.devices()[: int(np.prod(shape))], axis_types=axis_types)


def gradients(state) -> dict[str, np.ndarray]:
    leaves = {path: np.asarray(x) for path, x in named_leaves(state.to_nnx()) if "/trace/" in path}
    assert leaves
    return leaves


def step_on(axis_types, num_microbatches: int, shape=SHAPE):
    """(metrics, gradients) of one step. On one device no array has a sharding."""
    mesh = mesh_of(axis_types, shape)
    abstract = abstract_state(make_net, mesh, rules=None if shape == SHAPE else [(".*", ())])
    state = init_train_state(make_net, abstract)
    step = make_train_step(loss_fn, state, num_microbatches=num_microbatches)
    state, metrics = step(state, batch_of(mesh))
    assert [x.sharding for x in state.leaves] == [x.sharding for x in jax.tree.leaves(abstract)]
    return {name: float(x) for name, x in metrics.items()}, gradients(state)


def assert_same(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found[1].keys() == expected[1].keys()
    for path, value in expected[1].items():
        np.testing.assert_allclose(found[1][path], value, rtol=1e-5, atol=1e-6, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("num_microbatches", [1, pytest.param(2, marks=pytest.mark.slow), 4])
def test_a_step_equals_that_on_one_device(num_microbatches: int):
    assert_same(step_on("explicit", num_microbatches), step_on("auto", 1, (1, 1, 1)))


def test_an_evaluation_equals_that_on_one_device():
    sums = []
    for axis_types, shape in (("explicit", SHAPE), ("auto", (1, 1, 1))):
        mesh = mesh_of(axis_types, shape)
        rules = None if shape == SHAPE else [(".*", ())]
        state = init_train_state(make_net, abstract_state(make_net, mesh, rules=rules))
        sums.append(float(make_eval_step(loss_fn, state)(state, batch_of(mesh))["loss"]))
    assert sums[0] == pytest.approx(sums[1], rel=1e-6)


class Written(nnx.Module):
    """Layers that compute `operation(x, kernel)`."""

    def __init__(self, rngs: nnx.Rngs, operation: Callable[..., Any]):
        self.layers = nnx.List([WrittenLayer(rngs, operation) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class WrittenLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, operation: Callable[..., Any]):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (8, 8)), out_sharding=("fsdp", "tp"))
        self.operation = operation

    def __call__(self, x):
        return self.operation(x, self.kernel[...])


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
    def make():
        model = Written(nnx.Rngs(0), operation)
        return model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)

    mesh = mesh_of(axis_types)
    state = init_train_state(make, abstract_state(make, mesh))
    sum_loss = lambda model, x: (jnp.sum(model(x) ** 2), 16)  # noqa: E731
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
