"""Variables whose spec follows from the spec of another Variable, such as the factors of an adapter of a weight.

The metadata `follows=(name, dims)` of a Variable names its leader, another attribute of the same module. `dims` has,
for each dim of the Variable, the corresponding dim of the leader, or None for a dim without one.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flax import nnx
from jax.sharding import PartitionSpec

from flax_mesh.tree import PyTree, named_leaves, path_of

FOLLOWS = "follows"
Dims = tuple[int | None, ...]


class Follower(NamedTuple):
    """The path of the leader, and for each dim of the following Variable the corresponding dim of the leader."""

    leader: str
    dims: Dims


def followers(tree: PyTree) -> dict[str, Follower]:
    """{path: Follower} of the Variables in an nnx.State that follow another Variable; {} for other trees."""
    follower_of = {}
    for path, variable in nnx.to_flat_state(tree) if isinstance(tree, nnx.State) else ():
        if isinstance(variable, nnx.Variable) and (follows := variable.get_metadata().get(FOLLOWS)):
            name, dims = follows
            follower_of[path_of(path)] = Follower(path_of((*path[:-1], name)), tuple(dims))
    # A tree of adapters without the weights has no leaders, so nothing follows in it.
    paths = {path for path, _ in named_leaves(tree)} if follower_of else set()
    return {path: each for path, each in follower_of.items() if each.leader in paths}


def with_followers(
    tree: PyTree, following: Mapping[str, Follower], specs: Sequence[PartitionSpec]
) -> list[PartitionSpec]:
    """The specs of all leaves of `tree`, in the order of `named_leaves`; `following` is the result of `followers`.

    `specs` has one entry per leaf, or one per leaf that is not in `following`, in the same order. The specs of the
    leaves in `following` are derived from the specs of their leaders.
    """
    paths = [path for path, _ in named_leaves(tree)]
    matched = paths if len(specs) == len(paths) else [path for path in paths if path not in following]
    known = dict(zip(matched, specs, strict=True))
    known |= {path: spec_of_dims(each.dims, known[each.leader]) for path, each in following.items()}
    return [known[path] for path in paths]


def spec_of_dims(dims: Sequence[int | None], spec: PartitionSpec) -> PartitionSpec:
    """The axes of the corresponding dims; a dim that occurs twice, as in a Gram matrix, splits the first only."""
    entries = [spec[d] if d is not None and d < len(spec) and d not in dims[:i] else None for i, d in enumerate(dims)]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
