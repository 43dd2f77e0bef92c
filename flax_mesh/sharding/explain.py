"""What a rule table makes of a model on a mesh: every array with its rule, and everything that looks wrong at once."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from flax_mesh.axes import DEFAULT_AXES, PartitionAxis
from flax_mesh.errors import ShardingError
from flax_mesh.sharding.annotations import annotations_of, match_annotations
from flax_mesh.sharding.place import abstract_state, partition_rules
from flax_mesh.sharding.report import Leaf, ShardingReport, analyze_sharding_strategy
from flax_mesh.sharding.rules import Finding, PartitionRules, as_rules, match_leaves
from flax_mesh.sharding.table import (
    array_text,
    bytes_text,
    dims_text,
    group_leaves,
    group_paths,
    mesh_line,
    report_data,
    report_text,
    spec_text,
    table_text,
)
from flax_mesh.sharding.tracing import short_tracer_errors
from flax_mesh.tree import named_leaves

LARGE = 2**24  # bytes from which a parameter that stays whole on every device is a finding


class RuleUse(NamedTuple):
    """One rule of the table and how many arrays of the model it decides."""

    pattern: str
    dims: Any  # as written: logical axes, a PartitionSpec, or None
    arrays: int
    shadowed_by: int | None = None  # it decides nothing, because this earlier rule matches wherever it does

    def __str__(self) -> str:
        if self.shadowed_by is not None:
            return f"nothing: rule {self.shadowed_by + 1} comes first"
        return f"{self.arrays:,} array{'s' * (self.arrays != 1)}" if self.arrays else "nothing"


class Explanation(NamedTuple):
    """`report` covers model and optimizer; `carried`: the table is the model's own."""

    report: ShardingReport
    rules: tuple[RuleUse, ...]
    carried: bool
    findings: tuple[Finding, ...]


def explain_sharding(
    make: Callable[[], Any],
    mesh: Mesh | AbstractMesh,
    rules: PartitionRules | Iterable[tuple[str, Any]] | None = None,
    *,
    axes: PartitionAxis | None = None,
    large: int = LARGE,
) -> Explanation:
    """As `abstract_state(make, mesh, rules, axes=axes)` and its report, but what does not fit is listed, not raised.

    Findings: parameters without a rule; specs that are too long, name an axis twice or one that the mesh lacks; dims
    that do not divide; rules that match nothing or only what earlier rules have; parameters of `large` bytes or more
    (of one layer, in a scanned stack) that stay whole while the mesh splits others. Rules that match nothing are no
    finding in a table that the model carries, which serves all its variants. In the figures, arrays lie as far as
    their rules fit, and are whole for the rest. Nothing is allocated, no backend is initialised for an AbstractMesh.
    """
    table, state = _abstract(make, mesh, None if rules is None else as_rules(rules, axes), axes)
    model = state["model"] if "optimizer" in state and "model" in state else state
    parts = {"model": model} | ({} if model is state else {"optimizer": state["optimizer"]})
    report = analyze_sharding_strategy(parts)
    if table is None:
        names = {path: tuple(dims) for path, dims in annotations_of(model).items()}
        report = _with_rules(report, lambda path, leaf: (None, names.get(path)))
        findings = match_annotations(model, mesh, axes or DEFAULT_AXES).findings
        findings += _large_whole(report, None, large)
        return Explanation(report, (), True, tuple(_grouped(findings)))
    parameters = named_leaves(model)
    report = _with_rules(report, lambda path, leaf: _rule_of(table, path, leaf))
    findings = [
        *_unmatched(table, parameters),
        *match_leaves(_complete(table), parameters, mesh=mesh).findings,
        *_large_whole(report, table, large),
    ]
    uses = _uses(table, [path for path, _ in parameters])
    findings = [*_grouped(findings), *_rule_findings(uses, carried=rules is None)]
    return Explanation(report, tuple(uses), rules is None, tuple(findings))


def explanation_text(explanation: Explanation, *, width: int = 100) -> str:
    """Mesh, rules, arrays, totals and findings in lines of at most `width` columns, findings aside."""
    findings = explanation.findings
    rows = [[str(i), use.pattern, dims_text(use.dims), str(use)] for i, use in enumerate(explanation.rules, start=1)]
    whose = "the model's own" if explanation.carried else "the recipe's"
    count = f"{len(findings)} finding{'s' * (len(findings) != 1)}:" if findings else "no findings"
    return "\n".join(
        [
            mesh_line(explanation.report),
            "",
            f"rules: {whose}; the first that matches a path decides" if rows else "no table: the model is annotated",
            *([table_text(["rule", "pattern", "dims", "decides"], rows, width, right={"rule"})] if rows else []),
            "",
            report_text(explanation.report, width=width, mesh=False),
            "",
            count,
            *(f"- {finding}" for finding in findings),
        ]
    )


def explanation_data(explanation: Explanation) -> dict[str, Any]:
    """The same as plain data for `json.dumps`, every array on its own."""
    rules = [
        {"pattern": use.pattern, "dims": dims_text(use.dims), "arrays": use.arrays, "shadowed_by": use.shadowed_by}
        for use in explanation.rules
    ]
    findings = [finding._asdict() for finding in explanation.findings]
    return {"findings": findings, "rules": rules, **report_data(explanation.report)}


def golden_text(report: ShardingReport) -> str:
    """Path, array, split and bytes per device, a line each: a change of a sharding shows in a diff of two of these."""
    lines = [mesh_line(report)]
    for path, members in group_leaves(report.leaves):
        leaf = report.leaves[members[0]]
        lines.append(f"{path}  {array_text(leaf)}  {spec_text(leaf)}  {leaf.device_bytes:,} B")
    return "\n".join([*lines, f"state per device {max(report.memory_per_device.values()):,} B", ""])


def _abstract(
    make: Callable[[], Any], mesh: Any, rules: PartitionRules | None, axes: PartitionAxis | None
) -> tuple[PartitionRules | None, Any]:
    """The table, None for a model that is annotated instead, and the abstract state; by one trace if all is well."""
    seen: list[PartitionRules] = [] if rules is None else [rules]

    def recorded() -> Any:
        made = make()
        model = made[0] if isinstance(made, tuple) else made
        if not seen and hasattr(model, "partition_rules"):
            seen.append(as_rules(partition_rules(model), axes))
        return made

    with short_tracer_errors():
        try:
            state = abstract_state(recorded, mesh, rules, axes=axes, on_mismatch="drop")
        except ShardingError:
            if not seen:
                raise
            # Some leaf has no rule. With one added for it the rest is known as well.
            state = abstract_state(make, mesh, _complete(seen[0]), on_mismatch="drop")
    return (seen[0] if seen else None), state


def _complete(rules: PartitionRules) -> PartitionRules:
    return PartitionRules((*rules.table, (".*", ())), rules.axes, rules.layers)


def _with_rules(report: ShardingReport, rule_of: Callable[[str, Leaf], tuple[int | None, Any]]) -> ShardingReport:
    """The report with rule and logical axes of the model's leaves, and without "model/" in their paths."""
    leaves = []
    for leaf in report.leaves:
        if leaf.path.startswith("model/"):
            path = leaf.path.removeprefix("model/")
            rule, logical = rule_of(path, leaf)
            leaf = leaf._replace(path=path, rule=rule, logical=logical)
        leaves.append(leaf)
    return replace(report, leaves=tuple(leaves))


def _rule_of(table: PartitionRules, path: str, leaf: Leaf) -> tuple[int | None, tuple[str | None, ...] | None]:
    rule = table.find(path) if math.prod(leaf.shape) > 1 else None
    dims = table.table[rule][1] if rule is not None else None
    if dims is None or isinstance(dims, PartitionSpec):
        return rule, None
    in_front = ("layers",) if table.stack(path) and dims[:1] != ("layers",) else ()
    return rule, (*in_front, *dims)


def _unmatched(table: PartitionRules, parameters: Sequence[tuple[str, Any]]) -> list[Finding]:
    found = []
    for path, leaf in parameters:
        if table.find(path) is None:
            try:
                match_leaves(table, [(path, leaf)])  # scalars need no rule
            except ShardingError:
                problem = f"no rule matches this array {tuple(leaf.shape)}, counted as whole"
                found.append(Finding(path, problem, "Add a rule for it, or end the table with ('.*', ())"))
    return found


def _large_whole(report: ShardingReport, table: PartitionRules | None, large: int) -> list[Finding]:
    parameters = [leaf for leaf in report.leaves if leaf.kind == "parameter"]
    if all(math.prod(leaf.pieces) == 1 for leaf in parameters):
        return []  # plain data parallelism: copies are what was asked for
    found = []
    for leaf in parameters:
        per_layer = leaf.total_bytes // (leaf.shape[0] if table is not None and table.stack(leaf.path) else 1)
        if math.prod(leaf.pieces) == 1 and per_layer >= large:
            problem = f"{bytes_text(per_layer)} stay whole on each of {leaf.num_devices} devices"
            repair = f"Split a dim in its rule, if that is not meant (a finding from {bytes_text(large)} on)"
            found.append(Finding(leaf.path, problem, repair))
    return found


def _uses(table: PartitionRules, paths: Sequence[str]) -> list[RuleUse]:
    decided = [table.find(path) for path in paths]
    uses = []
    for index, (pattern, dims) in enumerate(table.table):
        arrays = decided.count(index)
        regex = re.compile(pattern)
        earlier = [d for d, path in zip(decided, paths, strict=True) if d is not None and regex.search(path)]
        uses.append(RuleUse(pattern, dims, arrays, min(earlier) if earlier and not arrays else None))
    return uses


def _rule_findings(uses: Sequence[RuleUse], carried: bool) -> list[Finding]:
    found = []
    for number, use in enumerate(uses, start=1):
        if use.arrays:
            continue
        where = f"rule {number}, {use.pattern!r}"
        if use.shadowed_by is not None:
            problem = f"decides no array: rule {use.shadowed_by + 1}, {uses[use.shadowed_by].pattern!r}, comes first"
            found.append(Finding(where, problem, "Move it before that rule, or delete it"))
        elif not carried:
            found.append(Finding(where, "matches no array of the model", "Correct its pattern, or delete it"))
    return found


def _grouped(findings: Sequence[Finding]) -> list[Finding]:
    """Findings that differ only in the number of a layer as one, in the order of the first."""
    groups = group_paths([finding.path for finding in findings], [finding[1:] for finding in findings])
    return [findings[indices[0]]._replace(path=pattern) for pattern, indices in groups]
