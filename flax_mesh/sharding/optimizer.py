"""Layouts of optimizer states, for any optax transformation: from the parameters, and split further by ZeRO-1."""

import math
from collections.abc import Iterable, Mapping, Sequence

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from flax_mesh.axes import as_tuple
from flax_mesh.sharding.annotations import annotations_of, spec_of_dims
from flax_mesh.sharding.rules import Finding, PartitionRules, RuleMatch, match_leaves, split_first_dim
from flax_mesh.tree import named_leaves, owners_of

Shape = tuple[int, ...]
Dims = tuple[int | None, ...]  # for each dim of an optimizer array, the corresponding dim of its parameter
LARGE = 2**24  # bytes; a larger array that belongs to no parameter needs a rule


def match_optimizer(
    optimizer: nnx.Optimizer,
    model: nnx.State,
    parameter_specs: Sequence[PartitionSpec],
    table: PartitionRules,
    mesh: Mesh | AbstractMesh,
    *,
    min_size: int = 0,
    over: Iterable[str] = (),
    annotated: RuleMatch | None = None,
) -> RuleMatch:
    """Specs of the leaves of an nnx.Optimizer, from the specs of the model.

    A leaf whose path ends in the path of a parameter, or continues it, belongs to that parameter. If it has the same
    shape, it gets the same spec. Otherwise each of its dims gets the axes of the corresponding dim of the parameter,
    as in the row and column statistics of Adafactor. Other leaves follow `table`; without a rule they are replicated.

    Args:
        model: The state of the model.
        parameter_specs: Specs of its leaves, in the order of `named_leaves(model)`.
        over: Mesh axes of ZeRO stage 1, see `split_over`.
        annotated: The match of Flax's annotations on the optimizer, used for leaves whose annotation differs from the
            annotation of their parameter: a Variable with the metadata `optimizer_sharding`.
    """
    parameters = named_leaves(model)
    owners = {path: (leaf.shape, spec) for (path, leaf), spec in zip(parameters, parameter_specs, strict=True)}
    leaves = named_leaves(nnx.state(optimizer, graph=True))
    owner_of = owners_of([path for path, _ in leaves], owners, tails=True)
    pairs = [(path, leaf, owner_of[path]) for path, leaf in leaves if path in owner_of]
    dims = _dims_of_parameters(optimizer, model, {p: owner for p, x, owner in pairs if x.shape != owners[owner][0]})
    differing = _differing(annotated, optimizer, model, {path: owner for path, _, owner in pairs}) if annotated else {}
    specs, findings = {}, [finding for finding in annotated.findings if finding.path in differing] if annotated else []
    for path, leaf, owner in pairs:
        shape, spec = owners[owner]
        if leaf.shape == shape and path in differing:
            spec = differing[path]
        if leaf.shape != shape:
            spec = spec_of_dims(dims[path], spec)
            findings += _check_replicated(path, leaf.shape, spec, owner, *owners[owner])
        specs[path], problems = split_over(path, leaf.shape, spec, mesh, over, min_size)
        findings += problems
    others = [(path, leaf) for path, leaf in leaves if path not in specs]
    match = match_leaves(_with_default_rule(table, others), others, mesh=mesh, min_size=min_size)
    specs |= {path: spec for (path, _), spec in zip(others, match.specs, strict=True)}
    return match._replace(specs=[specs[path] for path, _ in leaves], findings=[*findings, *match.findings])


def _dims_of_parameters(
    optimizer: nnx.Optimizer, model: nnx.State, owner_of_leaf: Mapping[str, str]
) -> dict[str, Dims]:
    """For each dim of each leaf, the corresponding dim of its parameter, or None if it has no such dim.

    Sizes alone do not determine this dim: the row and the column statistics of a square matrix have the same shape. So
    `init` of the transformation is traced once more with parameters whose dims are larger by distinct amounts; the new
    size of a dim then identifies the dim of the parameter.
    """
    if not owner_of_leaf:
        return {}
    parameters = nnx.filter_state(model, optimizer.wrt)
    grown = jax.tree.map(lambda x: jax.ShapeDtypeStruct(_grown(x.shape), x.dtype), parameters)
    before = {path: leaf.shape for path, leaf in named_leaves(nnx.state(optimizer, graph=True))}
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
    """`spec`, in which the first divisible dim is also split over `axes`, over which the array was replicated.

    ZeRO stage 1 (Rajbhandari et al. 2020, arXiv:1910.02054) for one array of an optimizer. Axes that split the array
    already are skipped. An array keeps its spec if it has fewer elements than `min_size`, or than the devices to split
    over. An array without a divisible dim keeps its spec as well, with a finding.
    """
    entries = [as_tuple(entry) for entry in (*spec, *[None] * (len(shape) - len(spec)))]
    axes = tuple(axes)
    if twice := sorted({axis for axis in axes if axes.count(axis) > 1}):
        return spec, [Finding(path, f"cannot be split over {twice} twice: axes {axes}", "Name every axis once")]
    further = tuple(axis for axis in axes if not any(axis in entry for entry in entries))
    if unknown := [axis for axis in further if axis not in mesh.axis_names]:
        problem = f"must be split over axes of the mesh {dict(mesh.shape)}, which lacks {unknown}"
        return spec, [Finding(path, problem, "Name axes of the mesh, or add them with size 1")]
    ways = math.prod(mesh.shape[axis] for axis in further)
    if ways == 1 or math.prod(shape) < max(ways, min_size):
        return spec, []
    if (split := split_first_dim(shape, spec, mesh, further, range(len(shape)))) is not None:
        return split, []
    problem = f"no dim of {shape} with spec {spec} can be divided by {ways} more (axes {further})"
    repair = f"Leave arrays of this size unchanged with min_size={math.prod(shape) + 1}, or use on_mismatch='warn'"
    return spec, [Finding(path, problem, repair)]


def _differing(
    match: RuleMatch, optimizer: nnx.Optimizer, model: nnx.State, owner_of_leaf: Mapping[str, str]
) -> dict[str, PartitionSpec]:
    state = nnx.state(optimizer, graph=True)
    annotated, of_parameters = annotations_of(state), annotations_of(model)
    return {
        path: spec
        for (path, _), spec in zip(named_leaves(state), match.specs, strict=True)
        if path in owner_of_leaf and path in annotated and annotated[path] != of_parameters.get(owner_of_leaf[path])
    }


def _grown(shape: Shape) -> Shape:
    """A larger shape with distinct sizes in the same order, so that `init` makes the same decisions."""
    order = sorted(range(len(shape)), key=lambda dim: (shape[dim], dim))
    return tuple(size + 1 + order.index(dim) for dim, size in enumerate(shape))


def _dims(before: Shape, after: Shape, parameter: Shape) -> Dims:
    if len(before) != len(after):
        return (None,) * len(before)
    dim_of = {pair: dim for dim, pair in enumerate(zip(parameter, _grown(parameter), strict=True))}
    return tuple(dim_of.get(pair) for pair in zip(before, after, strict=True))


def _check_replicated(
    path: str, shape: Shape, spec: PartitionSpec, owner: str, owner_shape: Shape, owner_spec: PartitionSpec
) -> list[Finding]:
    split = any(as_tuple(entry) for entry in owner_spec)
    if any(as_tuple(entry) for entry in spec) or not split or math.prod(shape) < math.prod(owner_shape):
        return []
    problem = (
        f"{shape} would be replicated: {owner_spec} splits none of the dims that it shares with {owner} {owner_shape}"
    )
    return [Finding(path, problem, f"Split another dim of {owner}, or accept the copies with on_mismatch='warn'")]


def _with_default_rule(table: PartitionRules, leaves: Iterable[tuple[str, jax.Array]]) -> PartitionRules:
    """The table with a last rule for small arrays of the optimizer itself, such as Muon's coefficients."""
    if any(table.find(path) is None and leaf.size * leaf.dtype.itemsize >= LARGE for path, leaf in leaves):
        return table
    return PartitionRules((*table.table, (".*", ())), table.axes, table.layers)
