"""TrainState: model and optimizer as a tuple of leaves and a static tree definition."""

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from flax import nnx

from flax_mesh.sharding.abstract import abstract_model, init_state, model_layers
from flax_mesh.stacks import ranks_in
from flax_mesh.tree import named_leaves


@dataclass(frozen=True)
class TreeDefinition:
    """The static part of a `TrainState`: the structure of the nnx.State and the graph definition of the modules."""

    graphdef: Any
    treedef: Any

    @functools.cached_property
    def layers(self) -> tuple[str, ...]:
        """Paths of the layer lists and scanned stacks that the rule table of the model names; () without a table."""
        return model_layers(self._model)

    @functools.cached_property
    def ranks(self) -> Mapping[str, int]:
        """Number of dims of the variables of Flax's layers in the model, see `flax_mesh.stacks`."""
        return ranks_in(self._model)

    @property
    def _model(self) -> Any:
        without_leaves = jax.tree.unflatten(self.treedef, [None] * self.treedef.num_leaves)
        return nnx.merge(self.graphdef, without_leaves)["model"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Model and optimizer as flat leaves, which a jitted step takes and returns with the overhead of a tuple.

    Modules exist only inside the trace: flattening and merging them at every call would cost time on the host. Leaves
    are arrays, shardings or ShapeDtypeStructs.
    """

    leaves: tuple[Any, ...]
    definition: TreeDefinition = field(metadata={"static": True})

    def to_nnx(self) -> nnx.State:
        """The leaves as the nnx.State {"model": ..., "optimizer": ...}."""
        return jax.tree.unflatten(self.definition.treedef, self.leaves)

    def merge(self) -> tuple[Any, nnx.Optimizer]:
        """Returns model and optimizer. Outside of a trace they share the arrays of this state."""
        both = nnx.merge(self.definition.graphdef, self.to_nnx())
        return both["model"], both["optimizer"]

    def replace(self, model: nnx.Module, optimizer: nnx.Optimizer) -> "TrainState":
        """Returns the state of two modules that `merge` returned and whose variables have changed since."""
        graphdef, state = nnx.split({"model": model, "optimizer": optimizer})
        check_same_structure(self.definition.graphdef, self.to_nnx(), graphdef, state)
        # Pass on the same object: jit compares static fields at every dispatch, and identity is the fast case.
        return TrainState(tuple(jax.tree.leaves(state)), self.definition)

    def with_state(self, state: Any) -> "TrainState":
        """Returns a train state with the leaves of `state`, an nnx.State or a dict with the structure of `to_nnx()`.

        The leaves may be of another kind, such as arrays where this state is abstract. Raises a ValueError that lists
        all paths that are missing in `state` or unknown here, or that several leaves have.
        """
        found, expected = dict(named_leaves(state)), [path for path, _ in named_leaves(self.to_nnx())]
        counts = Counter(expected)
        problems = [f"  {path}: {count} leaves have this path" for path, count in counts.items() if count > 1]
        problems += [f"  {path}: missing" for path in counts if path not in found]
        problems += [f"  {path}: unknown" for path in found.keys() - counts.keys()]
        if problems:
            head = "state must have the same paths as `to_nnx()` of this train state, but these differ:"
            raise ValueError("\n".join([head, *sorted(problems)]))
        return TrainState(tuple(found[path] for path in expected), self.definition)


def check_same_structure(graphdef_before: Any, before: Any, graphdef_after: Any, after: Any) -> None:
    """Raises a ValueError that names the variables that were added or removed. The trees may contain several States."""
    was, now = ({path for path, _ in named_leaves(tree)} for tree in (before, after))
    if was != now or graphdef_before != graphdef_after:
        what = f"removed {sorted(was - now) or 'nothing'}, added {sorted(now - was) or 'nothing'}"
        if was == now:
            what = "the variables are the same, but a static attribute or the metadata of a variable changed"
        raise ValueError(
            "the model must have the same variables and static attributes before and after a call, but the step "
            f"changed its structure: {what}. Create all variables in __init__."
        )


def abstract_train_state(make: Callable[[], Any], abstract: nnx.State) -> TrainState:
    """The train state of `make() -> (model, optimizer)` with the leaves of `abstract_state(make, ...)`."""
    graphdef = nnx.graphdef(abstract_model(make))
    leaves, treedef = jax.tree.flatten(abstract)
    return TrainState(tuple(leaves), TreeDefinition(graphdef, treedef))


def init_train_state(make: Callable[[], Any], abstract: nnx.State) -> TrainState:
    """Initializes model and optimizer directly sharded, and returns them as a `TrainState`.

    `make` is traced and compiled with the shardings of `abstract` as its output shardings: no device ever stores a
    complete copy of a sharded array. The random bits are the same on every mesh.

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
    return abstract_train_state(make, abstract).with_state(init_state(make, abstract))
