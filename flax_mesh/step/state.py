"""TrainState: model and optimizer as a tuple of leaves and a static tree definition."""

# States and graph definitions of NNX have no known type arguments.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeArgument=false

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import repr as short_text
from typing import Any

import jax
from flax import nnx
from flax.nnx.filterlib import Filter
from jax.core import Tracer

from flax_mesh.axes import PartitionAxis
from flax_mesh.errors import ShardingError
from flax_mesh.fields import check_types
from flax_mesh.sharding.abstract import (
    Make,
    abstract_split,
    check_same_arrays,
    has_optimizer,
    init_split,
    mesh_of_leaves,
    model_axes,
    model_layers,
)
from flax_mesh.text import array_text, count_text, path_lines
from flax_mesh.tree import PyTree, named_leaves, path_of, ranks_in

_States = nnx.State | Sequence[nnx.State]
_Statics = Mapping[tuple[str, str], object]  # (path, name) -> static value


@dataclass(frozen=True)
class TreeDefinition:
    """The static part of a `TrainState`: the structure of the nnx.State and the graph definition of the modules."""

    graphdef: nnx.GraphDef
    treedef: Any

    @functools.cached_property
    def layers(self) -> tuple[str, ...]:
        """Paths of the layer lists and scanned stacks that the rule table of the model names; () without a table."""
        return model_layers(self._model)

    @functools.cached_property
    def axes(self) -> PartitionAxis:
        """The mesh axes of each logical axis, as the model or its rule table defines them."""
        return model_axes(self._model)

    @functools.cached_property
    def ranks(self) -> Mapping[str, int]:
        """Number of dims of the variables of Flax's layers in the model, see `flax_mesh.tree`."""
        return ranks_in(self._model)

    @functools.cached_property
    def wrt(self) -> Filter:
        """The filter of the variables that the optimizer trains."""
        return self._modules["optimizer"].wrt

    @property
    def _model(self) -> nnx.Pytree:
        return self._modules["model"]

    @property
    def _modules(self) -> Mapping[str, Any]:
        without_leaves = jax.tree.unflatten(self.treedef, [None] * self.treedef.num_leaves)
        return nnx.merge(self.graphdef, without_leaves)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class TrainState:
    """Model and optimizer as flat leaves, which a jitted step takes and returns with the overhead of a tuple.

    Modules exist only inside the trace: flattening and merging them at every call would cost time on the host. Leaves
    are arrays, shardings or ShapeDtypeStructs.
    """

    leaves: tuple[Any, ...]
    definition: TreeDefinition = field(metadata={"static": True})

    def __repr__(self) -> str:
        """The number of leaves: Flax and JAX would print every module and every array."""
        size = sum(getattr(leaf, "size", 0) for leaf in self.leaves)
        return f"TrainState({count_text(len(self.leaves), 'array')}, {count_text(size, 'element')})"

    def to_nnx(self) -> nnx.State:
        """The leaves as the nnx.State {"model": ..., "optimizer": ...}."""
        return jax.tree.unflatten(self.definition.treedef, self.leaves)

    def merge(self) -> tuple[Any, nnx.Optimizer]:
        """Returns model and optimizer. Outside of a trace they share the arrays of this state."""
        both = nnx.merge(self.definition.graphdef, self.to_nnx())
        return both["model"], both["optimizer"]

    def replace(self, model: nnx.Module, optimizer: nnx.Optimizer) -> "TrainState":
        """Returns the state of two modules that `merge` returned and whose variables have changed since."""
        graphdef, state = nnx.split({"model": model, "optimizer": optimizer}, graph=True)
        check_same_structure(self.definition.graphdef, self.to_nnx(), graphdef, state)
        # Pass on the same object: jit compares static fields at every dispatch, and identity is the fast case.
        return TrainState(tuple(jax.tree.leaves(state)), self.definition)

    def with_state(self, state: PyTree) -> "TrainState":
        """Returns a train state with the leaves of `state`, an nnx.State or a dict with the structure of `to_nnx()`.

        The leaves may be of another kind, such as arrays where this state is abstract. They are not copied: a step that
        donates the train state deletes the arrays of `state`. Raises a ValueError that lists all paths that are missing
        in `state` or unknown here, or that several leaves have.
        """
        leaves, expected = dict(named_leaves(state)), [path for path, _ in named_leaves(self.to_nnx())]
        counts = Counter(expected)
        problems = [(path, f"{count} leaves have this path") for path, count in counts.items() if count > 1]
        problems += [(path, "missing") for path in counts if path not in leaves]
        problems += [(path, "unknown") for path in leaves.keys() - counts.keys()]
        if problems:
            head = "state must have the same paths as `to_nnx()` of this train state, but these differ:"
            raise ValueError("\n".join([head, *path_lines(f"  {path}: {what}" for path, what in sorted(problems))]))
        return TrainState(tuple(leaves[path] for path in expected), self.definition)


def check_train_state(state: object) -> None:
    """Raises a TypeError for an object that is not a TrainState."""
    if not isinstance(state, TrainState):
        raise TypeError(
            f"state must be a TrainState, got an object of type {type(state).__name__}. Create it with "
            "init_train_state(make, abstract), or with abstract_train_state for its layout alone."
        )


def check_not_donated(state: TrainState) -> None:
    """Raises a ValueError for a state that an earlier step has deleted. Without it, jax 0.10 may crash."""
    if any(isinstance(x, Tracer) or not isinstance(x, jax.Array) for x in state.leaves[:1]):
        return
    if any(x.is_deleted() for x in state.leaves):
        raise ValueError(
            "the arrays of this state are deleted, because it was the argument of an earlier step, which donates them. "
            "Use the state that the step returned: state, metrics = step(state, batch)"
        )


def check_same_definition(layout: TrainState, state: TrainState) -> None:
    """Raises a ValueError with the differences between the state that a step was made for and its argument."""
    if layout.definition == state.definition:
        return
    expected, actual = (dict.fromkeys(path for path, _ in named_leaves(x.to_nnx())) for x in (layout, state))
    problems = [(path, "missing") for path in expected if path not in actual]
    problems += [(path, "unknown") for path in actual if path not in expected]
    statics = (_static_values(x.definition.graphdef, (x.to_nnx(),)) for x in (layout, state))
    raise ValueError(
        "the state must have the definition of the one that the step was made for, but these differ:\n"
        + "\n".join(path_lines(f"{path}: {what}" for path, what in problems or _changes(*statics)))
        + "\nEvery call of make() creates other functions. Make the step for this state, or place its leaves with "
        "`layout.with_state(state.to_nnx())`, where layout is the state that the step was made for."
    )


def check_same_types(before: TrainState, after: TrainState) -> None:
    """Raises a ValueError that names the leaves whose shape or dtype a step changes: no run could resume from it."""
    texts = ([array_text(x) for x in state.leaves] for state in (before, after))
    named = zip((path for path, _ in named_leaves(before.to_nnx())), *texts, strict=True)
    if problems := [f"{path}: {old} becomes {new}" for path, old, new in named if old != new]:
        raise ValueError(
            "a step must return the shapes and dtypes of its state, but it changes:\n"
            + "\n".join(path_lines(problems))
            + "\nCreate these arrays with the dtype that the update returns, or cast them there."
        )


def check_same_structure(
    graphdef_before: nnx.GraphDef, before: _States, graphdef_after: nnx.GraphDef, after: _States
) -> None:
    """Raises a ValueError that names the variables, attributes and metadata that differ.

    `before` and `after` are a State or several, as `nnx.split` returns them.
    """
    before, after = ((state,) if isinstance(state, nnx.State) else tuple(state) for state in (before, after))
    was, now = ({path for part in state for path, _ in named_leaves(part)} for state in (before, after))
    problems = [(path, "the call removed this variable") for path in sorted(was - now)]
    problems += [(path, "the call added this variable") for path in sorted(now - was)]
    if not problems and graphdef_before != graphdef_after:
        problems = _changes(_static_values(graphdef_before, before), _static_values(graphdef_after, after))
    if problems:
        raise ValueError(
            "the model must have the same variables, static attributes and metadata before and after a call, but the "
            "step changed:\n"
            + "\n".join(path_lines(f"{path}: {what}" for path, what in problems))
            + "\nCreate all variables in __init__, set attributes that "
            "are no arrays there, and call train() or eval() outside of the step."
        )


def _changes(before: _Statics, after: _Statics) -> list[tuple[str, str]]:
    """(path, problem) of every static value that differs, or one for the model."""
    pairs = {key: (before.get(key), after.get(key)) for key in {**before, **after}}
    changes = [
        (path, f"{name} was {short_text(old)}, is {short_text(new)}")
        for (path, name), (old, new) in pairs.items()
        if old != new
    ]
    return changes or [("the model", "other modules, or variables that are shared in another way")]


def _static_values(graphdef: nnx.GraphDef, state: tuple[nnx.State, ...]) -> _Statics:
    """(path, name) -> value, of the static attributes of all modules and the metadata of all variables."""
    values_at: dict[tuple[str, str], object] = {}
    for path, node in nnx.iter_graph(nnx.merge(graphdef, *state), graph=True):
        at = path_of(path) or "the model"
        if isinstance(node, nnx.Variable):
            values_at |= {(at, f"metadata {name!r}"): value for name, value in node.get_metadata().items()}
        elif isinstance(node, nnx.Pytree):
            values = {name: value for name, value in vars(node).items() if not name.startswith("_pytree__")}
            values_at |= {(at, f"attribute {name!r}"): x for name, x in values.items() if not nnx.has_data(x)}
    return values_at


@check_types
def abstract_train_state(make: Make, abstract: nnx.State) -> TrainState:
    """The train state of `make() -> (model, optimizer)` with the leaves of `abstract_state(make, ...)`.

    Example:
        >>> from flax_mesh.train import abstract_train_state
        >>> def make():
        ...     model = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
        ...     return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        >>> state = abstract_train_state(make, fm.abstract_state(make, fm.create_mesh((8,), ("fsdp",)), rules="fsdp"))
        >>> {type(leaf).__name__ for leaf in state.leaves}
        {'ShapeDtypeStruct'}
    """
    graphdef, state = abstract_split(make, mesh_of_leaves(jax.tree.leaves(abstract)))
    _check_optimizer(nnx.merge(graphdef, state))
    check_same_arrays(abstract, state)
    return _train_state(graphdef, state).with_state(abstract)


def _check_optimizer(modules: PyTree) -> None:
    if not has_optimizer(modules):
        raise ShardingError(
            "make() must return (model, nnx.Optimizer) for a train state, got "
            f"an object of type {type(modules).__name__}. For a model alone, call init_model or init_state."
        )


def _train_state(graphdef: nnx.GraphDef, state: nnx.State) -> TrainState:
    """The result of `nnx.split`. Raises a ValueError if several leaves have one path."""
    leaves, treedef = jax.tree.flatten(state)
    return TrainState(tuple(leaves), TreeDefinition(graphdef, treedef)).with_state(state)


@check_types
def init_train_state(make: Make, abstract: nnx.State) -> TrainState:
    """Initializes model and optimizer directly sharded, and returns them as a `TrainState`.

    `make` is traced once, and compiled with the shardings of `abstract` as output shardings: no device ever stores a
    complete copy of a sharded array. On CPUs the initial values have the same bits on every mesh, except for sums over
    a split dim (see `init_state`).

    Args:
        make: Function without arguments that returns (model, optimizer), an nnx.Module and an nnx.Optimizer.
        abstract: `abstract_state(make, mesh, ...)`.

    Returns:
        The state that `make_train_step` and `Checkpointer.save` take.

    Raises:
        ShardingError: `abstract` was made for another `make`, or for an AbstractMesh, which has no devices.

    Example:
        >>> def make():
        ...     model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
        ...     return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        >>> from flax_mesh.train import init_train_state
        >>> mesh = fm.create_mesh((2, 4), ("fsdp", "tp"))
        >>> rules = [("kernel", ("embed", "mlp")), ("bias", ("mlp",))]
        >>> state = init_train_state(make, fm.abstract_state(make, mesh, rules))
        >>> model, optimizer = state.merge()
        >>> model.kernel[...].addressable_shards[0].data.shape
        (8, 2)
    """
    return _train_state(*init_split(make, abstract, _check_modules))


def _check_modules(modules: PyTree) -> None:
    _check_optimizer(modules)
    _train_state(*nnx.split(modules, graph=True))  # no two leaves have one path
