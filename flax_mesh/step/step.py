"""The training step: (state, batch) -> (state, metrics), for any loss function of any NNX model."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from flax_mesh.axes import DEFAULT_AXES, PartitionAxis
from flax_mesh.mesh import current_mesh
from flax_mesh.sharding import with_sharding_constraint
from flax_mesh.step.batch import microbatch_shapes
from flax_mesh.step.loss import Batch, LossFn, Metrics, apply_gradients, run_loss, sums_of
from flax_mesh.step.state import TrainState

Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def make_train_step(
    loss_fn: LossFn,
    state: TrainState,
    *,
    seed: int = 0,
    num_microbatches: int = 1,
    layers: str | Iterable[str] | None = None,
    axes: PartitionAxis = DEFAULT_AXES,
    learning_rate: optax.Schedule | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> Step:
    """A jitted step that donates its state; metrics are loss, weight, grad_norm (before clipping) and the loss's own.

    `state` shows the layout, as arrays or abstractly: the state comes back in that same layout, and constraints inside
    the model see its mesh, whatever mesh the caller has in context. The batch is cut into `num_microbatches` equal
    parts, run one after another. Every random stream of the model is keyed by (seed, step, microbatch, path of the
    stream), `layers` naming the paths of layer lists (by default as the table of the model does), so that neither mesh,
    remat nor scan changes a mask. Only variables of the optimizer's `wrt` are trained; all others are threaded through
    the microbatches and come back updated. `compiler_options` go to XLA, as in `jax.jit`.
    """
    layers = (layers,) if isinstance(layers, str) else state.definition.layers if layers is None else tuple(layers)
    mesh = mesh_of(state)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        with in_mesh(mesh):
            return train(state, batch)

    def train(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        model, optimizer = state.merge()
        count, wrt = optimizer.step[...], optimizer.wrt
        params, _, others = nnx.state(model, wrt, nnx.RngState, ...)

        def run(others: nnx.State, part: Batch, index: Any):
            def loss_of(params: nnx.State):
                return run_loss(loss_fn, model, wrt, params, others, part, (seed, count, index), layers)

            (loss_sum, (weight, metrics, after)), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
            return after, (grads, {"loss": loss_sum, **metrics}, weight)

        others, (grads, sums, weight) = _accumulate(run, others, batch, num_microbatches, axes)
        return apply_gradients(state, others, grads, sums, weight, learning_rate)

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


def _accumulate(run: Callable[..., Any], others: Any, batch: Batch, num_microbatches: int, axes: PartitionAxis):
    """Sum the results of `run(others, part, index)` over equal parts of the batch, threading `others` through."""
    if num_microbatches == 1:
        return run(others, batch, 0)
    first = microbatch_shapes(batch, num_microbatches), jax.ShapeDtypeStruct((), jnp.int32)

    def cut(x: jax.Array) -> jax.Array:
        x = x.reshape(num_microbatches, x.shape[0] // num_microbatches, *x.shape[1:])
        if current_mesh() is None:
            return x
        # A hint for the placement of the rows, so what does not fit this mesh is left out.
        return with_sharding_constraint(x, axes.resolve((None, "batch")), on_mismatch="drop")

    def body(carry: Any, indexed: Any):
        others, total = carry
        others, found = run(others, *indexed)
        return (others, jax.tree.map(jnp.add, total, found)), None

    parts = (jax.tree.map(cut, batch), jnp.arange(num_microbatches))
    # Sums in float32 at least, whatever the parameters are: what is small must not get lost in what is large.
    wide = lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))  # noqa: E731
    zeros = jax.tree.map(wide, jax.eval_shape(run, others, *first)[1])
    return jax.lax.scan(body, (others, zeros), parts)[0]


def mesh_of(state: TrainState) -> Mesh | AbstractMesh | None:
    """The mesh that the leaves are laid out on, None for a state on a single device without one."""
    shardings = [getattr(leaf, "sharding", None) for leaf in state.leaves]
    return next((s.mesh for s in shardings if isinstance(s, NamedSharding)), None)


def in_mesh(mesh: Mesh | AbstractMesh | None):
    """Context, inside a trace, in which constraints see `mesh`."""
    # Inside a trace only the abstract mesh may be set; it is all that constraints need.
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh if mesh is not None else jax.sharding.get_abstract_mesh())
