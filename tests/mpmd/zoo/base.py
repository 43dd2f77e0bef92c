"""Shared code of the model zoo: the `Case` type, seeded batches, losses, and the plain step as the oracle."""

import functools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from flax_mesh import create_mesh
from flax_mesh.step.loss import LossFn
from flax_mesh.step.state import TrainState, TreeDefinition
from flax_mesh.train import make_train_step
from flax_mesh.tree import named_leaves

VOCAB, WIDTH, LENGTH = 32, 16, 6
FAST = {"xla_backend_optimization_level": 0}  # halves the compile time
# A large epsilon: otherwise Adam turns rounding errors of gradients near zero into full steps.
OPTIMIZER = optax.adamw(1e-2, eps=1e-2, weight_decay=1e-2)


class Case(NamedTuple):
    """A model with its loss. `unused` are paths of trainable leaves whose gradient is zero."""

    name: str
    make: Callable[[], nnx.Module]
    loss_fn: LossFn
    batch: Callable[[int], Any]  # rows -> a pytree of numpy arrays with that leading dim
    layers: str | tuple[str, ...] = "layers"
    wrt: Any = nnx.Param
    max_stages: int = 4
    unused: tuple[str, ...] = ()


def text(rows: int) -> dict[str, np.ndarray]:
    """Tokens and targets (rows, LENGTH). The number of targets differs by row, so microbatches differ in weight."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, VOCAB, (rows, LENGTH + 1)).astype(np.int32)
    live = np.arange(LENGTH) < rng.integers(2, LENGTH + 1, (rows, 1))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": live.astype(np.float32)}


def images(rows: int) -> dict[str, np.ndarray]:
    """Images (rows, 8, 8, 3) with labels of 5 classes."""
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 5, (rows,)).astype(np.int32)
    return {"image": rng.normal(size=(rows, 8, 8, 3)).astype(np.float32), "label": labels}


def vectors(rows: int) -> dict[str, np.ndarray]:
    """Vectors x and y, (rows, WIDTH)."""
    rng = np.random.default_rng(2)
    return {name: rng.normal(size=(rows, WIDTH)).astype(np.float32) for name in "xy"}


def cross_entropy(logits: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Returns (sum of the losses of live targets, number of live targets, number of correct predictions)."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    right = (jnp.argmax(logits, -1) == batch["targets"]) * batch["mask"]
    return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"]), {"accuracy": jnp.sum(right)}


def language_loss(model: Any, batch: dict[str, jax.Array]):
    return cross_entropy(model(batch["tokens"]), batch)


def label_loss(model: Any, batch: dict[str, jax.Array]):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"])
    return jnp.sum(losses), losses.size


def squared_loss(model: Any, batch: dict[str, jax.Array]):
    return jnp.sum((model(batch["x"]) - batch["y"]) ** 2), batch["x"].shape[0]


def layers_of(case: Case) -> tuple[str, ...]:
    return (case.layers,) if isinstance(case.layers, str) else case.layers


def start(case: Case, optimizer: optax.GradientTransformation = OPTIMIZER) -> TrainState:
    """The initial state on one device, computed operation by operation, which is much faster than compiling."""
    model = case.make()
    modules = {"model": model, "optimizer": nnx.Optimizer(model, optimizer, wrt=case.wrt)}
    graphdef, state = nnx.split(modules)
    sharding = NamedSharding(create_mesh((1,), ("fsdp",), devices=jax.devices()[:1]), PartitionSpec())
    leaves, treedef = jax.tree.flatten(jax.device_put(state, sharding))
    return TrainState(tuple(leaves), TreeDefinition(graphdef, treedef))


class Run(NamedTuple):
    """The leaves of the state by path, before and after the run, and the metrics of each step."""

    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]
    metrics: list[dict[str, np.ndarray]]


def leaves_of(state: TrainState) -> dict[str, np.ndarray]:
    """Leaves by path, on the host, without random keys, which a step does not change."""
    found = named_leaves(state.to_nnx())
    return {p: np.array(x) for p, x in found if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)}


def seed_of(case: Case) -> int:
    return zlib.crc32(case.name.encode()) % 1000


@functools.cache
def plain_run(case: Case, rows: int = 8, microbatches: int = 4, steps: int = 2) -> Run:
    """`steps` steps on one device without a pipeline."""
    state = start(case)
    step = make_train_step(
        case.loss_fn,
        state,
        seed=seed_of(case),
        num_microbatches=microbatches,
        layers=layers_of(case),
        compiler_options=FAST,
    )
    before, rows_of_metrics = leaves_of(state), []
    for _ in range(steps):
        state, metrics = step(state, case.batch(rows))
        rows_of_metrics.append({name: np.asarray(x) for name, x in metrics.items()})
    return Run(before, leaves_of(state), rows_of_metrics)
