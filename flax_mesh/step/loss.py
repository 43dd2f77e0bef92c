"""The protocol of loss functions, the seeding of random streams, and the parameter update from summed gradients.

The plain step and the pipeline both call these functions, so that both compute the same numbers.
"""

import math
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
Limits = tuple[Any, Any]  # the largest loss and the largest gradient norm whose update is applied
NO_LIMITS = (math.inf, math.inf)


class LossFn(Protocol):
    """loss_fn(model, batch) returns (loss_sum, weight), (loss_sum, weight, metrics) or a scalar.

    `loss_sum` is the sum over the tokens (or examples) of the batch, not the mean; `weight` is their number. Both are
    summed over the microbatches and divided once at the end: the result is the mean over the entire batch, also if
    microbatches differ in weight. `metrics` is a dict of further sums, divided by the same weight. A scalar is a
    loss_sum with weight 1 per microbatch.
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
    """Returns loss_sum, (weight, metrics, `others` after the call), in the form of `jax.value_and_grad(has_aux=True)`.

    Before the call, the `wrt` variables of `model` are replaced by `params`, its random streams are reseeded from
    `seeds`, and all other variables are replaced by `others`.
    """
    graphdef, _, streams, _ = nnx.split(model, wrt, nnx.RngState, ...)
    keyed = reseed(streams, seeds, layers)
    # Flax allows a Variable to be changed only in the trace that created it, and `others` may be from an outer one.
    local = jax.tree.map(lambda x: x, others)
    called = nnx.merge(graphdef, params, keyed, local)
    # The model was created with eager sharding off; variables that the call creates must have the same metadata.
    with nnx.use_eager_sharding(False):
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
    """Returns the state after one optimizer step and the metrics, given sums over all microbatches.

    `grads` and `sums` are divided by `weight` here. `others` are the variables after the last microbatch that are
    neither trained nor random streams.
    """
    model, optimizer = state.merge()
    count = optimizer.step[...]
    graphdef, params, streams, _ = nnx.split(model, optimizer.wrt, nnx.RngState, ...)
    divisor = jnp.where(weight == 0, 1.0, weight)  # without a single target the gradient is 0, not NaN
    grads = jax.tree.map(lambda g, p: (g / divisor).astype(p.dtype), grads, params)
    metrics = {name: total / divisor for name, total in sums.items()}
    metrics |= {"weight": weight, "grad_norm": optax.tree.norm(grads)}
    if learning_rate is not None:
        metrics["learning_rate"] = jnp.asarray(learning_rate(count), jnp.float32)
    model = nnx.merge(graphdef, params, streams, others)
    optimizer.update(model, grads)
    return state.replace(model, optimizer), metrics


def skip_update(before: TrainState, after: TrainState, metrics: Metrics, limits: Limits) -> tuple[TrainState, Metrics]:
    """Returns `after`, or `before` if the loss or the gradient norm is not finite or above its limit, and the metrics.

    They then include "skipped", 0 or 1. A skipped step changes no leaf: neither parameters, moments and statistics nor
    the counts of the optimizer, from which the learning rate and the keys of random streams are derived.
    """
    if "skipped" in metrics:
        raise ValueError(
            "metrics of loss_fn must not be named skipped: the step returns a metric of this name. Rename it."
        )
    found = metrics["loss"], metrics["grad_norm"]
    is_good = [jnp.isfinite(value) & (value <= limit) for value, limit in zip(found, limits, strict=True)]
    applied = is_good[0] & is_good[1]
    pairs = zip(before.leaves, after.leaves, strict=True)
    leaves = tuple(old if new is old else jax.lax.select(applied, new, old) for old, new in pairs)
    return TrainState(leaves, after.definition), metrics | {"skipped": 1.0 - applied.astype(jnp.float32)}


def sums_of(result: Any) -> tuple[jax.Array, jax.Array, Metrics]:
    """(loss_sum, weight, metrics) from the return value of a loss function, in any of the forms of `LossFn`."""
    parts = result if isinstance(result, tuple) else (result, 1.0)
    if len(parts) not in (2, 3) or result is None:
        what = "None" if result is None else f"a tuple of {len(parts)}"
        raise ValueError(
            f"loss_fn must return (loss_sum, weight), (loss_sum, weight, metrics) or a scalar; it returned {what}."
        )
    loss_sum, weight = (jnp.asarray(x, jnp.promote_types(jnp.result_type(x), jnp.float32)) for x in parts[:2])
    if loss_sum.shape or weight.shape:
        raise ValueError(f"loss_fn must return scalars, got loss {loss_sum.shape} and weight {weight.shape}.")
    metrics = dict(parts[2]) if len(parts) == 3 else {}
    if taken := metrics.keys() & {"loss", "weight", "grad_norm", "learning_rate"}:
        raise ValueError(
            f"metrics of loss_fn must not be named {', '.join(sorted(taken))}: the step returns metrics of these "
            "names. Rename them."
        )
    return loss_sum, weight, metrics


def reseed(streams: nnx.State, parts: Sequence[Any], layers: Iterable[str] = ()) -> nnx.State:
    """Random streams with keys that depend only on `parts` and on their path; counters are 0.

    In a scanned stack every layer has the key that it would have in a list of layers, "layers/3/rngs": the masks of
    dropout do not depend on the layout of the model.
    """

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
    return zlib.crc32(path.encode())  # equal on all processes, unlike hash()
