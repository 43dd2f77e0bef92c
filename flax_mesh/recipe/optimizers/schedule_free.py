"""The parameters that optax's schedule-free optimizers (Defazio et al. 2024) evaluate, from the optimizer's state.

Training moves y, at which the gradients are computed; the state has z, and the average x that is evaluated follows from
both. The state is found by the paths of its arrays, which are the same inside of other transformations.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from collections.abc import Iterable

import jax
from optax.contrib import ScheduleFreeState, schedule_free_eval_params

from flax_mesh.recipe.optimizers.average import with_parameters
from flax_mesh.step.state import TrainState
from flax_mesh.tree import named_leaves

NOT_EVALUATED = "the parameters of training, not those that its schedule-free optimizer evaluates"
SCALARS = ("b1", "weight_sum", "step_count", "max_lr")


def schedule_free_sources(paths: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Path of a parameter -> the paths of its z and of b1, from the paths of a state; {} without schedule-free."""
    known = [path for path in paths if path.startswith("optimizer/")]
    every = set(known)
    sources: dict[str, tuple[str, str]] = {}
    for b1 in (path for path in known if path.endswith("/b1")):
        prefix = b1.removesuffix("b1")
        if all(prefix + name in every for name in SCALARS):
            start = f"{prefix}z/"
            sources |= {path.removeprefix(start): (path, b1) for path in known if path.startswith(start)}
    return sources


def with_evaluated(state: TrainState) -> TrainState:
    """`state` with x in the place of the parameters; `state` itself without a schedule-free optimizer."""
    values = dict(named_leaves(state.to_nnx()))
    sources = schedule_free_sources(values)
    if not sources:
        return state

    def value(y: jax.Array, paths: tuple[str, str]) -> jax.Array:
        z, b1 = (values[source] for source in paths)
        b1 = float(b1.addressable_shards[0].data)  # a number of the host: it may be on the devices of another group
        only = ScheduleFreeState(b1, None, None, None, None, jax.device_put(z, y.sharding))  # pyright: ignore
        return schedule_free_eval_params(only, y)

    return with_parameters(state, sources, value)
