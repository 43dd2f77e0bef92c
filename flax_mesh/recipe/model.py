"""The model of a recipe, which is only ever traced, and its rule table."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from flax_mesh.axes import DEFAULT_AXES, PartitionAxis
from flax_mesh.errors import ConfigError
from flax_mesh.recipe.config import TrainConfig
from flax_mesh.sharding.abstract import (
    ATTRIBUTE,
    abstract_split,
    model_layers,
    partition_rules,
)
from flax_mesh.sharding.annotations import annotations_of
from flax_mesh.sharding.rules import PartitionRules, as_rules
from flax_mesh.user_code import check_arguments, joined, place_of, user_code


def run_rules(config: TrainConfig, mesh: Mesh | AbstractMesh | None = None) -> PartitionRules:
    """The rules of `mesh.rules`, of the recipe or of the model, in this order; empty if the model is annotated.

    Layers are those of the model's own table where the rules name none. `mesh` is in context while the model is made.
    """
    graphdef, state = abstract_split(partial(make_model, config), mesh)
    _call_filter(config.wrt, state)
    model = nnx.merge(graphdef, state)
    if config.mesh.rules:
        model_axes = getattr(model, "axes", None)
        axes = model_axes if isinstance(model_axes, PartitionAxis) else DEFAULT_AXES
        return PartitionRules(config.mesh.rules, axes, model_layers(model))
    if config.rules is not None:
        return as_rules(config.rules, layers=model_layers(model))
    if not hasattr(model, ATTRIBUTE) and annotations_of(state):
        return PartitionRules([], getattr(model, "axes", DEFAULT_AXES))
    return partition_rules(model)


def _call_filter(wrt: Any, model: nnx.State) -> None:
    """Calls the functions of `wrt`: their exceptions would be those of the loss or of the optimizer later."""
    for one in wrt if isinstance(wrt, list | tuple) else [wrt]:
        if callable(one) and not isinstance(one, type):
            check_arguments("wrt", one, "path", "variable")
    with user_code("wrt"):
        nnx.filter_state(model, wrt)


def make_model(config: TrainConfig) -> nnx.Module:
    """The model of a run; only ever traced. An exception of its code is raised as a ConfigError with its line."""
    check_arguments("make_model", config.make_model, "config", "rngs")
    with user_code("make_model", place := place_of(config.make_model)):
        model = config.make_model(config.model, nnx.Rngs(config.run.seed))
    if not isinstance(model, nnx.Pytree):
        raise ConfigError(joined("make_model", place, f"it must return an nnx.Module, got {type(model).__name__}"))
    return model


def recipe_layers(config: TrainConfig, model: nnx.Module) -> Sequence[str]:
    """The layer lists or stacks that the rules of the recipe or of the model name."""
    return model_layers(model) if config.rules is None else as_rules(config.rules, layers=model_layers(model)).layers


def method_of(model: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
    """An optional method of a model config, `default` without it. A field of the user's may have this name too."""
    found = getattr(model, name, None)
    return found if callable(found) else default


def model_notes(config: TrainConfig, mesh: Mesh | AbstractMesh) -> list[str]:
    """What the model config's `notes_on(mesh, sequence_length)` reports, if it has this method: lines to print."""
    return method_of(config.model, "notes_on", lambda *_: [])(mesh, sequence_length_of(config))


def sequence_length_of(config: TrainConfig) -> int | None:
    return config.data.sequence_length if config.make_batches is None else None
