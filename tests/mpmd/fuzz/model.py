"""The module, the loss and the batch of a case."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tests.mpmd.fuzz import operations
from tests.mpmd.fuzz.case import Case
from tests.mpmd.fuzz.case import Layer as Description
from tests.mpmd.fuzz.operations import LENGTH, ROWS, VOCAB, WIDTH, Context, Streams


class Layer(nnx.Module):
    def __init__(self, description: Description, shared: operations.Shared):
        self.wrapper = description.wrapper
        self.operations = nnx.List([operations.OPERATIONS[name].make(shared) for name in description.operations])

    def __call__(self, s: Streams, c: Context) -> Streams:
        def body(layer: Any, s: Streams) -> Streams:
            for operation in layer.operations:
                s = operation(s, c)
            return s

        return operations.WRAPPERS[self.wrapper].call(body, self, s, c)


class Model(nnx.Module):
    def __init__(self, case: Case):
        rngs = nnx.Rngs(0)
        kernel = nnx.Param(0.3 * jax.random.normal(rngs.params(), (WIDTH, WIDTH)))
        shared = operations.Shared(rngs, kernel, *(operations.Variable(jnp.zeros(WIDTH)) for _ in range(2)))
        self.table, self.head = operations.weight(shared, VOCAB, WIDTH), operations.weight(shared, VOCAB, WIDTH)
        self.tied = case.head == "tied"
        self.strength, self.rule = nnx.Param(jnp.asarray(0.9)), case.table
        self.before = nnx.List([operations.OPERATIONS[name].make(shared) for name in case.before])
        self.layers = nnx.List([Layer(layer, shared) for layer in case.layers])
        self.after = nnx.List([operations.OPERATIONS[name].make(shared) for name in case.after])
        self.is_complex = "complex" in case.features

    def __call__(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, Streams]:
        table = operations.RULES[self.rule][1](self.table[...])
        c = {name: batch[name] for name in ("tokens", "features", "mask")}
        c |= {"table": table, "strength": self.strength[...]}
        x = table[batch["tokens"]]
        z = (0.3 + 0.2j) * x if self.is_complex else jnp.zeros(x.shape, jnp.complex64)
        stash, zero = jnp.zeros(x.shape), jnp.zeros(())
        s: Streams = {"x": x, "z": z, "n": batch["tokens"], "stash": stash, "loss": zero, "metric": zero}
        for operation in [*self.before, *self.layers, *self.after]:
            s = operation(s, c)
        x = s["x"].astype(jnp.float32)
        if self.is_complex:
            # A product of complex values: of the real part alone, no stage would receive a complex array.
            x = x + (s["z"] * jax.lax.complex(x, 0.5 * x)).real
        return x @ (table if self.tied else self.head[...]).T, s


def make_loss(case: Case) -> Any:
    """The loss function, whose result has the form `case.loss`."""

    def loss_fn(model: Model, batch: dict[str, jax.Array]) -> Any:
        logits, s = model(batch)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]) * batch["mask"]
        total, weight = losses.sum() + 0.01 * s["loss"], batch["mask"].sum()
        if case.loss == "scalar":
            return total
        if case.loss == "sum":
            return total, weight
        return total, weight, {"metric": s["metric"], "integers": s["n"].sum().astype(jnp.float32)}

    return loss_fn


def make_batch(case: Case) -> dict[str, np.ndarray]:
    """Rows differ in their number of targets, so microbatches differ in weight."""
    rng, rows = np.random.default_rng(0), ROWS * case.microbatches
    tokens = rng.integers(0, VOCAB, (rows, LENGTH + 1)).astype(np.int32)
    live = np.arange(LENGTH) < rng.integers(1, LENGTH + 1, (rows, 1))
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "mask": live.astype(np.float32),
        "features": rng.normal(size=(rows, LENGTH, WIDTH)).astype(np.float32),
    }


def make_optimizer(case: Case) -> optax.GradientTransformation:
    """Momentum, so that the state of the optimizer contains the gradients."""
    momentum = optax.sgd(0.1, momentum=0.9)
    return optax.chain(optax.clip_by_global_norm(0.5), momentum) if case.optimizer == "clip" else momentum
