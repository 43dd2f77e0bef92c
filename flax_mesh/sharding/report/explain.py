"""What a rule table makes of a model on a mesh: every array with its rule, and everything that looks wrong at once."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from flax_mesh.axes import DEFAULT_AXES, PartitionAxis, as_tuple, dims_text
from flax_mesh.sharding.abstract import ATTRIBUTE, abstract_model, lay_out, model_layers, partition_rules
from flax_mesh.sharding.annotations import annotations_of, match_annotations
from flax_mesh.sharding.optimizer import match_optimizer
from flax_mesh.sharding.report.account import analyze_sharding_strategy
from flax_mesh.sharding.report.audit import LARGE, Audit, RuleUse, audit_rules, complete, large_whole
from flax_mesh.sharding.report.fingerprint import sharding_fingerprint
from flax_mesh.sharding.report.report import RULE_HEADS, ArrayReport, ShardingReport, report_page
from flax_mesh.sharding.rules import Finding, PartitionRules, Rules, as_rules, group_findings, needs_no_rule
from flax_mesh.text import count_text, table_text
from flax_mesh.tree import named_leaves, owner_of


class Explanation(NamedTuple):
    """`report` covers model and optimizer; `carried`: the table, or its annotations, are the model's own."""

    report: ShardingReport
    rules: tuple[RuleUse, ...]
    carried: bool
    findings: tuple[Finding, ...]
    axes: PartitionAxis
    fingerprint: str  # of model and optimizer, see `sharding_fingerprint`
    note: str = ""  # on the mesh
    replicated: tuple[Finding, ...] = ()  # arrays of which rules such as "fsdp" could split no dim

    def to_text(self, *, width: int = 100) -> str:
        """Mesh, rules, arrays, totals and findings in lines of at most `width` columns, findings aside."""
        rows, count = self._rule_rows(), len(self.findings)
        whose = "the model's own" if self.carried else "as given"
        rules = f"rules: {whose}; the first that matches a path decides" if rows else "no table: the model is annotated"
        return "\n".join(
            [
                f"{self.report.mesh_line}; fingerprint {self.fingerprint[:12]}",
                *([self.note] if self.note else []),
                "",
                rules,
                *([table_text(RULE_HEADS, rows, width, right={"rule"})] if rows else []),
                "",
                self.report.to_text(width=width, mesh=False),
                "",
                *(f"- {finding}" for finding in self.replicated),
                *([""] if self.replicated else []),
                f"{count_text(count, 'finding')}:" if count else "no findings",
                *(f"- {finding}" for finding in self.findings),
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data for `json.dumps`, every array on its own."""
        rules = [
            {"pattern": use.pattern, "dims": dims_text(use.dims), "arrays": use.arrays, "shadowed_by": use.shadowed_by}
            for use in self.rules
        ]
        findings = [finding._asdict() for finding in self.findings]
        replicated = [finding._asdict() for finding in self.replicated]
        return {
            "findings": findings,
            "replicated": replicated,
            "fingerprint": self.fingerprint,
            "rules": rules,
            **self.report.to_dict(),
        }

    def to_html(self, *, title: str = "sharding") -> str:
        """The same as one HTML file without external resources, with a picture of who holds which piece."""
        return report_page(
            self.report, title, self.note, self._rule_rows(), [str(finding) for finding in self.findings]
        )

    def _rule_rows(self) -> list[list[str]]:
        return [[str(i), use.pattern, dims_text(use.dims), str(use)] for i, use in enumerate(self.rules, start=1)]


def explain_sharding(
    make: Callable[[], Any],
    mesh: Mesh | AbstractMesh,
    rules: Rules | None = None,
    *,
    axes: PartitionAxis | None = None,
    shard_optimizer_over: str | tuple[str, ...] = (),
    large: int = LARGE,
) -> Explanation:
    """As `abstract_state` of the same arguments and its report, but what does not fit is listed, not raised.

    Findings: those of `audit_rules` on the model, rules that match nothing not counted in a table that the model
    carries, which serves all its variants; those of `match_optimizer` on the optimizer; and arrays of `large` bytes or
    more that belong to no parameter and stay whole. In the figures, arrays lie as far as their rules fit, and are whole
    for the rest. Nothing is allocated, no backend is initialised for an AbstractMesh.
    """
    made = abstract_model(make)
    parts = made if isinstance(made, dict) else {"model": made}
    model, optimizer = parts["model"], parts.get("optimizer")
    if rules is None and not hasattr(model, ATTRIBUTE) and annotations_of(nnx.state(model)):
        table, audit = None, _audit_annotations(nnx.state(model), mesh, axes or DEFAULT_AXES, large)
    else:
        table = as_rules(partition_rules(model) if rules is None else rules, axes, model_layers(model))
        audit = audit_rules(table, nnx.state(model), mesh, large=large, unused=rules is not None)
    state, findings = {"model": lay_out(nnx.state(model), audit.specs, mesh)}, list(audit.findings)
    if optimizer is not None:
        over, rest = as_tuple(shard_optimizer_over), complete(table or PartitionRules([]))
        match = match_optimizer(optimizer, model, audit.specs, rest, mesh, over=over)
        state["optimizer"] = lay_out(nnx.state(optimizer), match.specs, mesh)
        nobodys = _large_of_nobody(state["model"], state["optimizer"], match.specs, mesh, large)
        findings += group_findings([*match.findings, *nobodys])
    report = _with_rules(analyze_sharding_strategy(state), table, nnx.state(model))
    used_axes = table.axes if table else axes or DEFAULT_AXES
    fingerprint = sharding_fingerprint(nnx.State(state) if optimizer is not None else state["model"])
    return Explanation(
        report,
        tuple(audit.uses),
        rules is None,
        tuple(findings),
        used_axes,
        fingerprint,
        replicated=tuple(audit.replicated),
    )


def _audit_annotations(state: nnx.State, mesh: Mesh | AbstractMesh, axes: PartitionAxis, large: int) -> Audit:
    match, leaves = match_annotations(state, mesh, axes), named_leaves(state)
    whole = large_whole(leaves, match.specs, mesh, large, stacks=[False] * len(leaves))
    return Audit(match.specs, [], group_findings([*match.findings, *whole]), [])


def _large_of_nobody(
    model: nnx.State, optimizer: nnx.State, specs: list[PartitionSpec], mesh: Mesh | AbstractMesh, large: int
) -> list[Finding]:
    """Large optimizer arrays that stay whole; of those that follow a parameter, its own finding tells."""
    parameters = {path for path, _ in named_leaves(model)}
    leaves = named_leaves(optimizer)
    found = large_whole(leaves, specs, mesh, large, stacks=[False] * len(leaves))
    return [finding for finding in found if owner_of(finding.path, parameters) is None]


def _with_rules(report: ShardingReport, table: PartitionRules | None, model: nnx.State) -> ShardingReport:
    """The report with rule and logical axes of the model's leaves, and without "model/" in their paths."""
    names = {} if table else {path: tuple(dims) for path, dims in annotations_of(model).items()}
    leaves = []
    for leaf in report.leaves:
        if leaf.path.startswith("model/"):
            path = leaf.path.removeprefix("model/")
            rule, logical = _rule_of(table, path, leaf) if table else (None, names.get(path))
            leaf = leaf._replace(path=path, rule=rule, logical=logical)
        leaves.append(leaf)
    return replace(report, leaves=tuple(leaves))


def _rule_of(table: PartitionRules, path: str, leaf: ArrayReport) -> tuple[int | None, tuple[str | None, ...] | None]:
    rule = None if needs_no_rule(table, path, leaf.shape) else table.find(path)
    dims = table.table[rule][1] if rule is not None else None
    if not isinstance(dims, tuple) or isinstance(dims, PartitionSpec):
        return rule, None
    in_front = ("layers",) if table.stack(path) and dims[:1] != ("layers",) else ()
    return rule, (*in_front, *dims)
