"""The model of a recipe, which is only ever traced, and its rule table."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.filterlib import Filter
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh, Mesh

from flax_mesh.axes import DEFAULT_AXES, PartitionAxis
from flax_mesh.errors import ConfigError
from flax_mesh.modes import set_eval_mode
from flax_mesh.sharding.abstract import (
    ATTRIBUTE,
    abstract_split,
    has_optimizer,
    model_layers,
    partition_rules,
    trace_split,
)
from flax_mesh.sharding.annotations import annotations_of
from flax_mesh.sharding.rules import PartitionRules, Rules, as_rules
from flax_mesh.tree import Constant, PyTree
from flax_mesh.user_code import check_arguments, joined, place_of, user_code

MakeModel = Callable[[], nnx.Module]
_Result = TypeVar("_Result")
MOST_KEPT = 2**20  # bytes of the constants of a trace that is kept


class TracedOnce(Generic[_Result]):
    """`make()`, only ever traced, returns a model or (model, optimizer). Its code runs once for every mesh in context;
    later calls repeat the trace, which takes less time than the code of every layer."""

    def __init__(self, make: Callable[[], _Result]):
        self._make = make
        self._made: dict[AbstractMesh, Callable[[], PyTree]] = {}

    def __call__(self) -> _Result:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh not in self._made:
            jaxpr, (graphdef, state) = trace_split(self._make)
            if sum(getattr(x, "nbytes", 0) for x in jaxpr.consts) > MOST_KEPT:
                self._made[mesh] = self._make  # it reads a file, and the trace would keep its content in memory
                return self._make()
            self._made[mesh] = _repeated(jaxpr_as_fun(jaxpr), graphdef, jax.tree.structure(state))
        modules = self._made[mesh]()
        return cast(_Result, (modules["model"], modules["optimizer"]) if has_optimizer(modules) else modules)


def _repeated(
    leaves: Callable[[], list[jax.Array]], graphdef: nnx.GraphDef[PyTree], tree: PyTree
) -> Callable[[], PyTree]:
    return lambda: nnx.merge(graphdef, jax.tree.unflatten(tree, leaves()))


def make_model(make: Callable[..., object], config: object, seed: int) -> nnx.Module:
    """`make(config, rngs)`; only ever traced. An exception of its code is raised as a ConfigError with its line."""
    check_arguments("make_model", make, "config", "rngs")
    with user_code("make_model", place := place_of(make)):
        model = make(config, nnx.Rngs(seed))
    if not isinstance(model, nnx.Pytree):
        raise ConfigError(joined("make_model", place, f"it must return an nnx.Module, got {type(model).__name__}"))
    return cast(nnx.Module, model)


def with_constants(make: MakeModel, constants: Mapping[str, MakeModel]) -> nnx.Module:
    """The model with modules as attributes, in eval mode, whose variables are `Constant`s: zeros until they are loaded.

    Random streams stay as they are. The layers of the modules are layers of the model.
    """
    model = make()
    for name, make_constant in constants.items():
        if hasattr(model, name):
            raise ConfigError(f"constants[{name!r}]: {type(model).__name__} has an attribute of this name; use another")
        module = nnx.merge(*abstract_split(make_constant))
        set_eval_mode(module)
        for _, node in list(nnx.iter_graph(module, graph=True)):
            for attribute, x in list(vars(node).items()) if isinstance(node, nnx.Module) else ():
                if isinstance(x, nnx.Variable) and not isinstance(x, nnx.RngState):
                    setattr(node, attribute, Constant(jnp.zeros(x.shape, x.dtype), **x.get_metadata()))
        setattr(model, name, module)
        if hasattr(model, ATTRIBUTE):
            rules = partition_rules(model)
            layers = (*rules.layers, *(f"{name}/{path}" for path in model_layers(module)))
            setattr(model, ATTRIBUTE, PartitionRules(rules.table, rules.axes, layers))
    return model


def model_rules(
    make: MakeModel, mesh_rules: str, rules: Rules | None, wrt: Filter, mesh: Mesh | AbstractMesh | None
) -> PartitionRules:
    """The rules of `mesh.rules`, of the recipe or of the model, in this order; empty if the model is annotated.

    Where the rules name no layers, the rule table of the model does. `mesh` is in context while the model is made.
    """
    graphdef, state = abstract_split(make, mesh)
    _call_filter(wrt, state)
    model = nnx.merge(graphdef, state)
    if mesh_rules:
        model_axes = getattr(model, "axes", None)
        axes = model_axes if isinstance(model_axes, PartitionAxis) else DEFAULT_AXES
        return PartitionRules(mesh_rules, axes, _layers(model, rules))
    if rules is not None:
        return as_rules(rules, layers=model_layers(model))
    if not hasattr(model, ATTRIBUTE) and annotations_of(state):
        return PartitionRules([], getattr(model, "axes", DEFAULT_AXES))
    return partition_rules(model)


def _layers(model: nnx.Module, rules: Rules | None) -> Sequence[str]:
    """The layer lists or stacks that the rules of the recipe or of the model name."""
    return model_layers(model) if rules is None else as_rules(rules, layers=model_layers(model)).layers


def _call_filter(wrt: Filter, model: PyTree) -> None:
    """Calls the functions of `wrt`: later, their exceptions would look like errors of the loss or of the optimizer."""
    for part in wrt if isinstance(wrt, list | tuple) else [wrt]:
        if callable(part) and not isinstance(part, type):
            check_arguments("wrt", part, "path", "variable")
    with user_code("wrt"):
        nnx.filter_state(model, wrt)


def method_of(model: object, name: str, default: Callable[..., _Result]) -> Callable[..., _Result]:
    """An optional method of a model config, `default` without it. A field of the user's may have this name too."""
    method: Callable[..., _Result] | None = getattr(model, name, None)
    return method if callable(method) else default


def model_notes(model: object, mesh: Mesh | AbstractMesh, sequence_length: int | None) -> list[str]:
    """The lines that the model config's `notes_on(mesh, sequence_length)` returns, if it has this method."""
    return method_of(model, "notes_on", lambda *_: [])(mesh, sequence_length)
