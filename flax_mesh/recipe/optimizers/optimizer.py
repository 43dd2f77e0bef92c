"""The optimizer and the learning rate of a recipe."""

# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.nnx.filterlib import Filter

from flax_mesh.errors import ConfigError
from flax_mesh.recipe.optimizers.average import average_parameters, with_average
from flax_mesh.recipe.optimizers.check import own_optimizer
from flax_mesh.recipe.optimizers.config import OptimizerConfig
from flax_mesh.recipe.optimizers.groups import parse_groups, trained_filter
from flax_mesh.recipe.optimizers.make import make_optimizer, parameter_problems
from flax_mesh.recipe.optimizers.schedule_free import schedule_free_sources, with_evaluated
from flax_mesh.recipe.optimizers.schedules import make_learning_rate_schedule
from flax_mesh.step.state import TrainState
from flax_mesh.tree import PyTree, named_leaves
from flax_mesh.user_code import joined, place_of, user_code


@dataclass(frozen=True)
class RecipeOptimizer:
    """The optimizer of a recipe, which depends on the parameters that it trains.

    Attributes:
        settings: The section `optimizer`.
        wrt: The filter of the recipe.
        layers: The layer lists or stacks of the model.
        matrices: the value of `optimizer.matrices` where the setting is empty, from the config of the model.
        make: `make_optimizer` of the recipe: parameters -> optax transformation. None: the optimizer by name.
        make_schedule: `make_schedule` of the recipe. None: the schedule by name.
    """

    settings: OptimizerConfig
    wrt: Filter
    layers: Sequence[str]
    matrices: str = ""
    make: Callable[[PyTree], object] | None = None
    make_schedule: Callable[[], optax.Schedule] | None = None

    @property
    def trained(self) -> Filter:
        """A filter of NNX: the variables that are trained."""
        return trained_filter(self.wrt, self.settings.groups)

    def transformation(self, model: PyTree) -> optax.GradientTransformation:
        """The optimizer of a model with this state, of which only shapes and dtypes are used.

        Raises a ConfigError with one line for every pattern of a setting that selects no parameter.
        """
        trained = nnx.filter_state(model, self.trained)
        parameters = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), trained)
        settings = self.settings
        if settings.name == "muon" and not settings.matrices:
            settings = replace(settings, matrices=self.matrices)
        frozen = [group for group in parse_groups(settings.groups)[0] if group.is_frozen]
        every = [path for path, _ in named_leaves(model)]
        problems = [
            f"optimizer.groups: no variable of the model has {group.pattern!r} in its path"
            for group in frozen
            if not any(re.search(group.pattern, path) for path in every)
        ]
        if not jax.tree.leaves(parameters):
            problems.append(
                f"wrt={getattr(self.trained, '__name__', self.trained)} must match a variable of the model; it matches "
                "none, and nothing would be trained."
            )
        elif self.make is None:
            problems += parameter_problems(settings, parameters, self.layers)
        if problems:
            raise ConfigError(problems)
        if self.make is None:
            chosen = make_optimizer(settings, self._own_schedule(), self.layers)
        else:
            chosen = own_optimizer(self.make, parameters)
        if not settings.ema:
            return chosen
        _check_one_average(chosen, parameters, settings.ema)
        return optax.chain(chosen, average_parameters(settings.ema))

    def learning_rate(self) -> optax.Schedule | None:
        """The schedule whose value is reported; None if it is not known, with an optimizer of the recipe."""
        if self.make_schedule is None and self.make is not None:
            return None
        return self._own_schedule() or make_learning_rate_schedule(self.settings)

    def evaluated(self, state: TrainState) -> TrainState:
        """The state that evaluation and samples use: with `optimizer.ema`, the moving average of the parameters; with a
        schedule-free optimizer, its average."""
        return with_average(state, self.settings.ema) if self.settings.ema else with_evaluated(state)

    def _own_schedule(self) -> optax.Schedule | None:
        if self.make_schedule is None:
            return None
        with user_code("make_schedule", place := place_of(self.make_schedule)):
            schedule = self.make_schedule()
            value = schedule(jnp.zeros([], jnp.int32)) if callable(schedule) else None
        if value is None or jnp.shape(value) != ():
            text = type(schedule).__name__ if value is None else f"a function that returns the shape {jnp.shape(value)}"
            problem = f"it must return a function of the step to a number, got {text}"
            raise ConfigError(joined("make_schedule", place, problem))
        return schedule


def _check_one_average(chosen: optax.GradientTransformation, parameters: PyTree, ema: float) -> None:
    """ConfigError for optimizer.ema with a schedule-free optimizer, whose state has an average already."""
    state = {"optimizer": nnx.as_pure(jax.eval_shape(chosen.init, parameters))}
    if schedule_free_sources(path for path, _ in named_leaves(state)):
        raise ConfigError(
            f"optimizer.ema={ema} must be 0 with a schedule-free optimizer, which has an average of the parameters "
            "that evaluation uses; remove the setting"
        )
