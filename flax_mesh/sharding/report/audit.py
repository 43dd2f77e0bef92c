"""The audit of a rule table against the arrays it is for: everything that looks wrong at once."""

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from flax_mesh.axes import PartitionAxis, as_tuple
from flax_mesh.sharding.rules import (
    Finding,
    PartitionRules,
    Rules,
    as_rules,
    group_findings,
    match_leaves,
    needs_no_rule,
)
from flax_mesh.text import bytes_text, count_text
from flax_mesh.tree import named_leaves

LARGE = 2**24  # bytes from which an array that stays whole on every device is a finding


class RuleUse(NamedTuple):
    pattern: str
    dims: Any  # as written: logical axes, a PartitionSpec, or None
    arrays: int  # of the model that this rule decides
    shadowed_by: int | None = None  # it decides nothing, because this earlier rule matches wherever it does

    def __str__(self) -> str:
        if self.shadowed_by is not None:
            return f"nothing: rule {self.shadowed_by + 1} comes first"
        return count_text(self.arrays, "array") if self.arrays else "nothing"


class Audit(NamedTuple):
    """`specs`, in the order of `jax.tree.leaves`, go as far as the rules fit; what does not fit stays whole."""

    specs: list[PartitionSpec]
    uses: list[RuleUse]
    findings: list[Finding]
    replicated: list[Finding]  # arrays of which rules such as "fsdp" could split no dim


def audit_rules(
    rules: Rules,
    tree: Any,
    mesh: Mesh | AbstractMesh,
    *,
    axes: PartitionAxis | None = None,
    large: int = LARGE,
    unused: bool = True,
) -> Audit:
    """What `match_partition_rules(rules, tree, mesh=mesh, axes=axes)` would raise for, and what it would not.

    Findings: leaves without a rule; specs that are too long, name an axis twice or one that the mesh lacks; dims that
    do not divide; arrays of `large` bytes or more (a layer, in a scanned stack) that stay whole while others are
    split; rules that decide nothing because an earlier one comes first, and, if `unused`, those that match nothing.
    Layers that are alike share a finding. `apply_policy(audit.findings, "error")` raises them as one ShardingError.
    """
    table, leaves = as_rules(rules, axes), named_leaves(tree)
    match = match_leaves(complete(table), leaves, mesh=mesh)
    uses = rule_uses(table, [path for path, _ in leaves])
    stacks = [table.stack(path) is not None for path, _ in leaves]
    of_arrays = [*_unmatched(table, leaves), *match.findings, *large_whole(leaves, match.specs, mesh, large, stacks)]
    return Audit(
        match.specs, uses, [*group_findings(of_arrays), *_of_rules(uses, unused)], group_findings(match.replicated)
    )


def complete(table: PartitionRules) -> PartitionRules:
    """The table, with a last rule that leaves whole what has none."""
    return PartitionRules((*table.table, (".*", ())), table.axes, table.layers)


def large_whole(
    leaves: Sequence[tuple[str, Any]],
    specs: Sequence[PartitionSpec],
    mesh: Mesh | AbstractMesh,
    large: int,
    stacks: Sequence[bool],
) -> list[Finding]:
    """Arrays of `large` bytes or more, of one layer where they are `stacks`, that no axis of the mesh splits."""
    whole = [all(mesh.shape[axis] == 1 for entry in spec for axis in as_tuple(entry)) for spec in specs]
    if all(whole):
        return []  # plain data parallelism: copies are what was asked for
    found = []
    for (path, leaf), stays, stacked in zip(leaves, whole, stacks, strict=True):
        shape = getattr(leaf, "shape", ())
        size = math.prod(shape[1:] if stacked else shape) * leaf.dtype.itemsize if shape else 0
        if stays and size >= large:
            problem = f"{bytes_text(size)} stay whole on each of {mesh.size} devices"
            repair = f"Split a dim in its rule, if that is not meant (a finding from {bytes_text(large)} on)"
            found.append(Finding(path, problem, repair))
    return found


def rule_uses(table: PartitionRules, paths: Sequence[str]) -> list[RuleUse]:
    decided = [table.find(path) for path in paths]
    uses = []
    for index, (pattern, dims) in enumerate(table.table):
        arrays = decided.count(index)
        regex = re.compile(pattern)
        earlier = [d for d, path in zip(decided, paths, strict=True) if d is not None and regex.search(path)]
        uses.append(RuleUse(pattern, dims, arrays, min(earlier) if earlier and not arrays else None))
    return uses


def _unmatched(table: PartitionRules, leaves: Sequence[tuple[str, Any]]) -> list[Finding]:
    found = []
    for path, leaf in leaves:
        shape = getattr(leaf, "shape", ())
        if table.find(path) is None and not needs_no_rule(table, path, shape):
            problem = f"no rule matches this array {tuple(shape)}, counted as whole"
            found.append(Finding(path, problem, "Add a rule for it, or end the table with ('.*', ())"))
    return found


def _of_rules(uses: Sequence[RuleUse], unused: bool) -> list[Finding]:
    found = []
    for number, use in enumerate(uses, start=1):
        where = f"rule {number}, {use.pattern!r}"
        if use.shadowed_by is not None:
            problem = f"decides no array: rule {use.shadowed_by + 1}, {uses[use.shadowed_by].pattern!r}, comes first"
            found.append(Finding(where, problem, "Move it before that rule, or delete it"))
        elif unused and not use.arrays:
            found.append(Finding(where, "matches no array of the model", "Correct its pattern, or delete it"))
    return found
