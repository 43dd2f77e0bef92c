"""The training step: (state, batch) -> (state, metrics), for any loss function of any NNX model."""

import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from flax_mesh.axes import DEFAULT_AXES, PartitionAxis
from flax_mesh.mesh import current_mesh
from flax_mesh.sharding import with_sharding_constraint
from flax_mesh.train.state import TrainState, check_same_structure
from flax_mesh.tree import in_stack, layer_path, map_named, path_of

Batch = Any  # a pytree of arrays whose first dim is the batch
Metrics = dict[str, jax.Array]


class LossFn(Protocol):
    """loss_fn(model, batch) -> (loss_sum, weight) or (loss_sum, weight, metrics), or a bare scalar.

    loss_sum is summed over the tokens (or examples) of the batch and not normalised; weight is their number. Sums and
    weights of microbatches add up, and are divided once, so that microbatches of unequal weight are right. metrics is
    a dict of further sums, divided by the same weight. A bare scalar counts with weight 1 per microbatch.
    """

    def __call__(self, model: Any, batch: Any, /) -> Any: ...


Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def make_train_step(
    loss_fn: LossFn,
    state: TrainState,
    *,
    seed: int = 0,
    microbatches: int = 1,
    layers: Iterable[str] = (),
    axes: PartitionAxis = DEFAULT_AXES,
    learning_rate: optax.Schedule | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> Step:
    """A jitted step that donates its state; metrics are loss, weight, grad_norm (before clipping) and the loss's own.

    `state` shows the layout, as arrays or abstractly: the state comes back in that same layout, and constraints inside
    the model see its mesh, whatever mesh the caller has in context. The batch is cut into `microbatches` equal parts,
    run one after another. Every random stream of the model is keyed by (seed, step, microbatch, path of the stream),
    `layers` naming the paths of layer lists, so that neither mesh, remat nor scan changes a mask. Only variables of the
    optimizer's `wrt` are trained; all others are threaded through the microbatches and come back updated.
    `compiler_options` go to XLA, as in `jax.jit`.
    """
    layers, mesh = tuple(layers), mesh_of(state)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        with in_mesh(mesh):
            return train(state, batch)

    def train(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        model, optimizer = state.merge()
        count = optimizer.step[...]
        graphdef, params, streams, others = nnx.split(model, optimizer.wrt, nnx.RngState, ...)

        def loss_of(params: nnx.State, others: nnx.State, part: Batch, index: Any):
            keyed = reseed(streams, (seed, count, index), layers)
            here = jax.tree.map(lambda x: x, others)  # Variables may be changed only in the trace that made them
            model = nnx.merge(graphdef, params, keyed, here)
            loss_sum, weight, metrics = sums_of(loss_fn(model, part))
            after, *parts = nnx.split(model, optimizer.wrt, nnx.RngState, ...)
            check_same_structure(graphdef, (params, keyed, others), after, parts)
            return loss_sum, (weight, metrics, parts[2])

        def run(others: nnx.State, part: Batch, index: Any):
            grads_of = jax.value_and_grad(loss_of, has_aux=True)
            (loss_sum, (weight, metrics, others)), grads = grads_of(params, others, part, index)
            return others, (grads, {"loss": loss_sum, **metrics}, weight)

        others, (grads, sums, weight) = _accumulate(run, others, batch, microbatches, axes)
        divisor = jnp.where(weight == 0, 1.0, weight)  # a batch without a single target: no gradient, not NaN
        grads = jax.tree.map(lambda g: (g / divisor).astype(g.dtype), grads)
        metrics = {name: total / divisor for name, total in sums.items()}
        metrics |= {"weight": weight, "grad_norm": optax.tree.norm(grads)}
        if learning_rate is not None:
            metrics["learning_rate"] = jnp.asarray(learning_rate(count), jnp.float32)
        model = nnx.merge(graphdef, params, streams, others)
        optimizer.update(model, grads)
        return state.replace(model, optimizer), metrics

    # Left to itself, the compiler may return a leaf in another layout than it came in.
    layout = jax.tree.map(lambda x: x.sharding, state) if mesh is not None else None
    options = dict(compiler_options) if compiler_options else None
    return jax.jit(step, donate_argnums=0, out_shardings=(layout, None), compiler_options=options)


def make_eval_step(loss_fn: LossFn, state: TrainState) -> Callable[[TrainState, Batch], Metrics]:
    """A jitted function: the sums "loss", "weight" and the loss's own metrics, with the model in `eval()` mode."""
    mesh = mesh_of(state)

    def evaluate(state: TrainState, batch: Batch) -> Metrics:
        with in_mesh(mesh):
            model, _ = state.merge()
            model.eval()
            loss_sum, weight, metrics = sums_of(loss_fn(model, batch))
            return {"loss": loss_sum, "weight": weight, **metrics}

    return jax.jit(evaluate)


def sums_of(result: Any) -> tuple[jax.Array, jax.Array, Metrics]:
    """(loss_sum, weight, metrics) of what a loss function returned, in the forms that LossFn allows."""
    parts = result if isinstance(result, tuple) else (result, 1.0)
    if len(parts) not in (2, 3):
        raise ValueError(
            f"loss_fn returned a tuple of {len(parts)}; it must return (loss_sum, weight), "
            "(loss_sum, weight, metrics) or a scalar."
        )
    loss_sum, weight = (jnp.asarray(x, jnp.promote_types(jnp.result_type(x), jnp.float32)) for x in parts[:2])
    if loss_sum.shape or weight.shape:
        raise ValueError(f"loss_fn must return scalars, got loss {loss_sum.shape} and weight {weight.shape}.")
    metrics = dict(parts[2]) if len(parts) == 3 else {}
    if taken := metrics.keys() & {"loss", "weight", "grad_norm", "learning_rate"}:
        raise ValueError(f"metrics of loss_fn must not be called {', '.join(sorted(taken))}: the step gives these.")
    return loss_sum, weight, metrics


def reseed(streams: nnx.State, parts: Iterable[Any], layers: Iterable[str] = ()) -> nnx.State:
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
        if leaf.ndim == 1:
            return keys
        rest = leaf.shape[1:]
        return jax.vmap(lambda k: jax.random.split(k, rest))(keys)

    parts = tuple(parts)
    return map_named(new, streams)


def _number(path: str) -> int:
    return zlib.crc32(path.encode())  # the same in every process, unlike hash()


def _accumulate(run: Callable[..., Any], others: Any, batch: Batch, microbatches: int, axes: PartitionAxis):
    """Sum what `run(others, part, index)` gives over equal parts of the batch, threading `others` through."""
    if microbatches == 1:
        return run(others, batch, 0)
    sizes = {path_of(p): x.shape[0] for p, x in jax.tree_util.tree_flatten_with_path(batch)[0]}
    if uneven := {p: n for p, n in sizes.items() if n % microbatches}:
        raise ValueError(f"batch dims {uneven} cannot be cut into {microbatches} equal microbatches.")

    def cut(x: jax.Array) -> jax.Array:
        x = x.reshape(microbatches, x.shape[0] // microbatches, *x.shape[1:])
        if current_mesh() is None:
            return x
        # A hint where the rows should lie, so what does not fit this mesh is left out.
        return with_sharding_constraint(x, axes.resolve((None, "batch")), on_mismatch="drop")

    def body(carry: Any, indexed: Any):
        others, total = carry
        others, found = run(others, *indexed)
        return (others, jax.tree.map(jnp.add, total, found)), None

    parts = (jax.tree.map(cut, batch), jnp.arange(microbatches))
    first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), parts)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run, others, *first)[1])
    return jax.lax.scan(body, (others, zeros), parts)[0]


def mesh_of(state: TrainState) -> Mesh | AbstractMesh | None:
    """The mesh that the leaves are laid out on, None for a state on a single device without one."""
    shardings = [getattr(leaf, "sharding", None) for leaf in state.leaves]
    return next((s.mesh for s in shardings if isinstance(s, NamedSharding)), None)


def in_mesh(mesh: Mesh | AbstractMesh | None):
    """Context, inside a trace, in which constraints see `mesh`."""
    # Inside a trace only the abstract mesh may be set; it is all that constraints need.
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh if mesh is not None else jax.sharding.get_abstract_mesh())
