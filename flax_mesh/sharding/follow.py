"""Variables whose spec is that of another Variable, dim by dim, such as the factors of an adapter of its weight.

The metadata `follows=(name, dims)` of a Variable names an attribute of the same module and, for each of its own dims,
the dim of that Variable that it corresponds to, None for a dim of its own.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flax import nnx
from jax.sharding import PartitionSpec

from flax_mesh.tree import PyTree, named_leaves, path_of

FOLLOWS = "follows"
Dims = tuple[int | None, ...]


class Follower(NamedTuple):
    """The path of the Variable that another one follows, and the dims of it that those of the other one are."""

    leader: str
    dims: Dims


def followers(tree: PyTree) -> dict[str, Follower]:
    """path -> what the Variable follows, for all in an nnx.State that follow another one; {} for other trees."""
    found = {}
    for path, variable in nnx.to_flat_state(tree) if isinstance(tree, nnx.State) else ():
        if isinstance(variable, nnx.Variable) and (follows := variable.get_metadata().get(FOLLOWS)):
            name, dims = follows
            found[path_of(path)] = Follower(path_of((*path[:-1], name)), tuple(dims))
    # A tree of the adapters alone has no weights; its Variables follow none.
    paths = {path for path, _ in named_leaves(tree)} if found else set()
    return {path: each for path, each in found.items() if each.leader in paths}


def with_followers(tree: PyTree, found: Mapping[str, Follower], specs: Sequence[PartitionSpec]) -> list[PartitionSpec]:
    """The specs of all leaves of `tree`, given those of all leaves, or of all but the Variables that follow another.

    Both are in the order of `named_leaves(tree)`.
    """
    paths = [path for path, _ in named_leaves(tree)]
    given = paths if len(specs) == len(paths) else [path for path in paths if path not in found]
    known = dict(zip(given, specs, strict=True))
    known |= {path: spec_of_dims(each.dims, known[each.leader]) for path, each in found.items()}
    return [known[path] for path in paths]


def spec_of_dims(dims: Sequence[int | None], spec: PartitionSpec) -> PartitionSpec:
    """The axes of the corresponding dims; a dim that occurs twice, as in a Gram matrix, splits the first only."""
    entries = [spec[d] if d is not None and d < len(spec) and d not in dims[:i] else None for i, d in enumerate(dims)]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
