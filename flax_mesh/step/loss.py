"""What a loss function is, how its random streams are keyed, and what follows from its gradients.

The plain step and the pipeline share this file, so that they cannot differ in it.
"""

import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from flax_mesh.step.state import TrainState, check_same_structure
from flax_mesh.tree import in_stack, layer_path, map_named

Batch = Any  # a pytree of arrays whose first dim is the batch
Metrics = dict[str, jax.Array]


class LossFn(Protocol):
    """loss_fn(model, batch) -> (loss_sum, weight) or (loss_sum, weight, metrics), or a bare scalar.

    loss_sum is summed over the tokens (or examples) of the batch and not normalised; weight is their number. Sums and
    weights of microbatches add up, and are divided once, so that microbatches of unequal weight are right. metrics is
    a dict of further sums, divided by the same weight. A bare scalar counts with weight 1 per microbatch.
    """

    def __call__(self, model: Any, batch: Any, /) -> Any: ...


def run_loss(
    loss_fn: LossFn,
    model: Any,
    wrt: Any,
    params: nnx.State,
    others: nnx.State,
    batch: Batch,
    seeds: Sequence[Any],
    layers: Iterable[str],
) -> tuple[jax.Array, tuple[jax.Array, Metrics, nnx.State]]:
    """loss_sum, (weight, metrics, `others` after the call) of `model` with its `wrt` variables replaced by `params`
    and its variables that are neither these nor random streams by `others`. The streams are keyed by `seeds`."""
    graphdef, _, streams, _ = nnx.split(model, wrt, nnx.RngState, ...)
    keyed = reseed(streams, seeds, layers)
    here = jax.tree.map(lambda x: x, others)  # Variables may be changed only in the trace that made them
    called = nnx.merge(graphdef, params, keyed, here)
    with nnx.use_eager_sharding(False):  # as the model was made: what it makes anew must come out the same
        loss_sum, weight, metrics = sums_of(loss_fn(called, batch))
    after, *parts = nnx.split(called, wrt, nnx.RngState, ...)
    check_same_structure(graphdef, (params, keyed, others), after, parts)
    return loss_sum, (weight, metrics, parts[2])


def apply_gradients(
    state: TrainState,
    others: nnx.State,
    grads: nnx.State,
    sums: Metrics,
    weight: jax.Array,
    learning_rate: optax.Schedule | None = None,
) -> tuple[TrainState, Metrics]:
    """The state after one optimizer step, and the metrics, from what the microbatches summed up to.

    `grads` and `sums` are divided by `weight` here, once. `others` are the variables that are neither trained nor
    random streams, as the last microbatch left them.
    """
    model, optimizer = state.merge()
    count = optimizer.step[...]
    graphdef, params, streams, _ = nnx.split(model, optimizer.wrt, nnx.RngState, ...)
    divisor = jnp.where(weight == 0, 1.0, weight)  # a batch without a single target: no gradient, not NaN
    grads = jax.tree.map(lambda g, p: (g / divisor).astype(p.dtype), grads, params)
    metrics = {name: total / divisor for name, total in sums.items()}
    metrics |= {"weight": weight, "grad_norm": optax.tree.norm(grads)}
    if learning_rate is not None:
        metrics["learning_rate"] = jnp.asarray(learning_rate(count), jnp.float32)
    model = nnx.merge(graphdef, params, streams, others)
    optimizer.update(model, grads)
    return state.replace(model, optimizer), metrics


def sums_of(result: Any) -> tuple[jax.Array, jax.Array, Metrics]:
    """(loss_sum, weight, metrics) of what a loss function returned, in the forms that LossFn allows."""
    parts = result if isinstance(result, tuple) else (result, 1.0)
    if len(parts) not in (2, 3) or result is None:
        what = "None" if result is None else f"a tuple of {len(parts)}"
        raise ValueError(
            f"loss_fn returned {what}; it must return (loss_sum, weight), (loss_sum, weight, metrics) or a scalar."
        )
    loss_sum, weight = (jnp.asarray(x, jnp.promote_types(jnp.result_type(x), jnp.float32)) for x in parts[:2])
    if loss_sum.shape or weight.shape:
        raise ValueError(f"loss_fn must return scalars, got loss {loss_sum.shape} and weight {weight.shape}.")
    metrics = dict(parts[2]) if len(parts) == 3 else {}
    if taken := metrics.keys() & {"loss", "weight", "grad_norm", "learning_rate"}:
        raise ValueError(f"metrics of loss_fn must not be called {', '.join(sorted(taken))}: the step gives these.")
    return loss_sum, weight, metrics


def reseed(streams: nnx.State, parts: Sequence[Any], layers: Iterable[str] = ()) -> nnx.State:
    """Random streams keyed by `parts` and by their own path, counters at 0. A scanned stack has one key a layer."""

    def new(path: str, leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.zeros_like(leaf)
        key = jax.random.key(0, impl=jax.random.key_impl(leaf))
        for part in parts:
            key = jax.random.fold_in(key, part)
        stack = in_stack(path, layers)
        if stack is None and leaf.ndim == 0:
            return jax.random.fold_in(key, _number(path))
        paths = [layer_path(path, stack, i) if stack else f"{path}/{i}" for i in range(leaf.shape[0])]
        keys = jax.vmap(lambda n: jax.random.fold_in(key, n))(jnp.array([_number(p) for p in paths], jnp.uint32))
        return keys if leaf.ndim == 1 else jax.vmap(lambda k: jax.random.split(k, leaf.shape[1:]))(keys)

    return map_named(new, streams)


def _number(path: str) -> int:
    return zlib.crc32(path.encode())  # the same in every process, unlike hash()
