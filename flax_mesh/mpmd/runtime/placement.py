"""The placement of a pipeline's state: every leaf on the group of its stage."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_mesh.axes import PartitionAxis, as_tuple
from flax_mesh.errors import ShardingError
from flax_mesh.jax_compat import short_tracer_errors
from flax_mesh.mpmd.mesh import MpmdMesh
from flax_mesh.mpmd.split.jaxpr import Chunks
from flax_mesh.mpmd.split.split import StagedModel
from flax_mesh.mpmd.split.trace import ModelLeaf
from flax_mesh.mpmd.split.update import SHARED
from flax_mesh.mpmd.transport.layout import on_all_groups, remote_array, sharding_on
from flax_mesh.sharding.abstract import abstract_state
from flax_mesh.sharding.rules import Rules
from flax_mesh.step.state import TrainState, TreeDefinition, abstract_train_state
from flax_mesh.tree import named_leaves, owner_of

MODEL, OPTIMIZER = "model/", "optimizer/"


class Home(NamedTuple):
    """A leaf of the pipelined state: leaf `source` of the plain one, or layers `rows` of it, on a group.

    A leaf that belongs to no parameter, such as the number of the step, is SHARED: a copy on every device.
    """

    path: str
    source: int
    rows: tuple[int, int] | None
    group: int
    leaf: int | None  # index into StagedModel.leaves, None in the optimizer
    sharding: NamedSharding


@dataclass(frozen=True)
class Placement:
    """The pipelined state: `homes` has an entry for every leaf of `abstract`."""

    homes: tuple[Home, ...]
    abstract: TrainState  # leaves are ShapeDtypeStructs with shardings
    plain: TrainState  # the same state without groups: one leaf a variable


def place(
    make: Callable[[], Any],
    staged: StagedModel,
    mesh: MpmdMesh,
    stage_to_group: Sequence[int],
    rules: Rules | None,
    axes: PartitionAxis | None,
    shard_optimizer_over: str | tuple[str, ...] = (),
) -> Placement:
    """The placement of the state of `make() -> (model, optimizer)`: a leaf is placed on the group of the first stage
    that uses it, an optimizer leaf on that of its parameter, both laid out there by `rules`."""
    groups = mesh.unstack
    laid_out = abstract_state(make, groups[0], rules, axes=axes, shard_optimizer_over=shard_optimizer_over)
    plain = abstract_train_state(make, laid_out)
    named = named_leaves(laid_out)
    check_specs([(path, leaf.sharding.spec) for path, leaf in named], mesh)
    homes: list[Home] = []
    parts_of = _parts_of(named, staged, stage_to_group)
    for source, ((path, leaf), parts) in enumerate(zip(named, parts_of, strict=True)):
        for rows, group, at in parts:
            sharding = NamedSharding(mesh.jax_mesh if group == SHARED else groups[group], leaf.sharding.spec)
            homes.append(Home(path, source, rows, group, at, sharding))
    leaves = []
    for home in homes:
        leaf, rows = plain.leaves[home.source], home.rows
        shape = leaf.shape if rows is None else (rows[1] - rows[0], *leaf.shape[1:])
        leaves.append(jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=home.sharding))
    tree = jax.tree.unflatten(plain.definition.treedef, chunked(homes, leaves))
    definition = TreeDefinition(plain.definition.graphdef, jax.tree.structure(tree))
    return Placement(tuple(homes), TrainState(tuple(leaves), definition), plain)


def bytes_of_groups(
    staged: StagedModel, stage_to_group: Sequence[int], leaves: Iterable[tuple[str, Any, int]]
) -> list[int]:
    """Bytes that a device of every group holds, of the (path, leaf, bytes a device) of a state of all leaves."""
    leaves = list(leaves)
    found = [0] * (max(stage_to_group) + 1)
    parts_of = _parts_of([(path, leaf) for path, leaf, _ in leaves], staged, stage_to_group)
    for (_, leaf, size), parts in zip(leaves, parts_of, strict=True):
        for rows, group, _ in parts:
            share = size if rows is None else size * (rows[1] - rows[0]) // leaf.shape[0]
            for held in range(len(found)) if group == SHARED else (group,):
                found[held] += share
    return found


def chunked(homes: Sequence[Home], values: Sequence[Any]) -> list[Any]:
    """One value for every leaf of the plain state, those of stacks as Chunks, from one for every home."""
    found: dict[int, Any] = {}
    for home, value in zip(homes, values, strict=True):
        if home.rows is None:
            found[home.source] = value
        else:
            before = found.get(home.source, Chunks((), ()))
            found[home.source] = Chunks((*before.parts, value), (*before.starts, home.rows[0]))
    return [found[source] for source in range(len(found))]


def init_leaves(make: Callable[[], Any], placement: Placement, meshes: Mapping[int, Mesh]) -> tuple[jax.Array, ...]:
    """The initial leaves, initialized on their groups: one compilation a group. `meshes` has the groups of this
    process; leaves of other groups are arrays without a shard here."""
    found: dict[int, jax.Array] = {}
    first = min(meshes)
    for group in sorted({home.group for home in placement.homes} & {SHARED, *meshes}):
        mine = [at for at, home in enumerate(placement.homes) if home.group == group]

        def leaves(mine: list[int] = mine) -> list[Any]:
            with nnx.use_eager_sharding(False):
                model, optimizer = make()
            values = jax.tree.leaves(nnx.state({"model": model, "optimizer": optimizer}))
            return [cut_rows(values[placement.homes[at].source], placement.homes[at].rows) for at in mine]

        there = [sharding_on(placement.homes[at].sharding, meshes[first if group == SHARED else group]) for at in mine]
        with short_tracer_errors():
            made = jax.jit(leaves, out_shardings=there)()
        if group == SHARED:
            made = [_copied(x, meshes, first, placement.homes[at].sharding) for at, x in zip(mine, made, strict=True)]
        found |= dict(zip(mine, made, strict=True))
    return tuple(found[at] if at in found else remote_array(x) for at, x in enumerate(placement.abstract.leaves))


def _copied(x: jax.Array, meshes: Mapping[int, Mesh], first: int, sharding: NamedSharding) -> jax.Array:
    there = {group: sharding_on(x.sharding, mesh) for group, mesh in meshes.items()}
    parts = [x if group == first else jax.device_put(x, to) for group, to in there.items()]
    return on_all_groups(parts, sharding)


def cut_rows(value: Any, rows: tuple[int, int] | None) -> Any:
    return value if rows is None else value[slice(*rows)]


def check_specs(specs: Iterable[tuple[str, PartitionSpec]], mesh: MpmdMesh) -> None:
    """ShardingError for every spec that mentions the MPMD axis, whose groups hold different leaves."""
    name = mesh.mpmd_axis_name
    wrong = [f"{path}: {spec}" for path, spec in specs if any(name in as_tuple(entry) for entry in spec)]
    if wrong:
        raise ShardingError(
            "\n".join(wrong) + f"\nA spec must not mention {name!r}, the axis of the pipeline's groups: every group "
            "holds leaves of its own. Map these dims to other axes, or to None."
        )


def _parts_of(
    named: Sequence[tuple[str, Any]], staged: StagedModel, stage_to_group: Sequence[int]
) -> Iterator[list[tuple[tuple[int, int] | None, int, int | None]]]:
    """(rows, group, index into staged.leaves) for each part of every (path, leaf) of the plain state."""
    model_paths = [path.removeprefix(MODEL) for path, _ in named if path.startswith(MODEL)]
    model_parts: dict[int, list[tuple[int, int, ModelLeaf]]] = {}  # index, group and leaf, by source
    for at, leaf in enumerate(staged.leaves):
        model_parts.setdefault(leaf.source, []).append((at, stage_to_group[staged.users[at][0]], leaf))
    for path, leaf in named:
        in_model = path.startswith(MODEL)
        owner = path.removeprefix(MODEL) if in_model else owner_of(path, model_paths)
        parts = [] if owner is None else model_parts[model_paths.index(owner)]
        depth = parts[-1][2].rows[1] if parts and parts[-1][2].rows else 0
        if in_model:
            yield [(part.rows, group, at) for at, group, part in parts]
        elif depth and leaf.shape[:1] == (depth,):  # of every layer of a stack
            yield [(part.rows, group, None) for _, group, part in parts]
        else:
            yield [(None, parts[0][1] if parts else SHARED, None)]
