"""Placement of a pipeline's state: which group owns each leaf, and how it is sharded there."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_mesh.axes import as_tuple
from flax_mesh.errors import ConfigError, ShardingError
from flax_mesh.modes import optimizer_of
from flax_mesh.mpmd.chunks import Chunks, Value, rows_of
from flax_mesh.mpmd.mesh import MpmdMesh
from flax_mesh.mpmd.split.problems import filter_text
from flax_mesh.mpmd.split.split import StagedModel, parts_of
from flax_mesh.mpmd.split.update import SHARED
from flax_mesh.mpmd.transport.layout import on_all_groups, remote_array, sharding_on
from flax_mesh.sharding.abstract import Make, abstract_state, initialized, made_leaves
from flax_mesh.step.options import StateLayout
from flax_mesh.step.state import TrainState, TreeDefinition, abstract_train_state
from flax_mesh.text import path_lines
from flax_mesh.tree import MODEL, PyTree, named_leaves


class LeafOwner(NamedTuple):
    """The group that owns a leaf of the pipelined state: leaf `source` of the plain state, or its layers `rows`.

    A leaf that belongs to no parameter, such as the step number, is SHARED: replicated over all groups.
    """

    path: str
    source: int
    rows: tuple[int, int] | None
    group: int
    leaf: int | None  # index into StagedModel.leaves, None in the optimizer
    sharding: NamedSharding


@dataclass(frozen=True)
class Placement:
    """The pipelined state. `owners` has one entry per leaf of `abstract`."""

    owners: tuple[LeafOwner, ...]
    abstract: TrainState  # leaves are ShapeDtypeStructs with shardings
    plain: TrainState  # the same state without groups, one leaf per variable

    @property
    def model_specs(self) -> tuple[PartitionSpec, ...]:
        """The specs of the leaves of the model."""
        leaves = named_leaves(self.plain.to_nnx())
        return tuple(leaf.sharding.spec for path, leaf in leaves if path.startswith(MODEL))


def make_of(staged: StagedModel, optimizer: optax.GradientTransformation | nnx.Optimizer | None) -> Make:
    """The function that makes the model and the optimizer, which either split_stages or Pipeline receives once."""
    if (optimizer is None) == (staged.make_state is None):
        number = "got none" if optimizer is None else "got one in each"
        raise ConfigError(
            "the optimizer must be given once, by the function that split_stages takes, which returns "
            f"(model, nnx.Optimizer), or as Pipeline(staged, optimizer); {number}"
        )
    if staged.make_state is not None:
        return staged.make_state
    assert optimizer is not None
    if isinstance(optimizer, nnx.Optimizer) and optimizer.wrt != staged.wrt:
        raise ConfigError(
            f"wrt={filter_text(optimizer.wrt)} of the optimizer must equal the filter of the stages, "
            f"wrt={filter_text(staged.wrt)}; pass the filter to split_stages"
        )
    return lambda: ((model := staged.make()), optimizer_of(model, optimizer, staged.wrt))


def place(
    make: Make,
    staged: StagedModel,
    mesh: MpmdMesh,
    stage_to_group: Sequence[int],
    layout: StateLayout,
) -> Placement:
    """The placement of the state of `make() -> (model, optimizer)`.

    A leaf is placed on the group of the first stage that uses it, an optimizer leaf on the group of its parameter. Both
    are sharded there by the rules of `layout`.
    """
    groups = mesh.unstack
    sharded = abstract_state(make, groups[0], **vars(layout))
    plain = abstract_train_state(make, sharded)
    named = named_leaves(sharded)
    check_specs([(path, leaf.sharding.spec) for path, leaf in named], mesh)
    owners: list[LeafOwner] = []
    for source, ((path, leaf), parts) in enumerate(zip(named, parts_of(named, staged, stage_to_group), strict=True)):
        for rows, group, at in parts:
            sharding = sharding_on(leaf.sharding, mesh.jax_mesh if group == SHARED else groups[group])
            owners.append(LeafOwner(path, source, rows, group, at, sharding))
    leaves = []
    for owner in owners:
        leaf, rows = plain.leaves[owner.source], owner.rows
        shape = leaf.shape if rows is None else (rows[1] - rows[0], *leaf.shape[1:])
        leaves.append(jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=owner.sharding))
    _check_rows(owners, leaves)
    tree = jax.tree.unflatten(plain.definition.treedef, chunked(owners, leaves))
    definition = TreeDefinition(plain.definition.graphdef, jax.tree.structure(tree))
    return Placement(tuple(owners), TrainState(tuple(leaves), definition), plain)


def chunked(owners: Sequence[LeafOwner], values: Sequence[PyTree]) -> list[Value]:
    """One value per leaf of the plain state, from one value per owner. Stacks become Chunks."""
    by_source: dict[int, Value] = {}
    for owner, value in zip(owners, values, strict=True):
        if owner.rows is None:
            by_source[owner.source] = value
        else:
            before = by_source.get(owner.source)
            parts, starts = (before.parts, before.starts) if isinstance(before, Chunks) else ((), ())
            by_source[owner.source] = Chunks((*parts, value), (*starts, owner.rows[0]))
    return [by_source[source] for source in range(len(by_source))]


def init_leaves(make: Make, placement: Placement, meshes: Mapping[int, Mesh]) -> tuple[jax.Array, ...]:
    """Initializes all leaves directly sharded on their groups, with one trace per group.

    `meshes` has the local groups. Leaves of other groups are arrays without local shards.
    """
    arrays: dict[int, jax.Array] = {}
    first = min(meshes)
    for group in sorted({owner.group for owner in placement.owners} & {SHARED, *meshes}):
        of_group = [at for at, owner in enumerate(placement.owners) if owner.group == group]

        mesh = meshes[first if group == SHARED else group]

        def leaves(of_group: list[int] = of_group, mesh: Mesh = mesh) -> list[jax.Array]:
            values = made_leaves(make, mesh)
            owners = [placement.owners[at] for at in of_group]
            return [rows_of(values[owner.source], [owner.rows])[0] for owner in owners]

        there = [sharding_on(placement.owners[at].sharding, mesh) for at in of_group]
        initial = initialized(leaves, there)
        if group == SHARED:
            shardings = [placement.owners[at].sharding for at in of_group]
            initial = [_copied(x, meshes, first, to) for x, to in zip(initial, shardings, strict=True)]
        arrays |= dict(zip(of_group, initial, strict=True))
    return tuple(arrays[at] if at in arrays else remote_array(x) for at, x in enumerate(placement.abstract.leaves))


def _copied(x: jax.Array, meshes: Mapping[int, Mesh], first: int, sharding: NamedSharding) -> jax.Array:
    there = {group: sharding_on(x.sharding, mesh) for group, mesh in meshes.items()}
    parts = [x if group == first else jax.device_put(x, to) for group, to in there.items()]
    return on_all_groups(parts, sharding)


def check_specs(specs: Iterable[tuple[str, PartitionSpec]], mesh: MpmdMesh) -> None:
    """Raises a ShardingError if a spec contains the MPMD axis: different groups store different leaves."""
    name = mesh.mpmd_axis_name
    wrong = [f"{path}: {spec}" for path, spec in specs if any(name in as_tuple(entry) for entry in spec)]
    if wrong:
        raise ShardingError(
            "\n".join(path_lines(wrong))
            + f"\nA spec must not contain {name!r}, the axis of the pipeline's groups: different "
            "groups store different leaves. Map these dims to other axes, or to None."
        )


def _check_rows(owners: Sequence[LeafOwner], leaves: Sequence[jax.ShapeDtypeStruct]) -> None:
    """Raises a ShardingError if a spec splits the layers of a stack into more parts than a stage has layers."""
    wrong = []
    for owner, leaf in zip(owners, leaves, strict=True):
        spec = owner.sharding.spec
        if (
            owner.rows is not None
            and spec
            and leaf.shape[0] % (ways := math.prod(owner.sharding.mesh.shape[axis] for axis in as_tuple(spec[0])))
        ):
            wrong.append(f"{owner.path}: {spec} splits the {leaf.shape[0]} layers of a stage into {ways} parts")
    if wrong:
        raise ShardingError(
            "\n".join(path_lines(dict.fromkeys(wrong)))
            + "\nThe leading dim of a scanned stack counts its layers, which the stages divide among them. Name the "
            "stack in the rules, which then apply to the other dims: PartitionRules(..., layers=...)."
        )
