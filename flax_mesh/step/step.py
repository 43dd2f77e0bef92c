"""The train step, (state, batch) -> (state, metrics), for any loss function of any NNX model."""

# JAX and Flax have no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false, reportMissingTypeArgument=false
# pyright: reportMissingTypeStubs=false

import functools
import warnings
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from flax_mesh.axes import LOGICAL_AXES, PartitionAxis
from flax_mesh.fields import check_types
from flax_mesh.mesh.context import current_mesh, in_mesh
from flax_mesh.modes import set_eval_mode, user_modes
from flax_mesh.sharding.abstract import mesh_of_leaves
from flax_mesh.sharding.explicit import axis_types_explained
from flax_mesh.sharding.memory import is_on_host, on_device
from flax_mesh.step.batch import (
    microbatch_shapes,
    on_device_dtypes,
    put_batch,
    split_into_microbatches,
    split_over_mesh,
)
from flax_mesh.step.callbacks import CallbackErrors, has_callbacks
from flax_mesh.step.loss import (
    NO_LIMITS,
    Batch,
    Limits,
    LossFn,
    Metrics,
    Variables,
    apply_gradients,
    check_trainable,
    run_loss,
    skip_update,
    sums_of,
    traced_loss,
)
from flax_mesh.step.options import Attention, AttentionOption, StepKeywords, StepOptions
from flax_mesh.step.state import TrainState, check_not_donated, check_same_definition, check_train_state
from flax_mesh.tree import named_leaves

Step = Callable[..., tuple[TrainState, Metrics]]
Sums = tuple[nnx.State, Metrics, jax.Array]  # of microbatches: gradients, losses and metrics, weights


@check_types
def make_train_step(
    loss_fn: LossFn,
    state: TrainState,
    *,
    num_microbatches: int = 1,
    layers: str | Iterable[str] | None = None,
    axes: PartitionAxis | None = None,
    options: StepOptions = StepOptions(),  # noqa: B008 (a frozen value)
    **keywords: Unpack[StepKeywords],
) -> Step:
    """Creates a jitted train step: loss, gradients, gradient accumulation and optimizer update.

    Variables that the `wrt` filter of the optimizer selects are trained. Constraints in the model refer to the mesh of
    `state`, whatever mesh is in context. The keys of all random streams are derived from (seed, step, microbatch, path
    of the stream): dropout depends neither on the mesh nor on remat or scan, and a resumed run repeats its masks.

    Args:
        loss_fn: loss_fn(model, batch) -> (loss_sum, weight) or another form of `LossFn`.
        state: Arrays or an abstract state. Only its structure, shardings and dtypes are used.
        num_microbatches: The batch is split into this number of equal parts along its first dim, which are computed
            one after another. Their gradients are accumulated in float32 or wider, and divided by the summed weight.
        layers: Paths of the layer lists or scanned stacks, which make the random streams of both the same. Default: the
            layers of the model's rule table.
        axes: Maps the logical axes "batch" and "sequence" to mesh axes, for the dims of a batch. Default: the axes of
            the model's rule table. Rows that are split over Explicit axes already stay as they are.
        options: See `StepOptions`; `keywords` are its fields one by one, such as `skip_nonfinite=True`.

    Returns:
        step(state, batch) -> (state, metrics). The state is donated, and returned with the shardings of the argument
        `state`. `batch` is a tree of arrays (row, ...) with equal numbers of rows, of NumPy (which are copied) or of
        JAX, and of scalars; each device receives only its rows. `metrics` has the scalars "loss", "weight", "grad_norm"
        (before any clipping) and the metrics of `loss_fn`. The step has `lower`, `trace` and `eval_shape` of `jax.jit`.

    Raises:
        ConfigError: A callback raised an exception in the previous call, which returned zeros; its line is named.
        ValueError: When the step is traced: the batch cannot be split, or `loss_fn` breaks a rule of `LossFn`.

    Example:
        >>> from flax_mesh.train import init_train_state, make_train_step
        >>> def make():
        ...     model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
        ...     return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        >>> loss_fn = lambda model, batch: (((model(batch["x"]) - batch["y"]) ** 2).sum(), len(batch["x"]))
        >>> state = init_train_state(make, fm.abstract_state(make, fm.create_mesh((8,), ("fsdp",)), rules="fsdp"))
        >>> step = make_train_step(loss_fn, state, num_microbatches=2)
        >>> batch = {"x": np.ones((32, 16), np.float32), "y": np.ones((32, 8), np.float32)}
        >>> state, first = step(state, batch)
        >>> state, second = step(state, batch)
        >>> bool(second["loss"] < first["loss"])
        True
    """
    check_train_state(state)
    layers = (layers,) if isinstance(layers, str) else state.definition.layers if layers is None else tuple(layers)
    axes = state.definition.axes if axes is None else axes
    return _Training(loss_fn, state, num_microbatches, layers, axes, replace(options, **keywords)).jitted()


class _Training:
    """The functions of a train step, and the values that do not change between its calls."""

    def __init__(
        self,
        loss_fn: LossFn,
        layout: TrainState,
        num_microbatches: int,
        layers: tuple[str, ...],
        axes: PartitionAxis,
        options: StepOptions,
    ):
        self.loss_fn, self.layout, self.num_microbatches = loss_fn, layout, num_microbatches
        self.layers, self.axes, self.options = layers, axes, options
        self.mesh = mesh_of_leaves(layout.leaves)
        self.attention = AttentionOption(options.attention, self.mesh, axes)

    def jitted(self) -> "_PlacingStep":
        # Without out_shardings the compiler may return a leaf with another sharding than the input; and leaves that
        # the step brought from the memory of the host would stay on the device.
        shardings = jax.tree.map(lambda x: x.sharding if self.mesh is not None or is_on_host(x) else None, self.layout)
        jit = functools.partial(
            jax.jit,
            donate_argnums=0,
            out_shardings=(shardings, None),
            compiler_options=dict(self.options.compiler_options or {}) or None,
            # JAX assigns the first donated leaf to the first result of its shape, and so on. Without the leaves that
            # nothing reads, that could be a result in another memory.
            keep_unused=any(map(is_on_host, self.layout.leaves)),
        )
        function = self.guarded_step if self.options.skip_nonfinite else self.step
        return _PlacingStep(jit, function, self.mesh, self.axes, self.attention)

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        with in_mesh(self.mesh), axis_types_explained():
            return self._train(self._on_device(state), batch)

    def guarded_step(self, state: TrainState, batch: Batch, limits: Limits = NO_LIMITS) -> tuple[TrainState, Metrics]:
        with in_mesh(self.mesh), axis_types_explained():
            state = self._on_device(state)
            return skip_update(state, *self._train(state, batch), limits)

    def _on_device(self, state: TrainState) -> TrainState:
        check_same_definition(self.layout, state)
        return TrainState(on_device(state.leaves, self.layout.leaves), state.definition)

    def _train(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        model, optimizer = state.merge()
        seeds, wrt = (self.options.seed, optimizer.step[...]), optimizer.wrt
        params, _, others = nnx.state(model, wrt, nnx.RngState, ..., graph=True)
        check_trainable(named_leaves(params))
        known = self.attention.layouts(state.leaves, self.layout.leaves)
        of_params, of_others = ([known.get(id(x)) for x in jax.tree.leaves(each)] for each in (params, others))

        def run(variables: Variables, part: Batch, index: int | jax.Array) -> tuple[Variables, Sums]:
            params, others = variables

            def loss_of(params: nnx.State):
                return run_loss(self.loss_fn, model, wrt, (params, others), part, (*seeds, index), self.layers)

            kept = zip(map(id, jax.tree.leaves(others)), of_others, strict=True)
            closed_over = {key: layout for key, layout in kept if layout is not None} | self.attention.of_batch(part)
            rewrite = self.attention.rewrite(of_params, closed_over)
            divided = part if self.num_microbatches > 1 else None
            traced = traced_loss(loss_of, params, trains=True, part=divided, rewrite=rewrite)
            (loss_sum, (weight, metrics, after)), grads = jax.value_and_grad(traced, has_aux=True)(params)
            return after, (grads, {"loss": loss_sum, **metrics}, weight)

        variables, (grads, sums, weight) = _accumulate(run, (params, others), batch, self.num_microbatches, self.axes)
        return apply_gradients(state, variables, grads, sums, weight, self.options.learning_rate)


@check_types
def make_eval_step(
    loss_fn: LossFn,
    state: TrainState,
    *,
    axes: PartitionAxis | None = None,
    attention: Attention = "auto",
) -> Callable[[TrainState, Batch], Metrics]:
    """Creates a jitted function that returns the sums "loss", "weight" and the metrics of `loss_fn`, not divided.

    The model is in `eval()` mode. Neither the state nor its random streams change. The batch is split over the devices
    as by the step of `make_train_step`, whose `axes` and `attention` these are. A loss that uses no adapter of the
    model, such as one without `with_lora`, is an error.

    Example:
        >>> from flax_mesh.train import make_eval_step
        >>> def make():
        ...     model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        ...     return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        >>> loss_fn = lambda model, batch: ((model(batch) ** 2).sum(), batch.size)
        >>> state = fm.init_train_state(make, fm.abstract_state(make, fm.create_mesh((8,), ("fsdp",)), rules="fsdp"))
        >>> float(make_eval_step(loss_fn, state)(state, np.ones((8, 8), np.float32))["weight"])
        64.0
    """
    check_train_state(state)
    axes = state.definition.axes if axes is None else axes
    mesh, layout = mesh_of_leaves(state.leaves), state
    option = AttentionOption(attention, mesh, axes)

    def evaluate(state: TrainState, batch: Batch) -> Metrics:
        with in_mesh(mesh), axis_types_explained():
            microbatch_shapes(batch, 1, current_mesh(), axes)
            batch = split_over_mesh(batch, axes)
            model, optimizer = TrainState(on_device(state.leaves, layout.leaves), state.definition).merge()
            set_eval_mode(model)
            graphdef, params, others = nnx.split(model, optimizer.wrt, ..., graph=True)

            def sums(params: nnx.State):
                called = nnx.merge(graphdef, params, jax.tree.map(lambda x: x, others))
                with user_modes():
                    loss_sum, weight, metrics = sums_of(loss_fn(called, batch))
                return loss_sum, (weight, metrics)

            has_adapters = any(isinstance(x, nnx.LoRAParam) for _, x in nnx.to_flat_state(params))
            known = option.layouts(state.leaves, layout.leaves) | option.of_batch(batch)
            rewrite = option.rewrite([known.get(id(x)) for x in jax.tree.leaves(params)], known)
            # The sums over several batches are added.
            traced = traced_loss(sums, params, trains=has_adapters, part=batch, rewrite=rewrite)
            loss_sum, (weight, metrics) = traced(params)
            return {"loss": loss_sum, "weight": weight, **metrics}

    return _PlacingStep(jax.jit, evaluate, mesh, axes, option)


def check_callbacks(*steps: object) -> None:
    """Raise the exception of a callback in a call of these steps, if there is one."""
    for step in steps:
        if isinstance(step, _PlacingStep):
            step.errors.check()


class _PlacingStep:
    """A jitted step that copies the NumPy arrays of its batch to the devices. Each device receives only its rows.

    jax.jit alone may compute with the memory of the array itself, which the caller fills again meanwhile. A program
    with callbacks is traced once more, so that they record their exceptions; the next call raises them.
    """

    def __init__(
        self,
        jit: Callable[..., Any],
        function: Callable[..., object],
        mesh: Mesh | AbstractMesh | None,
        axes: PartitionAxis,
        attention: AttentionOption,
    ):
        self._attention = attention
        self._jitted = jitted = jit(function)
        functools.update_wrapper(self, jitted)
        self.errors = CallbackErrors()
        self._recording = jit(self.errors.guarded(function))  # traced only if the step has callbacks
        self._has_callbacks: dict[Hashable, bool] = {}  # by the types of batch and limits
        self._mesh, self._axes, self._problem = mesh, axes, ""
        self.lower, self.trace, self.eval_shape = jitted.lower, jitted.trace, jitted.eval_shape
        known = {name for logical in LOGICAL_AXES for name in axes.mesh_axes(logical)}
        if mesh is not None and mesh.size > 1 and known.isdisjoint(mesh.axis_names):
            self._problem = (
                f"every device receives the entire batch: no axis of the mesh {dict(mesh.shape)} has a meaning in "
                '`axes`; pass axes=PartitionAxis(batch_axis="..."), or place the batch yourself'
            )

    @property
    def attention_lines(self) -> tuple[str, ...]:
        """The effect of the option `attention` in the last trace, one line for each kind of attention."""
        return self._attention.lines

    @property
    def attention_forms(self) -> tuple[str, ...]:
        """The form of every attention in the last trace: the name of a kernel, "blockwise" or "as_written"."""
        return self._attention.forms

    def __call__(self, state: TrainState, batch: Batch, *limits: Limits) -> Any:
        self.errors.check()
        check_not_donated(state)
        if self._problem and any(isinstance(x, np.ndarray) for x in jax.tree.leaves(batch)):
            warnings.warn(self._problem, stacklevel=2)
        batch = on_device_dtypes(batch, "batch")
        if isinstance(self._mesh, Mesh):
            batch = put_batch(batch, self._mesh, self._axes)
        leaves, tree = jax.tree.flatten((batch, limits))
        key = (tree, *map(jax.typeof, leaves))
        if key not in self._has_callbacks:
            # The call below uses this trace again.
            self._has_callbacks[key] = has_callbacks(self._jitted.trace(state, batch, *limits).jaxpr.eqns)
        return (self._recording if self._has_callbacks[key] else self._jitted)(state, batch, *limits)


def _accumulate(
    run: Callable[[Variables, Batch, int | jax.Array], tuple[Variables, Sums]],
    variables: Variables,
    batch: Batch,
    num_microbatches: int,
    axes: PartitionAxis,
) -> tuple[Variables, Sums]:
    """Sums the results of `run(variables, part, index)` over equal parts of the batch; `variables` is carried along."""
    microbatch_shapes(batch, num_microbatches, current_mesh(), axes)  # checks the batch
    if num_microbatches == 1:
        return run(variables, split_over_mesh(batch, axes), 0)

    def body(carry: tuple[Variables, Sums], indexed: tuple[Batch, jax.Array]):
        variables, total = carry
        variables, sums = run(variables, *indexed)
        return (variables, jax.tree.map(jnp.add, total, sums)), None

    parts = (split_into_microbatches(batch, num_microbatches, axes), jnp.arange(num_microbatches))
    # Accumulate in float32 or wider: in bfloat16, small gradients would be rounded away when added to a large sum.
    # On Explicit axes the zeros have the shardings of the results, which are part of their types.
    first = jax.eval_shape(
        lambda variables, parts: run(variables, *jax.tree.map(lambda x: x[0], parts)), variables, parts
    )
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32)), first[1])
    return jax.lax.scan(body, (variables, zeros), parts)[0]
