"""Specs from Flax's own annotations, the `out_sharding` metadata of Variables."""

from typing import Any

from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from flax_mesh.axes import LOGICAL_AXES, PartitionAxis, as_tuple
from flax_mesh.sharding.rules import Finding, RuleMatch, fit_spec
from flax_mesh.tree import named_leaves, path_of


def annotations_of(state: nnx.State) -> dict[str, Any]:
    """path -> `out_sharding` of every annotated Variable."""
    variables = [(path_of(path), x) for path, x in nnx.to_flat_state(state) if isinstance(x, nnx.Variable)]
    found = {path: variable.get_metadata().get("out_sharding") for path, variable in variables}
    return {path: value for path, value in found.items() if value is not None}


def match_annotations(state: nnx.State, mesh: Mesh | AbstractMesh, axes: PartitionAxis) -> RuleMatch:
    """The specs of annotated leaves; leaves without an annotation are replicated.

    A name is looked up as a mesh axis first, then as a logical axis of `axes`. Unknown names are findings. So are
    annotations with fewer names than the array has dims: stacking layers without `transform_metadata` causes those.
    """
    annotated = annotations_of(state)
    specs, findings = [], []
    for path, leaf in named_leaves(state):
        annotation = annotated.get(path, ())
        dims, unmapped = _resolve(annotation, mesh, axes)
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


def _resolve(annotation: Any, mesh: Mesh | AbstractMesh, axes: PartitionAxis) -> tuple[tuple[Any, ...], list[str]]:
    """(mesh axes of each dim, names that are neither a mesh axis nor a logical axis)."""
    known = {*LOGICAL_AXES, *dict(axes.extra)}
    dims, unmapped = [], []
    for entry in annotation:
        names: list[str] = []
        for name in as_tuple(entry):
            if name in mesh.axis_names:
                names.append(name)
            elif name in known:
                found = [axis for axis in axes.mesh_axes(name) if axis not in names]
                names += [axis for axis in found if axis in mesh.axis_names or axis not in axes.default_names]
            else:
                unmapped.append(name)
        dims.append(tuple(names) or None)
    return tuple(dims), unmapped
