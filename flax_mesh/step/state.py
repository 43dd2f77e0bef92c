"""The train state: a tuple of leaves and a static tree definition, merged into modules only inside a trace."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
from flax import nnx

from flax_mesh.sharding.abstract import abstract_model, init_state, model_layers
from flax_mesh.tree import named_leaves


@dataclass(frozen=True)
class TreeDefinition:
    """Rebuilds the nnx.State of {"model", "optimizer"} from leaves, and the two modules from that."""

    graphdef: Any
    treedef: Any

    @functools.cached_property
    def layers(self) -> tuple[str, ...]:
        """Paths of the layer lists and scanned stacks in the model's own rule table; () if it has none."""
        without_leaves = jax.tree.unflatten(self.treedef, [None] * self.treedef.num_leaves)
        return model_layers(nnx.merge(self.graphdef, without_leaves)["model"])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Model and optimizer as flat leaves: what a jitted step takes and returns at the cost of a plain tuple.

    Leaves are arrays, shardings or ShapeDtypeStructs.
    """

    leaves: tuple[Any, ...]
    definition: TreeDefinition = field(metadata={"static": True})

    def to_nnx(self) -> nnx.State:
        """The leaves as the nnx.State {"model": ..., "optimizer": ...}."""
        return jax.tree.unflatten(self.definition.treedef, self.leaves)

    def merge(self) -> tuple[Any, nnx.Optimizer]:
        """Model and optimizer. Outside a trace: modules that share the arrays of this state."""
        both = nnx.merge(self.definition.graphdef, self.to_nnx())
        return both["model"], both["optimizer"]

    def replace(self, model: nnx.Module, optimizer: nnx.Optimizer) -> "TrainState":
        """The state of modules that came from `merge`, after their variables have changed."""
        graphdef, state = nnx.split({"model": model, "optimizer": optimizer})
        check_same_structure(self.definition.graphdef, self.to_nnx(), graphdef, state)
        # The same definition, not an equal one: comparing it at every dispatch is then free.
        return TrainState(tuple(jax.tree.leaves(state)), self.definition)

    def with_state(self, state: Any) -> "TrainState":
        """The train state with the leaves of `state`, which has the form of `to_nnx()`: an nnx.State or a dict.

        Its leaves may be of another kind: arrays where this state is abstract. A ValueError lists all paths that are
        missing in `state` or unknown here.
        """
        found, own = dict(named_leaves(state)), [path for path, _ in named_leaves(self.to_nnx())]
        problems = [f"  {path}: missing" for path in own if path not in found]
        problems += [f"  {path}: unknown" for path in found.keys() - set(own)]
        if problems:
            head = "a state must have the paths of the train state that it becomes, as `to_nnx()` returns them; found:"
            raise ValueError("\n".join([head, *sorted(problems)]))
        return TrainState(tuple(found[path] for path in own), self.definition)


def check_same_structure(graphdef_before: Any, before: Any, graphdef_after: Any, after: Any) -> None:
    """Raise a ValueError that names the variables that came or went; `before` and `after` are trees of States."""
    was, now = ({path for path, _ in named_leaves(tree)} for tree in (before, after))
    if was != now or graphdef_before != graphdef_after:
        what = f"gone {sorted(was - now) or 'nothing'}, new {sorted(now - was) or 'nothing'}"
        if was == now:
            what = "the variables are the same, but a static attribute or the metadata of a variable is not"
        raise ValueError(
            f"the step changed the structure of the model: {what}. Variables and static attributes must be the same "
            "before and after the call of the model."
        )


def abstract_train_state(make: Callable[[], Any], abstract: nnx.State) -> TrainState:
    """The train state of `make() -> (model, optimizer)` with the leaves of `abstract_state(make, ...)`."""
    graphdef = nnx.graphdef(abstract_model(make))
    leaves, treedef = jax.tree.flatten(abstract)
    return TrainState(tuple(leaves), TreeDefinition(graphdef, treedef))


def init_train_state(make: Callable[[], Any], abstract: nnx.State) -> TrainState:
    """The initial train state, initialized directly with the shardings of `abstract`."""
    return abstract_train_state(make, abstract).with_state(init_state(make, abstract))
