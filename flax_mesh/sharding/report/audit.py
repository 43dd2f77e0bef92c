"""Audit of a rule table against a tree of arrays: reports all mismatches and suspicious rules at once."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from flax_mesh.axes import PartitionAxis, as_tuple
from flax_mesh.fields import check_types
from flax_mesh.sharding.annotations import followers, with_followers
from flax_mesh.sharding.rules import (
    Finding,
    PartitionRules,
    Rules,
    as_rules,
    group_findings,
    match_leaves,
    needs_no_rule,
)
from flax_mesh.sharding.table import Dims
from flax_mesh.text import bytes_text, count_text
from flax_mesh.tree import PyTree, Shaped, named_leaves

LARGE = 2**24  # bytes: an array of this size or larger that is replicated on all devices is a finding


class RuleUse(NamedTuple):
    pattern: str
    dims: Dims  # as written: logical axes, a PartitionSpec, or None
    arrays: int  # number of arrays that the rule applies to
    shadowed_by: int | None = None  # index of an earlier rule that matches first, if the rule applies to no array

    def __str__(self) -> str:
        if self.shadowed_by is not None:
            return f"nothing: rule {self.shadowed_by + 1} matches first"
        return count_text(self.arrays, "array") if self.arrays else "nothing"


class Audit(NamedTuple):
    """`specs` are in the order of `jax.tree.leaves`. Mesh axes that do not fit are left out of them."""

    specs: list[PartitionSpec]
    uses: list[RuleUse]
    findings: list[Finding]
    replicated: list[Finding]  # arrays without a dim that rules such as "fsdp" could split


@check_types
def audit_rules(
    rules: Rules,
    tree: PyTree,
    mesh: Mesh | AbstractMesh,
    *,
    axes: PartitionAxis | None = None,
    large: int = LARGE,
    unused: bool = True,
) -> Audit:
    """Returns all errors of `match_partition_rules(rules, tree, mesh=mesh, axes=axes)` as findings, and more.

    Findings are leaves without a rule; specs that are too long, use a mesh axis twice or name one that the mesh lacks;
    dims that are not divisible; arrays of `large` bytes or more (per layer, in a scanned stack) that are replicated
    while others are sharded; rules that apply to nothing because an earlier one matches first; and, if `unused`, rules
    that match nothing. Layers with the same mismatch share one finding. `apply_policy(audit.findings, "error")` raises
    all of them as one ShardingError.

    Example:
        >>> from flax_mesh.sharding import audit_rules
        >>> mesh = jax.sharding.AbstractMesh((2, 4), ("fsdp", "tp"))
        >>> audit = audit_rules([("kernel", ("embed", "mlp"))], {"kernel": np.ones((8, 6))}, mesh)
        >>> [finding.path for finding in audit.findings]
        ['kernel']
    """
    following, everything = followers(tree), named_leaves(tree)
    leaves = [(path, leaf) for path, leaf in everything if path not in following]
    table = as_rules(rules, axes).without_single_layers(leaves)
    match = match_leaves(complete(table), leaves, mesh=mesh)
    uses = _rule_uses(table, [path for path, _ in leaves])
    stacks = [table.stack(path) is not None for path, _ in leaves]
    of_arrays = [
        *_unmatched(table, leaves),
        *match.findings,
        *large_replicated(leaves, match.specs, mesh, large, stacks),
    ]
    findings = [*group_findings(of_arrays), *_of_rules(uses, unused)]
    return Audit(with_followers(tree, following, match.specs), uses, findings, group_findings(match.replicated))


def complete(table: PartitionRules) -> PartitionRules:
    """The table with a last rule that replicates all arrays without a rule."""
    return PartitionRules((*table.table, (".*", ())), table.axes, table.layers)


def large_replicated(
    leaves: Sequence[tuple[str, Shaped]],
    specs: Sequence[PartitionSpec],
    mesh: Mesh | AbstractMesh,
    large: int,
    stacks: Sequence[bool],
) -> list[Finding]:
    """Findings for replicated arrays of `large` bytes or more, counted per layer in `stacks`."""
    replicated = [all(mesh.shape[axis] == 1 for entry in spec for axis in as_tuple(entry)) for spec in specs]
    if all(replicated):
        return []  # plain data parallelism: replication is intended
    findings = []
    for (path, leaf), is_replicated, stacked in zip(leaves, replicated, stacks, strict=True):
        shape = getattr(leaf, "shape", ())
        size = math.prod(shape[1:] if stacked else shape) * leaf.dtype.itemsize if shape else 0
        if is_replicated and size >= large:
            problem = f"{bytes_text(size)} are replicated on all {mesh.size} devices"
            repair = f"Shard a dim in its rule if this is not intended (reported for {bytes_text(large)} or more)"
            findings.append(Finding(path, problem, repair))
    return findings


def _rule_uses(table: PartitionRules, paths: Sequence[str]) -> list[RuleUse]:
    decided = [table.find(path) for path in paths]
    uses = []
    for index, (pattern, dims) in enumerate(table.table):
        arrays = decided.count(index)
        regex = re.compile(pattern)
        earlier = [d for d, path in zip(decided, paths, strict=True) if d is not None and regex.search(path)]
        uses.append(RuleUse(pattern, dims, arrays, min(earlier) if earlier and not arrays else None))
    return uses


def _unmatched(table: PartitionRules, leaves: Sequence[tuple[str, object]]) -> list[Finding]:
    findings = []
    for path, leaf in leaves:
        shape = getattr(leaf, "shape", ())
        if table.find(path) is None and not needs_no_rule(table, path, shape):
            problem = f"no rule matches this array {tuple(shape)}; it is counted as replicated"
            findings.append(Finding(path, problem, "Add a rule for it, or end the table with ('.*', ())"))
    return findings


def _of_rules(uses: Sequence[RuleUse], unused: bool) -> list[Finding]:
    findings = []
    for number, use in enumerate(uses, start=1):
        where = f"rule {number}, {use.pattern!r}"
        if use.shadowed_by is not None:
            earlier = f"rule {use.shadowed_by + 1}, {uses[use.shadowed_by].pattern!r}"
            problem = f"applies to no array: {earlier}, matches first"
            findings.append(Finding(where, problem, "Move it before that rule, or delete it"))
        elif unused and not use.arrays:
            findings.append(Finding(where, "matches no array of the model", "Correct its pattern, or delete it"))
    return findings
