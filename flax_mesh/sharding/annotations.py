"""Specs from the metadata of Variables: from Flax's own annotations, `out_sharding`, and from other Variables.

A Variable follows another one if its spec does, as the factors of an adapter follow their weight. The metadata
`follows=(name, dims)` names this leader, another attribute of the same module. `dims` has, for each dim of the
Variable, the corresponding dim of the leader, or None for a dim without one.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flax import nnx
from flax.core.spmd import get_logical_axis_rules
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from flax_mesh.axes import LOGICAL_AXES, AxisName, PartitionAxis, as_tuple
from flax_mesh.sharding.rules import Finding, RuleMatch, fit_spec
from flax_mesh.tree import PyTree, named_leaves, path_of

FOLLOWS = "follows"

_Annotation = tuple[AxisName, ...] | PartitionSpec  # the names of the dims of an array


def annotations_of(state: nnx.State) -> dict[str, _Annotation]:
    """path -> names of the dims of every annotated Variable."""
    values = {path: variable.get_metadata().get("out_sharding") for path, variable in _variables(state)}
    return {path: _names(value) for path, value in values.items() if value is not None}


def match_annotations(state: nnx.State, mesh: Mesh | AbstractMesh, axes: PartitionAxis) -> RuleMatch:
    """The specs of annotated leaves; leaves without an annotation are replicated.

    A name is replaced by Flax's rules first: the `sharding_rules` of the Variable, then `nnx.logical_axis_rules` in
    context. The result is looked up as a mesh axis, then as a logical axis of `axes`. Unknown names are findings. So
    are annotations with fewer names than the array has dims, which result from stacking layers without
    `transform_metadata`.
    """
    context = dict(get_logical_axis_rules())
    rules = {path: context | dict(x.get_metadata().get("sharding_rules") or ()) for path, x in _variables(state)}
    annotated = annotations_of(state)
    specs, findings = [], []
    for path, leaf in named_leaves(state):
        annotation = annotated.get(path, ())
        dims, unmapped = _resolve(annotation, rules.get(path, {}), mesh, axes)
        for name in unmapped:
            problem = f"its annotation {tuple(annotation)} names {name!r}, neither a mesh axis nor a logical axis"
            repair = f"Map it: axes=PartitionAxis(extra={{{name!r}: MESH_AXIS_OR_NONE}}), or pass rules="
            findings.append(Finding(path, problem, repair))
        if annotation and len(tuple(annotation)) < len(leaf.shape) and not isinstance(annotation, PartitionSpec):
            sizes = f"{len(tuple(annotation))} names, but the array {leaf.shape} has {len(leaf.shape)} dims"
            problem = f"its annotation {tuple(annotation)} has {sizes}"
            repair = "Name every dim; for stacked layers pass transform_metadata={nnx.PARTITION_NAME: None} to nnx.vmap"
            findings.append(Finding(path, problem, repair))
            dims = ()
        spec, problems = fit_spec(path, leaf.shape, PartitionSpec(*dims), mesh)
        specs.append(spec)
        findings += problems
    return RuleMatch(specs, findings)


def _variables(state: nnx.State) -> list[tuple[str, nnx.Variable]]:
    return [(path_of(path), x) for path, x in nnx.to_flat_state(state) if isinstance(x, nnx.Variable)]


def _names(annotation: Any) -> _Annotation:
    if isinstance(annotation, Format):
        annotation = annotation.sharding
    return annotation.spec if isinstance(annotation, NamedSharding) else annotation


def _resolve(
    annotation: _Annotation, rules: Mapping[str, AxisName], mesh: Mesh | AbstractMesh, axes: PartitionAxis
) -> tuple[tuple[AxisName, ...], list[str]]:
    """(mesh axes of each dim, names that are neither a mesh axis nor a logical axis)."""
    known = {*LOGICAL_AXES, *dict(axes.extra)}
    dims, unmapped = [], []
    for entry in annotation:
        names: list[str] = []
        for name in (mapped for written in as_tuple(entry) for mapped in as_tuple(rules.get(written, written))):
            if name in mesh.axis_names:
                names.append(name)
            elif name in known:
                mapped_axes = [axis for axis in axes.mesh_axes(name) if axis not in names]
                names += [axis for axis in mapped_axes if axis in mesh.axis_names or axis not in axes.default_names]
            else:
                unmapped.append(name)
        dims.append(tuple(names) or None)
    return tuple(dims), unmapped


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
