"""Layouts of optimizer states, for any optax transformation: by structure, and split further over data (ZeRO-1)."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from flax_mesh.axes import as_tuple
from flax_mesh.sharding.annotations import annotations_of
from flax_mesh.sharding.rules import Finding, PartitionRules, RuleMatch, match_leaves, split_first_dim
from flax_mesh.tree import named_leaves, owner_of

Shape = tuple[int, ...]
Dims = tuple[int | None, ...]  # for each dim of an optimizer array: which dim of its parameter it is
LARGE = 2**24  # bytes from which an array that belongs to no parameter needs a rule


def match_optimizer(
    optimizer: Any,
    model: Any,
    parameter_specs: Sequence[PartitionSpec],
    table: PartitionRules,
    mesh: Mesh | AbstractMesh,
    *,
    min_size: int = 0,
    over: Iterable[str] = (),
    own: RuleMatch | None = None,
) -> RuleMatch:
    """Specs of an nnx.Optimizer's leaves, from those of the model's, in the order of `named_leaves(nnx.state(model))`.

    A leaf whose path ends in a parameter's path, or goes through it, belongs to that parameter. With its shape it takes
    its spec; otherwise each dim takes the axes of the parameter's dim that it is, as in Adafactor's row and column
    statistics. Other leaves follow `table`, and are replicated where it has no rule. `over`: see `split_over`. `own` is
    the match of Flax's annotations on the optimizer, used where they differ from the parameter's: a Variable with the
    metadata `optimizer_sharding`. What does not fit is a finding.
    """
    parameters = named_leaves(nnx.state(model))
    owners = {path: (leaf.shape, spec) for (path, leaf), spec in zip(parameters, parameter_specs, strict=True)}
    leaves = named_leaves(nnx.state(optimizer))
    pairs = [(path, leaf, owner) for path, leaf in leaves if (owner := _owner(path, owners))]
    dims = dims_of_parameters(optimizer, model, {p: owner for p, x, owner in pairs if x.shape != owners[owner][0]})
    differing = _differing(own, optimizer, model, {path: owner for path, _, owner in pairs}) if own else {}
    specs, findings = {}, [finding for finding in own.findings if finding.path in differing] if own else []
    for path, leaf, owner in pairs:
        shape, spec = owners[owner]
        if leaf.shape == shape and path in differing:
            spec = differing[path]
        if leaf.shape != shape:
            spec = _spec_of_dims(dims[path], spec)
            findings += _check_whole(path, leaf.shape, spec, owner, *owners[owner])
        specs[path], problems = split_over(path, leaf.shape, spec, mesh, over, min_size)
        findings += problems
    others = [(path, leaf) for path, leaf in leaves if path not in specs]
    match = match_leaves(_complete(table, others), others, mesh=mesh, min_size=min_size)
    specs |= {path: spec for (path, _), spec in zip(others, match.specs, strict=True)}
    return match._replace(specs=[specs[path] for path, _ in leaves], findings=[*findings, *match.findings])


def dims_of_parameters(optimizer: Any, model: Any, owner_of_leaf: Mapping[str, str]) -> dict[str, Dims]:
    """For each leaf named, which dim of its parameter each of its dims is, None for a dim that is none.

    Sizes cannot tell: the row and the column statistics of a square matrix have the same shape. So the transformation's
    own `init` is traced once more on parameters whose dims are a little larger, each by another amount: the dim that
    has grown to the size of one of these is that one.
    """
    if not owner_of_leaf:
        return {}
    parameters = nnx.state(model, optimizer.wrt)
    grown = jax.tree.map(lambda x: jax.ShapeDtypeStruct(_grown(x.shape), x.dtype), parameters)
    before = {path: leaf.shape for path, leaf in named_leaves(nnx.state(optimizer))}
    after = {f"opt_state/{p}": x.shape for p, x in named_leaves(jax.eval_shape(optimizer.tx.init, grown))}
    shapes = {path: leaf.shape for path, leaf in named_leaves(parameters)}
    return {
        path: _dims(before[path], after.get(path, ()), shapes.get(owner, ())) for path, owner in owner_of_leaf.items()
    }


def split_over(
    path: str,
    shape: Shape,
    spec: PartitionSpec,
    mesh: Mesh | AbstractMesh,
    axes: Iterable[str],
    min_size: int = 0,
) -> tuple[PartitionSpec, list[Finding]]:
    """`spec` with its first dim that divides split over `axes` too, which then hold no copies of each other.

    ZeRO stage 1 (Rajbhandari et al. 2020, arXiv:1910.02054) for an array of an optimizer. Axes that split the array
    already are done, and so are arrays of fewer than `min_size` elements or fewer than there are devices to split
    over. Any other array none of whose dims divides is a finding, and keeps its spec.
    """
    entries = [as_tuple(entry) for entry in (*spec, *[None] * (len(shape) - len(spec)))]
    further = tuple(axis for axis in axes if not any(axis in entry for entry in entries))
    if unknown := [axis for axis in further if axis not in mesh.axis_names]:
        problem = f"is to be split over {unknown}, which the mesh {dict(mesh.shape)} lacks"
        return spec, [Finding(path, problem, "Name axes of the mesh, or add them with size 1")]
    ways = math.prod(mesh.shape[axis] for axis in further)
    if ways == 1 or math.prod(shape) < max(ways, min_size):
        return spec, []
    if (split := split_first_dim(shape, spec, mesh, further, range(len(shape)))) is not None:
        return split, []
    problem = f"no dim of {shape}, laid out as {spec}, divides by {ways} more (axes {further})"
    repair = f"Keep arrays of its size as they are with min_size={math.prod(shape) + 1}, or on_mismatch='warn'"
    return spec, [Finding(path, problem, repair)]


def _differing(
    own: RuleMatch, optimizer: Any, model: Any, owner_of_leaf: Mapping[str, str]
) -> dict[str, PartitionSpec]:
    state = nnx.state(optimizer)
    said, of_parameters = annotations_of(state), annotations_of(nnx.state(model))
    return {
        path: spec
        for (path, _), spec in zip(named_leaves(state), own.specs, strict=True)
        if path in owner_of_leaf and path in said and said[path] != of_parameters.get(owner_of_leaf[path])
    }


def _owner(path: str, parameters: Mapping[str, Any]) -> str | None:
    """The parameter a leaf belongs to: "0/mu/layers/0/q" belongs to "layers/0/q", as does "0/mu/layers/0/q/1"."""
    parts = path.split("/")
    heads = ("/".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((owner for head in heads if (owner := owner_of(head, parameters))), None)


def _grown(shape: Shape) -> Shape:
    """Larger, all sizes distinct, in the order in which `argsort` has them: so that `init` decides as before."""
    order = sorted(range(len(shape)), key=lambda dim: (shape[dim], dim))
    return tuple(size + 1 + order.index(dim) for dim, size in enumerate(shape))


def _dims(before: Shape, after: Shape, parameter: Shape) -> Dims:
    if len(before) != len(after):
        return (None,) * len(before)
    found = {pair: dim for dim, pair in enumerate(zip(parameter, _grown(parameter), strict=True))}
    return tuple(found.get(pair) for pair in zip(before, after, strict=True))


def _spec_of_dims(dims: Dims, spec: PartitionSpec) -> PartitionSpec:
    """The axes of the parameter's dims; a dim of it that stands twice, as in a Gram matrix, splits the first."""
    entries = [spec[d] if d is not None and d < len(spec) and d not in dims[:i] else None for i, d in enumerate(dims)]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def _check_whole(
    path: str, shape: Shape, spec: PartitionSpec, owner: str, owner_shape: Shape, owner_spec: PartitionSpec
) -> list[Finding]:
    split = any(as_tuple(entry) for entry in owner_spec)
    if any(as_tuple(entry) for entry in spec) or not split or math.prod(shape) < math.prod(owner_shape):
        return []
    problem = f"{shape} would stay whole: none of its dims is one that {owner_spec} splits of {owner} {owner_shape}"
    return [Finding(path, problem, f"Split another dim of {owner}, or accept the copies with on_mismatch='warn'")]


def _complete(table: PartitionRules, leaves: Iterable[tuple[str, Any]]) -> PartitionRules:
    """The table with a last rule for an optimizer's own small arrays, such as Muon's coefficients."""
    if any(table.find(path) is None and leaf.size * leaf.dtype.itemsize >= LARGE for path, leaf in leaves):
        return table
    return PartitionRules((*table.table, (".*", ())), table.axes, table.layers)
