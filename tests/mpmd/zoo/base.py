"""Shared code of the model zoo: the `Case` type, batches, losses, the plain step as the oracle, and the comparison."""

import functools
import math
import re
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
from flax_mesh.mpmd import MpmdMesh
from flax_mesh.step.loss import LossFn
from flax_mesh.step.state import TrainState, TreeDefinition
from flax_mesh.train import make_train_step
from flax_mesh.tree import named_leaves

VOCAB, WIDTH, LENGTH = 32, 16, 6
AXES = ("pp", "dp", "fsdp", "ep", "tp", "sp")
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
    unused: tuple[str, ...] = ()


class Decoder(nnx.Module):
    """Embedding, layers and head. Subclasses define the layers and how they are called."""

    layer: Callable[[nnx.Rngs], Any]
    tied = False  # the head is the embedding's table

    def __init__(self, depth: int = 4, rngs: nnx.Rngs | None = None):
        rngs = rngs or nnx.Rngs(0)
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = self.make_layers(depth, rngs)
        if not self.tied:
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.head = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def make_layers(self, depth: int, rngs: nnx.Rngs) -> Any:
        return nnx.List([self.layer(rngs) for _ in range(depth)])

    def run(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def logits(self, x):
        return self.embed.attend(x) if self.tied else self.head(self.norm(x))

    def __call__(self, tokens):
        return self.logits(self.run(self.embed(tokens)))


def groups(**sizes: int) -> MpmdMesh:
    """A mesh with the sizes of some axes, such as pp=2; all others are 1."""
    shape = [sizes.get(name, 1) for name in AXES]
    return MpmdMesh(create_mesh(tuple(shape), AXES, devices=jax.devices()[: math.prod(shape)]), "pp")


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


def initial_state(make: Callable[[], Any], optimizer: optax.GradientTransformation, wrt: Any = nnx.Param) -> TrainState:
    """The initial state on one device, computed operation by operation, which is much faster than compiling."""
    model = make()
    modules = {"model": model, "optimizer": nnx.Optimizer(model, optimizer, wrt=wrt)}
    graphdef, state = nnx.split(modules)
    sharding = NamedSharding(create_mesh((1,), ("fsdp",), devices=jax.devices()[:1]), PartitionSpec())
    leaves, treedef = jax.tree.flatten(jax.device_put(state, sharding))
    return TrainState(tuple(leaves), TreeDefinition(graphdef, treedef))


def start(case: Case, optimizer: optax.GradientTransformation = OPTIMIZER) -> TrainState:
    return initial_state(case.make, optimizer, case.wrt)


class Run(NamedTuple):
    """The leaves of the state by path, before and after the run, and the metrics of each step."""

    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]
    metrics: list[dict[str, np.ndarray]]


def leaves_of(state: TrainState) -> dict[str, np.ndarray]:
    """Leaves by path, on the host, without random keys, which a step does not change."""
    found = named_leaves(state.to_nnx())
    return {p: np.array(x) for p, x in found if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)}


def merged_leaves(state: TrainState) -> dict[str, np.ndarray]:
    """Leaves by path, with the chunks of a stack ("from 2") concatenated."""
    found: dict[str, list[np.ndarray]] = {}
    for path, leaf in leaves_of(state).items():
        found.setdefault(re.sub(r"/from \d+$", "", path), []).append(leaf)
    return {path: parts[0] if len(parts) == 1 else np.concatenate(parts) for path, parts in found.items()}


def run_steps(step: Callable[..., Any], state: TrainState, batch: Any, change=lambda state: state) -> Run:
    """Two steps. `change(state)` may corrupt the state between them."""
    before, rows = merged_leaves(state), []
    for _ in range(2):
        state, metrics = step(state, batch)
        rows.append({name: np.asarray(x) for name, x in metrics.items()})
        state = change(state)
    return Run(before, merged_leaves(state), rows)


def seed_of(case: Case) -> int:
    return zlib.crc32(case.name.encode()) % 1000


@functools.cache
def plain_run(case: Case, optimizer: optax.GradientTransformation = OPTIMIZER, microbatches: int = 4) -> Run:
    """Two steps on one device without a pipeline."""
    state = start(case, optimizer)
    step = make_train_step(
        case.loss_fn,
        state,
        seed=seed_of(case),
        num_microbatches=microbatches,
        layers=layers_of(case),
        compiler_options=FAST,
    )
    return run_steps(step, state, case.batch(2 * microbatches))


def differences(want: Run, have: Run, rtol: float = 1e-5) -> list[str]:
    """Names of leaves and metrics that differ by more than rounding."""
    pairs = {f"after {path}": (x, have.after.get(path)) for path, x in want.after.items()}
    pairs |= {f"before {path}": (x, have.before.get(path)) for path, x in want.before.items()}
    for step, (a, b) in enumerate(zip(want.metrics, have.metrics, strict=True)):
        pairs |= {f"step {step}: {name}": (a.get(name), b.get(name)) for name in a.keys() | b.keys()}
    extra = [f"unexpected: {path}" for path in have.after.keys() - want.after.keys()]
    return extra + [name for name, (a, b) in pairs.items() if not _close(a, b, rtol)]


def _close(a: np.ndarray | None, b: np.ndarray | None, rtol: float) -> bool:
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not np.issubdtype(a.dtype, np.inexact):
        return np.array_equal(a, b)
    # Sums that cancel have an error relative to their terms, so compare relative to the largest value of the leaf.
    return np.allclose(a, b, rtol=0.0, atol=rtol * np.abs(a).max(initial=0.0))
