"""Rule tables: the first pattern found in the path of a leaf defines how its dims are split."""

import warnings
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from flax_mesh.axes import DEFAULT_AXES, LargestDim, Lost, PartitionAxis, as_entry, as_tuple
from flax_mesh.errors import ShardingError
from flax_mesh.fields import check_types, require_types
from flax_mesh.sharding.table import CompiledRule, Dims, checked_table, compile_table, kinds_of_paths
from flax_mesh.text import at_most, axes_text, group_lines, group_paths, shown
from flax_mesh.tree import PyTree, in_stack, named_leaves, ranks_in, without_single_layers

Policy = Literal["error", "warn", "drop"]
_MATCHES_KEPT = 8


@dataclass(frozen=True)
class PartitionRules:
    """A rule table: an ordered list of (pattern, dims) that maps paths of arrays to PartitionSpecs.

    The first rule whose pattern `re.search` finds in the path of a leaf ("layers/0/attention/q/kernel") decides.

    Args:
        table: (pattern, dims) pairs. dims are logical axes, `("embed", "heads")`, which `axes` maps to mesh axes; or a
            `PartitionSpec` of mesh axes; or None or () for a replicated array. Instead of a table, the names of mesh
            axes: "fsdp", or "fsdp+dp". Every array is then split over these axes on its largest divisible dim (of equal
            dims, the last one), and replicated if no dim is divisible.
        axes: The mesh axes of each logical axis.
        layers: Paths of the layer lists, "layers" or ("encoder/layers", "decoder/layers"). An array of a scanned stack
            at such a path has an additional first dim, the layer dim. Rules do not name it, and it is never split.

    Raises:
        ShardingError: A pattern is not a regular expression, or dims are malformed. Names every such rule.

    Example:
        >>> rules = fm.PartitionRules([("kernel$", ("embed", "mlp")), ("bias$", ())], layers="layers")
        >>> print(rules.explain("layers/3/up/kernel"))
        layers/3/up/kernel: rule 1 of 2, 'kernel$' -> ('embed', 'mlp') -> P('fsdp', 'tp')
        >>> params = {"up": {"kernel": np.zeros((64, 256)), "bias": np.zeros(256)}}
        >>> fm.match_partition_rules("fsdp", params, mesh=fm.create_mesh())
        {'up': {'bias': P('fsdp',), 'kernel': P(None, 'fsdp')}}
    """

    table: tuple[tuple[str, Dims], ...]
    axes: PartitionAxis = DEFAULT_AXES
    layers: tuple[str, ...] = ()
    _compiled: tuple[CompiledRule, ...] = field(init=False, repr=False, compare=False)
    # Matches of the trees seen last: a state of the same structure is matched again without a look at its paths.
    _matches: dict[Hashable, "RuleMatch"] = field(init=False, repr=False, compare=False)

    def __init__(
        self,
        table: str | Iterable[tuple[str, object]],
        axes: PartitionAxis = DEFAULT_AXES,
        layers: str | Sequence[str] = (),
    ):
        require_types(PartitionRules.__init__, axes=axes, layers=layers)
        object.__setattr__(self, "table", checked_table(table))
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "layers", (layers,) if isinstance(layers, str) else tuple(layers))
        object.__setattr__(self, "_compiled", compile_table(self.table, axes))
        object.__setattr__(self, "_matches", {})

    def find(self, path: str) -> int | None:
        """Index of the rule that decides `path`; None if no pattern matches it."""
        return next((index for index, (pattern, _, _) in enumerate(self._compiled) if pattern.search(path)), None)

    def spec(self, index: int, path: str) -> PartitionSpec:
        """Spec of rule `index` for the leaf at `path`; in a scanned stack it starts with the layer dim."""
        spec = self._compiled[index][1]
        dims = self.table[index][1]
        names_the_stack = isinstance(dims, tuple) and dims[:1] == ("layers",)
        return PartitionSpec(None, *spec) if self.stack(path) and not names_the_stack else spec

    def stack(self, path: str) -> str | None:
        """Path of the scanned stack that contains the leaf, also below an optimizer's prefix: "0/mu/layers/q"."""
        parts = path.split("/") if self.layers else []
        heads = tuple(f"{stack}/" for stack in self.layers)
        tails = ("/".join(parts[start:]) for start in range(len(parts)))
        return in_stack(next((tail for tail in tails if tail.startswith(heads)), ""), self.layers)

    def without_single_layers(self, leaves: Sequence[tuple[str, object]], model: PyTree = None) -> "PartitionRules":
        """These rules with only lists and stacks as `layers`, see `flax_mesh.tree`."""
        ranks = ranks_in(model) if model is not None and self.layers else {}
        layers = without_single_layers(self.layers, leaves, ranks)
        return self if layers == self.layers else PartitionRules(self.table, self.axes, layers)

    def explain(self, path: str) -> str:
        """The rule that decides `path`, the spec that it resolves to, and later rules that match too, as text."""
        index = self.find(path)
        if index is None:
            return f"{path}: no rule matches; add one, or end the table with ('.*', ())"
        pattern, dims = self.table[index]
        later = [p.pattern for p, _, _ in self._compiled[index + 1 :] if p.search(path)]
        text = f"{path}: rule {index + 1} of {len(self.table)}, {pattern!r} -> "
        if isinstance(dims, LargestDim):
            return f"{text}the {dims} that divides"
        text += f"{dims!r} -> {self.spec(index, path)}"
        for lost in self._compiled[index][2]:
            text += f"; {lost_finding(path, lost).problem}"
        if stack := self.stack(path):
            text += f"; the leading dim counts the layers of the stack {stack!r}"
        return text + (f"; later rules that match too: {', '.join(map(repr, later))}" if later else "")


Rules = PartitionRules | str | Iterable[tuple[str, object]]  # the types that `rules=` accepts; see PartitionRules


class Finding(NamedTuple):
    path: str
    problem: str
    repair: str

    def __str__(self) -> str:
        return f"{self.path}: {self.problem.removesuffix('.')}. {self.repair}"


class RuleMatch(NamedTuple):
    """Specs of the leaves in the order of `jax.tree.leaves`."""

    specs: list[PartitionSpec]
    findings: list[Finding]  # parts of the rules that do not fit
    replicated: list[Finding] = []  # noqa: RUF012 (never changed): arrays without a dim that a LargestDim could split


@check_types
def match_partition_rules(
    rules: Rules,
    tree: PyTree,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    axes: PartitionAxis | None = None,
    min_size: int = 0,
    on_mismatch: Policy = "error",
    dropped: list[Finding] | None = None,
) -> PyTree:
    """The PartitionSpec of every leaf of a tree, in a tree of the same structure.

    Scalars, leaves of one element or of fewer than `min_size`, and leaves that are not arrays get `P()`. A mesh axis
    that only the defaults of PartitionAxis name, and that the mesh lacks, counts as an axis of size 1.

    Args:
        rules: A table, a PartitionRules, or names of mesh axes such as "fsdp" (see PartitionRules).
        tree: An nnx.State, pure dict or optax state; leaves are arrays or ShapeDtypeStructs.
        mesh: Checks axis names and sizes against this mesh. Required for rules such as "fsdp".
        axes: The mesh axes of each logical axis; by default the axes of `rules`.
        min_size: Arrays of fewer elements are replicated.
        on_mismatch: For specs that do not fit (longer than the rank, a mesh axis twice, an axis that the mesh lacks, a
            dim that is not divisible): "error"; "warn" and "drop" leave these axes out, with or without one warning.
        dropped: A list that receives a finding for every axis that was left out, and for every array that rules such
            as "fsdp" leave replicated because none of their dims is divisible.

    Raises:
        ShardingError: Leaves without a rule, or specs that do not fit. Lists all of them.

    Example:
        >>> rules = [("kernel", ("embed", "mlp")), (".*", ())]
        >>> fm.match_partition_rules(rules, {"bias": np.ones(8), "kernel": np.ones((8, 8))})
        {'bias': P(), 'kernel': P('fsdp', 'tp')}
    """
    rules = as_rules(rules, axes)
    leaves, treedef = jax.tree.flatten(tree)
    shapes = [getattr(leaf, "shape", None) for leaf in leaves]  # a mesh is not an array: its shape is a dict
    key = (treedef, tuple([shape if isinstance(shape, tuple) else None for shape in shapes]), mesh, min_size)
    match = rules._matches.get(key)
    if match is None:
        match = rules._matches[key] = match_leaves(rules, named_leaves(tree), mesh=mesh, min_size=min_size)
        while len(rules._matches) > _MATCHES_KEPT:
            rules._matches.pop(next(iter(rules._matches)))
    apply_policy(match.findings, on_mismatch, dropped)
    if dropped is not None:
        dropped += match.replicated
    return jax.tree.unflatten(treedef, match.specs)


def as_rules(rules: Rules, axes: PartitionAxis | None = None, layers: Sequence[str] = ()) -> PartitionRules:
    """`rules` as PartitionRules, resolved through `axes` if given; `layers` is the default for rules without layers."""
    if not isinstance(rules, PartitionRules):
        return PartitionRules(rules, axes or DEFAULT_AXES, layers)
    if axes is None and (rules.layers or not layers):
        return rules
    return PartitionRules(rules.table, axes or rules.axes, rules.layers or layers)


def match_leaves(
    rules: PartitionRules,
    leaves: Sequence[tuple[str, object]],
    *,
    mesh: Mesh | AbstractMesh | None = None,
    min_size: int = 0,
) -> RuleMatch:
    """Specs for (path, leaf) pairs. Unmatched leaves raise; axes that do not fit are left out and listed."""
    rules = rules.without_single_layers(leaves)
    specs, findings, kept, unmatched = [], [], [], []
    replicated, decided = PartitionSpec(), {}
    kind_of = kinds_of_paths(rules._compiled, rules.layers)  # each kind of layer is matched once
    for path, leaf in leaves:
        shape = getattr(leaf, "shape", None)
        if not shape or not isinstance(shape, tuple):  # objects that are not arrays may have any `shape`
            specs.append(replicated)
            continue
        key = (kind_of(path), shape)
        if key in decided:
            specs.append(decided[key])
            continue
        spec, problems = replicated, []
        if not needs_no_rule(rules, path, shape, min_size):
            index = rules.find(path)
            if index is None:
                unmatched.append(f"{path} {tuple(shape)}")  # raised after the loop, with all others
                continue
            if isinstance(dims := rules.table[index][1], LargestDim):
                spec, problem = _split_largest_dim(path, shape, dims.mesh_axes, mesh, rules.stack(path) is not None)
                if problem:  # reported per leaf, so it is not cached
                    kept.append(problem)
                    specs.append(spec)
                    continue
            else:
                spec, problems = _fit_rule(rules, index, path, shape, mesh)
        findings += problems
        if not problems:  # mismatches are reported per leaf, so they are not cached
            decided[key] = spec
        specs.append(spec)
    if unmatched:
        repair = "Add rules for them, or end the table with ('.*', ())."
        lines = at_most([f"Partition rule not found for param: {line}" for line in group_lines(unmatched)])
        raise ShardingError("\n".join([*lines, repair, *_finding_lines(findings)]))
    return RuleMatch(specs, findings, kept)


def _split_largest_dim(
    path: str, shape: Sequence[int], axes: Sequence[str], mesh: Mesh | AbstractMesh | None, stacked: bool
) -> tuple[PartitionSpec, Finding | None]:
    """The spec that splits the largest divisible dim over `axes`; of equal dims the last.

    The layer dim of a `stacked` array is never split. If no dim is divisible by the product of all `axes`, the last
    axes are left out, and the finding reports it.
    """
    if mesh is None:
        rule = "+".join(axes)
        raise ShardingError(f"rules={rule!r} depend on the sizes of the mesh: pass mesh=.")
    if unknown := [axis for axis in axes if axis not in mesh.axis_names]:
        raise ShardingError(
            f"rules={'+'.join(axes)!r} must name axes of the mesh {dict(mesh.shape)}, which lacks {unknown}. Use "
            f"{' or '.join(repr(name) for name in mesh.axis_names)}, several joined by '+'."
        )
    order = sorted(range(1 if stacked else 0, len(shape)), key=lambda dim: (shape[dim], dim), reverse=True)
    for end in range(len(axes), 0, -1):
        spec = split_first_dim(shape, PartitionSpec(), mesh, axes[:end], order)
        if spec is not None and all(mesh.shape[axis] == 1 for axis in axes[end:]):
            return spec, None
        if spec is not None:
            break
    else:
        spec, end = PartitionSpec(), 0
    ways = prod(mesh.shape[axis] for axis in axes)
    problem = f"no dim of {tuple(shape)} is divisible by {ways} (axes {'+'.join(axes)})"
    repair = f"It is split over {'+'.join(axes[:end])} alone" if end else "It stays replicated"
    return spec, Finding(path, problem, repair)


def idle_axes(rules: PartitionRules, mesh: Mesh | AbstractMesh, stages: str = "") -> str:
    """One line if axes of the mesh have no work: neither rules such as "fsdp" nor a batch use them.

    `stages` is the axis of a pipeline.
    """
    used = {name for logical in ("batch", "sequence") for name in rules.axes.mesh_axes(logical)}
    used |= {name for _, dims in rules.table if isinstance(dims, LargestDim) for name in dims.mesh_axes} | {stages}
    idle = [name for name, size in mesh.shape.items() if size > 1 and name not in used]
    if not idle or not all(isinstance(dims, LargestDim) for _, dims in rules.table):
        return ""
    return (
        f"{axes_text(mesh.shape, idle)} of the mesh has no work, since neither the rules nor the batch use it: devices "
        "along it compute the same. Add its devices to another axis, or use a rule table that names it"
    )


def split_first_dim(
    shape: Sequence[int], spec: PartitionSpec, mesh: Mesh | AbstractMesh, axes: Sequence[str], order: Iterable[int]
) -> PartitionSpec | None:
    """`spec`, in which the first divisible dim of `order` is split over `axes` too; None if no dim is divisible."""
    entries = [as_tuple(entry) for entry in (*spec, *[None] * (len(shape) - len(spec)))]
    ways = prod(mesh.shape[axis] for axis in axes)
    for dim in order:
        if shape[dim] % (ways * prod(mesh.shape[axis] for axis in entries[dim])) == 0:
            entries[dim] = (*entries[dim], *axes)
            return PartitionSpec(*map(as_entry, entries))
    return None


def needs_no_rule(rules: PartitionRules, path: str, shape: Sequence[int], min_size: int = 0) -> bool:
    """Whether the array at `path` is replicated without a rule: it has one element (a layer, in a stack), or few."""
    return prod(shape[1:] if rules.stack(path) else shape) <= 1 or prod(shape) < min_size


def _fit_rule(
    rules: PartitionRules, index: int, path: str, shape: Sequence[int], mesh: Mesh | AbstractMesh | None
) -> tuple[PartitionSpec, list[Finding]]:
    """`fit_spec` of rule `index`, and a finding for each mesh axis that two of its dims resolve to."""
    _, written, lost = rules._compiled[index]
    spec, dims = rules.spec(index, path), rules.table[index][1]
    optional = frozenset() if isinstance(dims, PartitionSpec) else rules.axes.default_names
    fitting, findings = fit_spec(path, shape, spec, mesh, rules.table[index], len(spec) - len(written), optional)
    return fitting, [*findings, *(lost_finding(path, axis) for axis in lost)]


def fit_spec(
    path: str,
    shape: Sequence[int],
    spec: PartitionSpec,
    mesh: Mesh | AbstractMesh | None,
    rule: tuple[str, Dims] | None = None,
    layer_dims: int = 0,
    optional: Collection[str] = (),
) -> tuple[PartitionSpec, list[Finding]]:
    """The part of `spec` that fits an array of `shape` on `mesh`, and a finding for each axis that does not.

    Findings name the `rule` that the spec comes from, and count dims as the rule does: without the `layer_dims` that a
    stack of layers has in front. Axes of `optional` that the mesh lacks are left out without a finding.
    """
    of_rule = f" of rule {rule[0]!r}" if rule else ""
    findings, dims, taken = [], [], set()
    if len(spec) > len(shape):
        owner = "one layer of the array" if layer_dims else "the array"
        written, rank = PartitionSpec(*spec[layer_dims:]), len(shape) - layer_dims
        problem = f"spec {written}{of_rule} has {len(written)} dims, {owner} {tuple(shape)} has {rank}"
        findings.append(Finding(path, problem, "Give the spec at most as many dims as the array"))
    for dim, (size, entry) in enumerate(zip(shape, spec, strict=False)):
        if entry is PartitionSpec.UNCONSTRAINED:
            dims.append(entry)
            continue
        kept, in_rule = [], f"dim {dim - layer_dims}{of_rule}"
        for axis in as_tuple(entry):
            if axis in taken:
                where = "twice" if axis in kept else "that an earlier dim uses already"
                problem = f"{in_rule} uses mesh axis {axis!r} {where}"
                findings.append(Finding(path, problem, f"Map {in_rule} to another axis or to None"))
            elif mesh is not None and axis not in mesh.axis_names:
                if axis not in optional:
                    problem = f"{in_rule} names mesh axis {axis!r}, which the mesh {dict(mesh.shape)} lacks"
                    findings.append(Finding(path, problem, f"Add {axis!r} to the mesh, with size 1 if need be"))
            else:
                kept.append(axis)
                taken.add(axis)
        ways = prod(mesh.shape[a] for a in kept) if mesh is not None else 1
        if mesh is not None and size % ways:
            counted = f"dim {dim}" + (f" (dim {dim - layer_dims} of a layer)" if layer_dims else "")
            of = axes_text(mesh.shape, kept)
            problem = f"{counted} has size {size}, not divisible by {ways} (axes {tuple(kept)} of {of})"
            repair = f"Use a mesh where {'*'.join(kept)} divides {size}, or map {in_rule} to None"
            logical = rule[1] if rule and not isinstance(rule[1], PartitionSpec | LargestDim) else None
            if logical and len(logical) == len(spec) - layer_dims:
                name = logical[dim - layer_dims]
                repair += f", or {name!r} by PartitionAxis(extra={{{name!r}: None}})"
            findings.append(Finding(path, problem, repair))
            kept = []
        dims.append(as_entry(kept))
    return PartitionSpec(*dims), findings


def apply_policy(
    findings: Iterable[Finding], on_mismatch: Policy, dropped: list[Finding] | None = None, *, stacklevel: int = 4
) -> None:
    """Raise an error or warn for all findings, or accept them; `dropped` receives the accepted findings.

    A warning names the line that calls a public function with `check_types`, the caller of this function.
    """
    if not isinstance(on_mismatch, str) or on_mismatch not in ("error", "warn", "drop"):
        raise ValueError(f"on_mismatch must be 'error', 'warn' or 'drop', got {shown(on_mismatch)}.")
    findings = list(findings)
    text = "\n".join(_finding_lines(findings))
    if findings and on_mismatch == "error":
        raise ShardingError(text)
    if findings and on_mismatch == "warn":
        warnings.warn(f"left out of the sharding:\n{text}", stacklevel=stacklevel)
    if dropped is not None:
        dropped += findings


def group_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Findings that differ only in the number of a layer as one, in the order of the first."""
    groups = group_paths([finding.path for finding in findings], [finding[1:] for finding in findings])
    return [findings[indices[0]]._replace(path=pattern) for pattern, indices in groups]


def _finding_lines(findings: Sequence[Finding]) -> list[str]:
    return at_most([f"{finding}." for finding in group_findings(findings)])


def lost_finding(path: str, lost: Lost) -> Finding:
    problem = f"dim {lost.dim} ({lost.logical!r}) resolves to mesh axis {lost.mesh_axis!r}, which an earlier dim uses"
    return Finding(path, problem, f"Map one of the two to None, or {lost.logical!r} to another axis")
