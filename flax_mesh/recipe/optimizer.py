"""The optimizer and the learning rate of a recipe."""

import re
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from flax_mesh.errors import ConfigError
from flax_mesh.modes import optimizer_of
from flax_mesh.recipe.config import TrainConfig
from flax_mesh.recipe.model import make_model, method_of, recipe_layers
from flax_mesh.recipe.optimizers.average import average_parameters
from flax_mesh.recipe.optimizers.groups import parse_groups, trained_filter
from flax_mesh.recipe.optimizers.make import make_optimizer, parameter_problems
from flax_mesh.recipe.optimizers.schedules import make_learning_rate_schedule
from flax_mesh.tree import named_leaves
from flax_mesh.user_code import check_arguments, joined, place_of, user_code


def make_modules(config: TrainConfig) -> tuple[nnx.Module, nnx.Optimizer]:
    """Model and optimizer of a run; only ever traced."""
    model = make_model(config)
    state = nnx.state(model, graph=True)
    wrt = trained_filter(config.wrt, config.optimizer.groups)
    return model, optimizer_of(model, transformation_of(config, state, recipe_layers(config, model)), wrt)


def transformation_of(config: TrainConfig, model: nnx.State, layers: Sequence[str]) -> optax.GradientTransformation:
    """The optimizer of a recipe for a model with this state, of which only shapes and dtypes are used.

    Raises a ConfigError with one line for every pattern of a setting that selects no parameter.
    """
    wrt = trained_filter(config.wrt, config.optimizer.groups)
    trained = nnx.filter_state(model, wrt)
    parameters = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), trained)
    settings = config.optimizer
    if settings.name == "muon" and not settings.matrices:
        settings = replace(settings, matrices=method_of(config.model, "matrices", lambda: "")())
    frozen = [one for one in parse_groups(settings.groups)[0] if one.is_frozen]
    every = [path for path, _ in named_leaves(model)]
    problems = [
        f"optimizer.groups: no variable of the model has {one.pattern!r} in its path"
        for one in frozen
        if not any(re.search(one.pattern, path) for path in every)
    ]
    if not jax.tree.leaves(parameters):
        problems.append(
            f"wrt={getattr(wrt, '__name__', wrt)} must match a variable of the model; it matches none, and nothing "
            "would be trained."
        )
    elif config.make_optimizer is None:
        problems += parameter_problems(settings, parameters, layers)
    if problems:
        raise ConfigError(problems)
    chosen = _own_optimizer(config, parameters) or make_optimizer(settings, _own_schedule(config), layers)
    return optax.chain(chosen, average_parameters(settings.ema)) if settings.ema else chosen


def _own_optimizer(config: TrainConfig, parameters: nnx.State) -> optax.GradientTransformation | None:
    if config.make_optimizer is None:
        return None
    check_arguments("make_optimizer", config.make_optimizer, "config", "parameters")
    with user_code("make_optimizer", place := place_of(config.make_optimizer)):
        made = config.make_optimizer(config, parameters)
    if not isinstance(made, optax.GradientTransformation):
        problem = f"it must return an optax transformation, got {type(made).__name__}"
        raise ConfigError(joined("make_optimizer", place, problem))
    return made


def _own_schedule(config: TrainConfig) -> optax.Schedule | None:
    if config.make_schedule is None:
        return None
    check_arguments("make_schedule", config.make_schedule, "config")
    with user_code("make_schedule", place := place_of(config.make_schedule)):
        made = config.make_schedule(config)
        value = made(jnp.zeros([], jnp.int32)) if callable(made) else None
    if value is None or jnp.shape(value) != ():
        found = type(made).__name__ if value is None else f"a function that returns the shape {jnp.shape(value)}"
        problem = f"it must return a function of the step to a number, got {found}"
        raise ConfigError(joined("make_schedule", place, problem))
    return made


def learning_rate_of(config: TrainConfig) -> optax.Schedule | None:
    """The schedule whose value is reported; None if it is not known, with an optimizer of the recipe."""
    if config.make_schedule is None and config.make_optimizer is not None:
        return None
    return _own_schedule(config) or make_learning_rate_schedule(config.optimizer)
