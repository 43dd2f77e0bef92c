"""The moving average of the parameters, `optimizer.ema`, as part of the optimizer's state."""

# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from flax_mesh.step.state import TrainState
from flax_mesh.tree import MODEL, PyTree, map_named, named_leaves

AVERAGE = re.compile(r"optimizer/opt_state/[0-9]+/average/(.+)")
COUNT = re.compile(r"optimizer/opt_state/[0-9]+/averaged_steps")
_Source = TypeVar("_Source")  # of the value of a parameter


class AverageState(NamedTuple):
    """`average` is the sum over steps t of (1 - d) d^(n - t) times the parameters after step t, n = averaged_steps."""

    averaged_steps: ArrayLike  # int32 scalar
    average: PyTree


def average_parameters(decay: float) -> optax.GradientTransformation:
    """Average the parameters after each update: average = decay * average + (1 - decay) * parameters.

    The last transformation of an optimizer. The average starts at zero and is divided by 1 - decay^steps where it is
    used, as in Adam (Kingma and Ba 2015), so it does not depend on the initial parameters. It is stored in float32 or
    wider.
    """

    def init(params: PyTree) -> AverageState:
        zeros = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32)), params)
        return AverageState(jnp.zeros([], jnp.int32), zeros)

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, AverageState]:
        new = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda a, x: decay * a + (1 - decay) * x.astype(a.dtype), state.average, new)
        return updates, AverageState(optax.safe_increment(state.averaged_steps), average)

    return optax.GradientTransformation(init, update)


def average_factor(decay: float, steps: int) -> float:
    """The factor of the stored average after `steps` updates."""
    return 1 / (1 - decay**steps)


def with_average(state: TrainState, decay: float) -> TrainState:
    """`state` with the moving average in the place of the parameters; `state` itself before the first update."""
    named = named_leaves(state.to_nnx())
    averages = {match[1]: x for path, x in named if (match := AVERAGE.fullmatch(path))}
    (steps,) = (x for path, x in named if COUNT.fullmatch(path))
    steps = int(jax.device_get(steps.addressable_shards[0].data))
    if not steps:
        return state
    factor = average_factor(decay, steps)
    return with_parameters(state, averages, lambda x, average: jax.device_put(average, x.sharding) * factor)


def with_parameters(
    state: TrainState, sources: Mapping[str, _Source], value: Callable[[jax.Array, _Source], jax.Array]
) -> TrainState:
    """`state` with `value(parameter, source)` in the place of the parameters whose paths have a source."""
    by_path = {MODEL + path: source for path, source in sources.items()}

    def leaf(path: str, x: jax.Array) -> jax.Array:
        if path not in by_path or not x.addressable_shards:  # of a group of other processes
            return x
        return value(x, by_path[path]).astype(x.dtype)

    return state.with_state(map_named(leaf, state.to_nnx()))
