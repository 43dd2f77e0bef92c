"""The protocol of loss functions, the seeding of random streams, and the parameter update from summed gradients.

The plain step and the pipeline both call these functions, so that both compute the same numbers.
"""

# JAX and Flax have no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false, reportMissingTypeArgument=false
# pyright: reportMissingTypeStubs=false

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.nnx.filterlib import Filter
from jax.extend import core as jex
from jax.typing import ArrayLike

from flax_mesh.modes import user_modes
from flax_mesh.program.follow import Flow, follow
from flax_mesh.program.program import program_of
from flax_mesh.sharding.abstract import Make, abstract_split, has_optimizer
from flax_mesh.step.divided import warn_mean_of_means
from flax_mesh.step.optimizer import update_parameters, wide
from flax_mesh.step.options import Rewrite
from flax_mesh.step.state import TrainState, check_same_structure, check_same_types
from flax_mesh.text import array_text, at_most, group_paths, listed
from flax_mesh.tree import PyTree, Shaped, in_stack, is_key, layer_path, map_named, named_leaves, path_of
from flax_mesh.user_code import check_arguments

Batch = PyTree  # of arrays whose first dim is the batch
Metrics = dict[str, jax.Array]
_Result = TypeVar("_Result")
Variables = tuple[nnx.State, nnx.State]  # (trained parameters, variables that are neither trained nor random streams)
RESERVED = {"loss", "weight", "grad_norm", "learning_rate"}  # names of metrics that the step adds
_FORMS = (
    "loss_fn must return loss, (loss, metrics), (loss_sum, weight) or (loss_sum, weight, metrics), where metrics is a "
    "dict and the others are real scalars."
)
_Number = float | np.floating | jax.Array
Limits = tuple[_Number, _Number]  # the largest loss and the largest gradient norm whose update is applied
NO_LIMITS = (math.inf, math.inf)


class LossFn(Protocol):
    """loss_fn(model, batch) returns one of four forms:

        loss                              a scalar
        loss, metrics                     means over the batch
        loss_sum, weight
        loss_sum, weight, metrics         sums over the batch

    `loss_sum` is the sum over the tokens (or examples) of the batch, not the mean; `weight` is their number. Both are
    summed over the microbatches and divided once at the end: the result is the mean over the entire batch, also if
    microbatches differ in weight. `metrics` is a dict of further sums, divided by the same weight. It may contain
    dicts: the metric "b" of the dict "a" is named "a/b".

    Without a weight, every microbatch has weight 1: loss and metrics are means of the microbatches' values. A division
    by a number that depends on the batch, such as (losses * mask).sum() / mask.sum(), then has a warning.

    A weight that depends on a trained parameter is an error, also if its gradient is zero: (loss, accuracy) would
    divide by the accuracy. Pass (loss, {"accuracy": accuracy}). A loss that depends on none is an error too.

    All variables that a call of the model changes, such as the statistics of BatchNorm, are passed from one microbatch
    to the next and returned updated. This includes trained parameters, as in `nnx.value_and_grad`: the gradient of a
    microbatch is that at the values before its call, and the optimizer updates the values after the last call. A call
    must not add or remove variables, or change the shape or dtype of a parameter.
    """

    def __call__(self, model: Any, batch: Batch, /) -> Any: ...


def run_loss(
    loss_fn: LossFn,
    model: nnx.Pytree,
    wrt: Filter,
    variables: Variables,
    batch: Batch,
    seeds: Sequence[int | jax.Array],
    layers: Iterable[str],
) -> tuple[jax.Array, tuple[jax.Array, Metrics, Variables]]:
    """Returns loss_sum, (weight, metrics, `variables` after the call), as for `jax.value_and_grad(has_aux=True)`.

    Before the call, the variables of `model` are replaced by `variables`, and its random streams are reseeded from
    `seeds`.
    """
    graphdef, _, streams, _ = nnx.split(model, wrt, nnx.RngState, ..., graph=True)
    keyed = reseed(streams, seeds, layers)
    # Flax allows a Variable to be changed only in the trace that created it, and these may be from an outer one.
    params, others = jax.tree.map(lambda x: x, variables)
    called = nnx.merge(graphdef, params, keyed, others)
    before = _eager_sharding(called)
    check_arguments("loss_fn", loss_fn, "model", "batch")
    with user_modes():
        loss_sum, weight, metrics = sums_of(loss_fn(called, batch))
    for path, (variable, flag) in _eager_sharding(called).items():
        if flag != (expected := before.get(path, (None, flag))[1]):
            variable.set_metadata(eager_sharding=expected)
    after, *parts = nnx.split(called, wrt, nnx.RngState, ..., graph=True)
    check_same_structure(graphdef, (variables[0], keyed, variables[1]), after, parts)
    _check_same_types(variables[0], parts[0])
    return loss_sum, (weight, metrics, (parts[0], parts[2]))


def _eager_sharding(model: object) -> dict[object, tuple[nnx.Variable, bool]]:
    """path -> (variable, its metadata `eager_sharding`) of all variables."""
    variables = [(path, x) for path, x in nnx.iter_graph(model, graph=True) if isinstance(x, nnx.Variable)]
    return {path: (x, x.get_metadata("eager_sharding")) for path, x in variables}


def traced_loss(
    loss_of: Callable[[nnx.State], _Result],
    params: nnx.State,
    *,
    trains: bool = False,
    part: Batch | None = None,
    rewrite: Rewrite = lambda program: None,
) -> Callable[[nnx.State], _Result]:
    """A function that evaluates the trace of `loss_of(params)` and returns the same results as `run_loss`.

    Raises a ValueError if the weight depends on `params`, or if the loss `trains` them and depends on none. Warns about
    means of means if `loss_of` computes on `part`, one of several parts of a batch. A parameter that the call did not
    change is the argument itself, also if it went through a loop of NNX. `rewrite` may return another function for the
    trace.
    """
    closed, shapes = jax.make_jaxpr(loss_of, return_shape=True)(params)
    program, tree = program_of(closed), jax.tree.structure(shapes)
    flows = follow(program, range(len(program.inputs)), Flow()).outputs
    loss, (weight, _, *_) = jax.tree.unflatten(tree, flows)
    check_weight(weight)
    if trains:
        check_trains(loss, params)
    if part is not None:
        of_loss, (of_weight, metrics, *_) = jax.tree.unflatten(tree, program.outputs)
        rows = {id(x) for x in jax.tree.leaves(part) if x.ndim}
        of_batch = [*(id(x) in rows for x in closed.consts), *[False] * len(program.inputs)]
        of_params = [*[False] * len(closed.consts), *[True] * len(program.inputs)]
        warn_mean_of_means(program, {"loss": of_loss, **metrics}, of_weight, of_batch, of_params)

    call = rewrite(program) or jex.jaxpr_as_fun(closed)

    def evaluate(params: nnx.State) -> _Result:
        leaves = jax.tree.leaves(params)
        outs = call(*leaves)
        same = (leaves[at] if isinstance(at, int) else out for out, at in zip(outs, flows, strict=True))
        return jax.tree.unflatten(tree, same)

    return evaluate


def check_weight(weight: object) -> None:
    """Raises a ValueError unless `weight`, its `flow` from the trained parameters, is None."""
    if weight is not None:
        raise ValueError(
            "the weight that loss_fn returns must not depend on trained parameters, but it does; it is the number of "
            f"tokens or examples. A metric belongs into a dict, {{'accuracy': ...}}. {_FORMS}"
        )


def check_trains(loss: object, params: nnx.State) -> None:
    """Raises a ValueError if `loss`, its `flow` from the trained parameters, depends on none of them."""
    named = [(path_of(path), x) for path, x in nnx.to_flat_state(params)]
    if loss is not None or not named:
        return
    groups = group_paths([path for path, _ in named], [None] * len(named))
    of_lora = any(isinstance(x, nnx.LoRAParam) for _, x in named)
    repair = (
        "Adapters are used by with_lora(loss_fn) of flax_mesh.lora only: pass it in the place of loss_fn."
        if of_lora
        else "Use them in loss_fn, or select others by wrt= of the optimizer."
    )
    raise ValueError(
        "the loss must depend on a trained parameter, for the others have no gradient, but it depends on none of "
        f"{listed(at_most([pattern for pattern, _ in groups]))}. {repair}"
    )


def apply_gradients(
    state: TrainState,
    variables: Variables,
    grads: nnx.State,
    sums: Metrics,
    weight: jax.Array,
    learning_rate: optax.Schedule | None = None,
) -> tuple[TrainState, Metrics]:
    """Returns the state after one optimizer step and the metrics, given sums over all microbatches.

    `grads` and `sums` are divided by `weight` here. The gradient norm is computed before the gradients are cast to the
    dtypes of the parameters, and without parameters whose update is always zero. `variables` are those after the last
    microbatch: the optimizer updates the parameters that the forward pass left.
    """
    model, optimizer = state.merge()
    count = optimizer.step[...]
    graphdef, _, streams, _ = nnx.split(model, optimizer.wrt, nnx.RngState, ..., graph=True)
    params, others = variables
    divisor = jnp.where(weight == 0, 1.0, weight)  # without a single target the gradient is 0, not NaN
    means = jax.tree.map(lambda g: wide(g) / divisor, grads)
    metrics = {name: total / divisor for name, total in sums.items()}
    model = nnx.merge(graphdef, params, streams, others)
    cast = jax.tree.map(lambda g, p: g.astype(p.dtype), means, params)
    frozen = update_parameters(optimizer, model, cast, metrics["loss"])
    counted = [g for g, is_frozen in zip(jax.tree.leaves(means), frozen, strict=True) if not is_frozen]
    metrics |= {"weight": weight, "grad_norm": optax.tree.norm(counted)}
    if learning_rate is not None:
        metrics["learning_rate"] = jnp.asarray(learning_rate(count), jnp.float32)
    after = state.replace(model, optimizer)
    check_same_types(state, after)
    return after, metrics


def skip_update(before: TrainState, after: TrainState, metrics: Metrics, limits: Limits) -> tuple[TrainState, Metrics]:
    """Returns `after`, or `before` if the loss or the gradient norm is not finite or above its limit, and the metrics.

    They then include "skipped", 0 or 1. A skipped step changes no leaf: neither parameters, moments and statistics nor
    the counts of the optimizer, from which the learning rate and the keys of random streams are derived.
    """
    if "skipped" in metrics:
        raise ValueError(
            "metrics of loss_fn must not be named skipped: the step returns a metric of this name. Rename it."
        )
    values = metrics["loss"], metrics["grad_norm"]
    is_good = [jnp.isfinite(value) & (value <= limit) for value, limit in zip(values, limits, strict=True)]
    applied = is_good[0] & is_good[1]
    pairs = zip(before.leaves, after.leaves, strict=True)
    leaves = tuple(old if new is old else jax.lax.select(applied, new, old) for old, new in pairs)
    return TrainState(leaves, after.definition), metrics | {"skipped": 1.0 - applied.astype(jnp.float32)}


def sums_of(result: object) -> tuple[jax.Array, jax.Array, Metrics]:
    """(loss_sum, weight, metrics) from the return value of a loss function, in any of the forms of `LossFn`."""
    parts = result if isinstance(result, tuple) else (result, 1.0)
    last = parts[-1] if parts else None
    *scalars, metrics = parts if isinstance(last, Mapping) else (*parts, {})
    if len(parts) == 2 and metrics is last:
        scalars.append(1.0)
    named = _flat(metrics)
    if len(scalars) != 2 or not all(map(_is_scalar, scalars)) or not all(_is_numeric(value) for _, value in named):
        raise ValueError(f"{_FORMS} It returned {_form_text(result)}.")
    names = [name for name, _ in named]
    problems = [f"{name!r} is a metric of the step" for name in sorted(RESERVED.intersection(names))]
    problems += [f"{name!r} occurs twice" for name in sorted({name for name in names if names.count(name) > 1})]
    if problems:
        raise ValueError(f"metrics of loss_fn must have names of their own: {', '.join(problems)}. Rename them.")
    loss_sum, weight = (jnp.asarray(x, jnp.promote_types(jnp.result_type(x), jnp.float32)) for x in scalars)
    return loss_sum, weight, dict(named)


def is_sum_over_rows(loss_fn: LossFn, make: Make, batch: Batch) -> bool:
    """Whether summing the losses of microbatches gives the loss of the batch, up to rounding.

    That is, `loss_fn` returns (loss_sum, weight), and a trace of the model draws no random numbers and changes no
    variable, because masks and statistics would differ between microbatches.
    """
    graphdef, state = abstract_split(make)
    streams, others = nnx.split_state(state, nnx.RngState, ...)
    is_unchanged = []

    def run(streams: nnx.State, others: nnx.State, batch: Batch) -> list[jax.Array]:
        tree = nnx.merge(graphdef, streams, others)
        model = tree["model"] if has_optimizer(tree) else tree
        before = jax.tree.leaves(nnx.state(model, nnx.Not(nnx.RngState), graph=True))
        with user_modes():
            result = loss_fn(model, batch)
        after = jax.tree.leaves(nnx.state(model, nnx.Not(nnx.RngState), graph=True))
        scalars = [x for x in result if not isinstance(x, Mapping)] if isinstance(result, tuple) else [result]
        is_unchanged.append(len(scalars) == 2 and all(a is b for a, b in zip(before, after, strict=True)))
        return [jnp.asarray(x) for x in scalars]

    jaxpr = jax.make_jaxpr(run)(streams, others, batch).jaxpr
    read = {id(v) for eqn in jaxpr.eqns for v in eqn.invars}
    return is_unchanged[0] and not any(id(v) in read for v in jaxpr.invars[: len(jax.tree.leaves(streams))])


def _flat(metrics: PyTree, prefix: str = "") -> list[tuple[str, jax.Array]]:
    """(name, value) of all metrics; the names of nested dicts are joined by "/"."""
    pairs: list[tuple[str, jax.Array]] = []
    for name, value in metrics.items():
        pairs += _flat(value, f"{prefix}{name}/") if isinstance(value, Mapping) else [(f"{prefix}{name}", value)]
    return pairs


def _is_numeric(x: object) -> TypeGuard[ArrayLike]:
    """Whether `x` is a number or an array of numbers."""
    if isinstance(x, bool | int | float | np.generic):
        return True
    return isinstance(x, jax.Array | np.ndarray) and (
        jnp.issubdtype(x.dtype, jnp.number) or jnp.issubdtype(x.dtype, jnp.bool_)
    )


def _is_scalar(x: object) -> bool:
    return _is_numeric(x) and jnp.shape(x) == () and not jnp.issubdtype(jnp.result_type(x), jnp.complexfloating)


def _form_text(x: object) -> str:
    """A return value with types in the place of values: (f32[], {'accuracy': f32[8]})."""
    if isinstance(x, tuple):
        return f"({', '.join(map(_form_text, x))}{',' * (len(x) == 1)})"
    if isinstance(x, Mapping):
        return f"{{{', '.join(f'{name!r}: {_form_text(value)}' for name, value in x.items())}}}"
    return array_text(x) if hasattr(x, "dtype") else "None" if x is None else type(x).__name__


def check_trainable(named: Iterable[tuple[str, Shaped]]) -> None:
    """Raises a ValueError for trained leaves, as (path, leaf) pairs, whose dtype has no sums in float32."""
    wrong = [(path, x.dtype) for path, x in named if not jnp.issubdtype(x.dtype, jnp.inexact) or x.dtype.itemsize < 2]
    if wrong:
        groups = group_paths([path for path, _ in wrong], [dtype for _, dtype in wrong])
        raise ValueError(
            "trained variables must have a floating-point dtype of at least 16 bits, because JAX differentiates no "
            "integers and promotes no 8-bit floats, but these have not: "
            f"{', '.join(f'{pattern} ({wrong[at[0]][1]})' for pattern, at in groups)}. Make them Variables of another "
            "type or leave them out by wrt=; or store them in bfloat16 and cast them in the call."
        )


def _check_same_types(before: nnx.State, after: nnx.State) -> None:
    """Raises a ValueError for parameters that the call changed to another shape or dtype."""
    pairs = zip(named_leaves(before), named_leaves(after), strict=True)
    changed = [
        (path, f"changed from {array_text(old)} to {array_text(new)}")
        for (path, old), (_, new) in pairs
        if (old.shape, old.dtype) != (new.shape, new.dtype)
    ]
    if changed:
        groups = group_paths([path for path, _ in changed], [text for _, text in changed])
        problems = [f"{pattern} {changed[at[0]][1]}" for pattern, at in groups]
        raise ValueError(
            "a call of the model may change parameters, but not their shape or dtype, which are those of their "
            f"moments: {', '.join(problems)}. Cast or reshape the new value."
        )


def reseed(streams: nnx.State, parts: Sequence[int | jax.Array], layers: Iterable[str] = ()) -> nnx.State:
    """Random streams with keys that depend only on `parts` and on their path; counters are 0.

    In a scanned stack every layer has the key that it would have in a list of layers, "layers/3/rngs": the masks of
    dropout do not depend on the layout of the model.
    """

    def new(path: str, leaf: jax.Array) -> jax.Array:
        if not is_key(leaf):
            return jnp.zeros_like(leaf)
        key = jax.random.key(0, impl=jax.random.key_impl(leaf))
        for part in parts:
            key = jax.random.fold_in(key, part)
        stack = in_stack(path, layers)
        if leaf.ndim == 0:  # also in a single layer, which `layers` may name
            return jax.random.fold_in(key, _number(path))
        paths = [layer_path(path, stack, i) if stack else f"{path}/{i}" for i in range(leaf.shape[0])]
        keys = jax.vmap(lambda n: jax.random.fold_in(key, n))(jnp.array([_number(p) for p in paths], jnp.uint32))
        return keys if leaf.ndim == 1 else jax.vmap(lambda k: jax.random.split(k, leaf.shape[1:]))(keys)

    return map_named(new, streams)


def _number(path: str) -> int:
    return zlib.crc32(path.encode())  # equal on all processes, unlike hash()
