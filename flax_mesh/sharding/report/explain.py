"""Report on a model, a rule table and a mesh: every array with its rule and spec, and all findings."""

from collections.abc import Container
from dataclasses import replace
from typing import Any, NamedTuple

from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from flax_mesh.axes import DEFAULT_AXES, PartitionAxis, as_tuple, dims_text
from flax_mesh.fields import check_types
from flax_mesh.html import html_frame
from flax_mesh.sharding.abstract import (
    ATTRIBUTE,
    Make,
    abstract_split,
    has_optimizer,
    lay_out,
    model_layers,
    partition_rules,
)
from flax_mesh.sharding.annotations import annotations_of, followers, match_annotations, with_followers
from flax_mesh.sharding.memory import optimizer_memory_kinds
from flax_mesh.sharding.optimizer import match_optimizer
from flax_mesh.sharding.report.account import analyze_sharding_strategy
from flax_mesh.sharding.report.audit import LARGE, Audit, RuleUse, audit_rules, complete, large_replicated
from flax_mesh.sharding.report.fingerprint import sharding_fingerprint
from flax_mesh.sharding.report.report import ArrayReport, ShardingReport, report_page
from flax_mesh.sharding.rules import Finding, PartitionRules, Rules, as_rules, group_findings, needs_no_rule
from flax_mesh.text import Table, count_text, plain_data
from flax_mesh.tree import PyTree, model_state, named_leaves, owners_of


class Explanation(NamedTuple):
    """`report` covers model and optimizer. `carried` is True if the rules or annotations come from the model."""

    report: ShardingReport
    rules: tuple[RuleUse, ...]
    carried: bool
    findings: tuple[Finding, ...]
    axes: PartitionAxis
    fingerprint: str  # of model and optimizer, see `sharding_fingerprint`
    note: str = ""  # remark on the mesh
    replicated: tuple[Finding, ...] = ()  # arrays without a dim that rules such as "fsdp" could split

    def to_text(self, *, width: int = 100) -> str:
        """Mesh, rules, arrays, totals and findings as text. Lines have at most `width` columns, except findings."""
        table, count = self._rule_table(), len(self.findings)
        source = "from the model" if self.carried else "as passed"
        rules = (
            f"rules {source}; the first that matches a path applies"
            if table.rows
            else "no table: the model is annotated"
        )
        return "\n".join(
            [
                f"{self.report.mesh_line}; fingerprint {self.fingerprint[:12]}",
                *([self.note] if self.note else []),
                "",
                rules,
                *([table.to_text(width)] if table.rows else []),
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
        """The content of `to_text` as plain data for `json.dumps`, with one entry per array."""
        rules = [
            {"pattern": use.pattern, "dims": dims_text(use.dims), "arrays": use.arrays, "shadowed_by": use.shadowed_by}
            for use in self.rules
        ]
        return {
            "findings": plain_data(self.findings),
            "replicated": plain_data(self.replicated),
            "fingerprint": self.fingerprint,
            "rules": rules,
            **self.report.to_dict(),
        }

    def to_html(self, *, title: str = "sharding") -> str:
        """The content of `to_text` as one HTML file without external resources, with a drawing of the shards."""
        return report_page(self.report, title, self.note, self._rule_table(), self.findings)

    def _repr_html_(self) -> str:
        return html_frame(self.to_html())

    def _rule_table(self) -> Table:
        rows = [[str(i), use.pattern, dims_text(use.dims), str(use)] for i, use in enumerate(self.rules, start=1)]
        return Table(("rule", "pattern", "dims", "applies to"), rows, right={"rule"})


@check_types
def explain_sharding(
    make: Make,
    mesh: Mesh | AbstractMesh,
    rules: Rules | None = None,
    *,
    axes: PartitionAxis | None = None,
    shard_optimizer_over: str | tuple[str, ...] = (),
    optimizer_memory: str = "device",
    large: int = LARGE,
) -> Explanation:
    """Reports how a rule table shards a model and its optimizer on a mesh, and lists everything that looks wrong.

    The arguments are the same as in `abstract_state`. Where `abstract_state` raises an error, this function returns
    findings, and computes the figures without the mesh axes that do not fit. Nothing is allocated, and an AbstractMesh
    requires no backend: a model of 405 billion parameters on 4,096 devices takes seconds.

    Findings are the findings of `audit_rules`, optimizer arrays that cannot follow their parameter, and large optimizer
    arrays without a parameter that are replicated. Rules that match nothing are findings only in a table that is
    passed: the table of a model class is made for all variants of the model.

    Args:
        make: Function without arguments that returns a model or (model, optimizer).
        mesh: Mesh or AbstractMesh.
        rules: PartitionRules, pairs (pattern, dims), or mesh axes such as "fsdp" over which the largest dim of every
            array is split. Default: the table or the annotations of the model.
        axes: Maps logical axes to mesh axes. Default: the axes of the rules or of the model.
        shard_optimizer_over: Mesh axes over which the optimizer state is sharded in addition (ZeRO stage 1).
        optimizer_memory: Where the optimizer state is stored between steps, as in `abstract_state`.
        large: Size in bytes, per layer in a scanned stack, from which a replicated array is a finding. Default: 16 MiB.

    Returns:
        An `Explanation` with the `report` on all arrays, the use of every rule, the `findings`, the arrays that rules
        such as "fsdp" leave `replicated`, and the fingerprint. Print it with `to_text()`; `to_dict()` and `to_html()`
        return it for JSON and as an HTML page.

    Raises:
        ShardingError: The rules are invalid by themselves, or the model has neither rules nor annotations.

    Example:
        >>> make = lambda: nnx.Linear(64, 250, rngs=nnx.Rngs(0))
        >>> mesh = jax.sharding.AbstractMesh((2, 4), ("fsdp", "tp"))
        >>> explanation = fm.explain_sharding(make, mesh, [("kernel", ("embed", "mlp")), ("bias", ())])
        >>> [(finding.path, finding.problem) for finding in explanation.findings]
        [('kernel', "dim 1 has size 250, not divisible by 4 (axes ('tp',) of tp=4)")]
        >>> explanation.report.memory_per_device[0]  # the kernel is sharded over fsdp only
        33000
    """
    graphdef, state = abstract_split(make, mesh)
    modules = nnx.merge(graphdef, state)
    over = as_tuple(shard_optimizer_over)
    return _explain(modules, state, mesh, rules, axes, over, optimizer_memory, large)


def _explain(
    modules: PyTree,
    state: nnx.State,
    mesh: Mesh | AbstractMesh,
    rules: Rules | None,
    axes: PartitionAxis | None,
    over: tuple[str, ...],
    memory: str,
    large: int,
) -> Explanation:
    model, optimizer = (modules["model"], modules["optimizer"]) if has_optimizer(modules) else (modules, None)
    arrays, default = model_state(state) if optimizer is not None else state, axes or DEFAULT_AXES
    kinds = optimizer_memory_kinds(state, mesh, memory)
    if rules is None and not hasattr(model, ATTRIBUTE) and annotations_of(arrays):
        table, audit = None, _audit_annotations(arrays, mesh, default, large)
    else:
        table = as_rules(partition_rules(model) if rules is None else rules, axes, model_layers(model))
        table = table.without_single_layers(named_leaves(arrays), model)
        audit = audit_rules(table, arrays, mesh, large=large, unused=rules is not None)
    parts, findings = {"model": lay_out(arrays, audit.specs, mesh)}, list(audit.findings)
    if optimizer is not None:
        fallback = complete(table or PartitionRules([]))
        annotated = None if table else match_annotations(state["optimizer"], mesh, default)
        match = match_optimizer(optimizer, arrays, audit.specs, fallback, mesh, over=over, annotated=annotated)
        parts["optimizer"] = lay_out(state["optimizer"], match.specs, mesh, kinds[-len(match.specs) :])
        without_parameter = _large_without_parameter(parts["model"], parts["optimizer"], match.specs, mesh, large)
        findings += group_findings([*match.findings, *without_parameter])
    report = _with_rules(analyze_sharding_strategy(parts), table, arrays)
    if optimizer is not None:
        report = replace(report, gradient_bytes=_gradient_bytes(report, nnx.filter_state(arrays, optimizer.wrt)))
    fingerprint = sharding_fingerprint(nnx.State(parts) if optimizer is not None else parts["model"])
    uses, problems, replicated = tuple(audit.uses), tuple(findings), tuple(audit.replicated)
    used_axes = table.axes if table else default
    return Explanation(report, uses, rules is None, problems, used_axes, fingerprint, replicated=replicated)


def _audit_annotations(state: nnx.State, mesh: Mesh | AbstractMesh, axes: PartitionAxis, large: int) -> Audit:
    match, leaves = match_annotations(state, mesh, axes), named_leaves(state)
    specs = with_followers(state, followers(state), match.specs)
    replicated = large_replicated(leaves, specs, mesh, large, stacks=[False] * len(leaves))
    return Audit(specs, [], group_findings([*match.findings, *replicated]), [])


def _large_without_parameter(
    model: nnx.State, optimizer: nnx.State, specs: list[PartitionSpec], mesh: Mesh | AbstractMesh, large: int
) -> list[Finding]:
    """Findings for large replicated optimizer arrays. The finding on a parameter covers its optimizer arrays."""
    parameters = {path for path, _ in named_leaves(model)}
    leaves = named_leaves(optimizer)
    findings = large_replicated(leaves, specs, mesh, large, stacks=[False] * len(leaves))
    owned = owners_of([path for path, _ in leaves], parameters)
    return [finding for finding in findings if finding.path not in owned]


def _with_rules(report: ShardingReport, table: PartitionRules | None, model: nnx.State) -> ShardingReport:
    """The report with the rules and logical axes of the model's leaves, and without "model/" in their paths."""
    names = {} if table else {path: tuple(dims) for path, dims in annotations_of(model).items()}
    leaves, following = [], followers(model)
    for leaf in report.leaves:
        if leaf.path.startswith("model/"):
            path = leaf.path.removeprefix("model/")
            rule, logical = _rule_of(table, path, leaf, following) if table else (None, names.get(path))
            leaf = leaf._replace(path=path, rule=rule, logical=logical)
        leaves.append(leaf)
    return replace(report, leaves=tuple(leaves))


def _gradient_bytes(report: ShardingReport, trained: nnx.State) -> int:
    """Bytes per device of the gradients of the trained parameters, all of which are on the mesh of the model."""
    paths = {path for path, _ in named_leaves(trained)}
    return sum(leaf.device_bytes for leaf in report.leaves if leaf.path in paths)


def _rule_of(
    table: PartitionRules, path: str, leaf: ArrayReport, following: Container[str]
) -> tuple[int | None, tuple[str | None, ...] | None]:
    rule = None if path in following or needs_no_rule(table, path, leaf.shape) else table.find(path)
    dims = table.table[rule][1] if rule is not None else None
    if not isinstance(dims, tuple) or isinstance(dims, PartitionSpec):
        return rule, None
    in_front = ("layers",) if table.stack(path) and dims[:1] != ("layers",) else ()
    return rule, (*in_front, *dims)
