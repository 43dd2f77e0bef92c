"""Rule tables: the first pattern found in a leaf's path says how its dims are split."""

import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from flax_mesh.axes import DEFAULT_AXES, Lost, PartitionAxis, as_entry, as_tuple
from flax_mesh.errors import ShardingError
from flax_mesh.text import axes_text
from flax_mesh.tree import in_stack, named_leaves

Dims = PartitionSpec | tuple[str | None, ...] | None  # mesh axes, or logical axes, or whole
CompiledRule = tuple[re.Pattern[str], PartitionSpec, tuple[Lost, ...]]  # the last: what dims lost to earlier ones
Policy = Literal["error", "warn", "drop"]
MATCHES_KEPT = 8
# What a pattern needs to tell digits apart: a digit, a character by its name, or a back-reference.
_TELLS_DIGITS = re.compile(r"[0-9]|\\N|\(\?P=")
# Words, groups and a few classes: digits stand behind the letters of a word, in them and nowhere else.
_WORDS = re.compile(r"(?:[A-Za-z_]\w*+|\((?:\?[:=!]|(?!\?))|[)|/$^.*+?-]|\\[.dw]|\[\^/\]|\[0-9\])*+", re.ASCII)


@dataclass(frozen=True)
class PartitionRules:
    """A table of (pattern, dims); for each leaf the first pattern that `re.search` finds in its path counts.

    dims are logical axes, `("embed", "heads")`, resolved through `axes`; or a `PartitionSpec` of mesh axes; or None
    or () for a leaf that stays whole. `layers` holds the paths of layer lists: in a scanned stack of layers the leaf
    has one more dim, in front, which the table need not know of.

    Raises one ShardingError that names every bad rule.
    """

    table: tuple[tuple[str, Dims], ...]
    axes: PartitionAxis = DEFAULT_AXES
    layers: tuple[str, ...] = ()
    _compiled: tuple[CompiledRule, ...] = field(init=False, repr=False, compare=False)
    # Matches of the trees seen last: a state of the same structure is matched again without a look at its paths.
    _matches: dict[Any, "RuleMatch"] = field(init=False, repr=False, compare=False)

    def __init__(
        self,
        table: Iterable[tuple[str, Any]],
        axes: PartitionAxis = DEFAULT_AXES,
        layers: str | Sequence[str] = (),
    ):
        object.__setattr__(self, "table", _frozen(table))
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "layers", (layers,) if isinstance(layers, str) else tuple(layers))
        object.__setattr__(self, "_compiled", _compile(self.table, axes))
        object.__setattr__(self, "_matches", {})

    def find(self, path: str) -> int | None:
        """Index of the rule that decides `path`, None where no pattern is found in it."""
        return next((index for index, (pattern, _, _) in enumerate(self._compiled) if pattern.search(path)), None)

    def spec(self, index: int, path: str) -> PartitionSpec:
        """Spec of rule `index` for the leaf at `path`: in a scanned stack with the layer dim in front."""
        spec = self._compiled[index][1]
        dims = self.table[index][1]
        names_the_stack = not isinstance(dims, PartitionSpec) and bool(dims) and dims[0] == "layers"
        return PartitionSpec(None, *spec) if self.stack(path) and not names_the_stack else spec

    def stack(self, path: str) -> str | None:
        """The scanned stack that holds the leaf, also below an optimizer's prefix: "0/mu/layers/q" lies in "layers"."""
        parts = path.split("/") if self.layers else []
        heads = tuple(f"{stack}/" for stack in self.layers)
        tails = ("/".join(parts[start:]) for start in range(len(parts)))
        return in_stack(next((tail for tail in tails if tail.startswith(heads)), ""), self.layers)

    def explain(self, path: str) -> str:
        """Which rule decides `path`, what it became, and why."""
        index = self.find(path)
        if index is None:
            return f"{path}: no rule matches; add one, or end the table with ('.*', ())"
        pattern, dims = self.table[index]
        later = [p.pattern for p, _, _ in self._compiled[index + 1 :] if p.search(path)]
        text = f"{path}: rule {index + 1} of {len(self.table)}, {pattern!r} -> {dims!r} -> {self.spec(index, path)}"
        for lost in self._compiled[index][2]:
            text += f"; {lost_finding(path, lost).problem}"
        if stack := self.stack(path):
            text += f"; the leading dim counts the layers of the stack {stack!r}"
        return text + (f"; later rules that match too: {', '.join(map(repr, later))}" if later else "")


class Finding(NamedTuple):
    path: str
    problem: str
    repair: str

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}. {self.repair}"


class RuleMatch(NamedTuple):
    """Specs of the leaves in the order of `jax.tree.leaves`, and what does not fit."""

    specs: list[PartitionSpec]
    findings: list[Finding]


def match_partition_rules(
    rules: PartitionRules | Iterable[tuple[str, Any]],
    tree: Any,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    axes: PartitionAxis | None = None,
    min_size: int = 0,
    on_mismatch: Policy = "error",
    dropped: list[Finding] | None = None,
) -> Any:
    """A tree of PartitionSpec of the same structure as `tree` (nnx.State, pure dict, optax state; arrays or abstract).

    Scalars, leaves of one element or of fewer than `min_size`, and leaves that are no arrays get `P()`.
    A leaf without a rule is a ShardingError. So is, by default, a spec that does not fit: longer than the rank, a mesh
    axis twice and, where `mesh` is given, an axis it lacks or a dim that does not divide. All leaves stand in one
    error. `on_mismatch="warn"` and "drop" leave out the axes that do not fit instead, with or without one warning;
    what they left out is added to `dropped`.
    """
    rules = as_rules(rules, axes)
    leaves, treedef = jax.tree.flatten(tree)
    key = (treedef, tuple([getattr(leaf, "shape", None) for leaf in leaves]), mesh, min_size)
    match = rules._matches.get(key)
    if match is None:
        match = rules._matches[key] = match_leaves(rules, named_leaves(tree), mesh=mesh, min_size=min_size)
        while len(rules._matches) > MATCHES_KEPT:
            rules._matches.pop(next(iter(rules._matches)))
    apply_policy(match.findings, on_mismatch, dropped)
    return jax.tree.unflatten(treedef, match.specs)


def as_rules(
    rules: PartitionRules | Iterable[tuple[str, Any]], axes: PartitionAxis | None = None, layers: Sequence[str] = ()
) -> PartitionRules:
    """The table as PartitionRules: resolved through `axes` where given, with `layers` where it names none itself."""
    if not isinstance(rules, PartitionRules):
        return PartitionRules(rules, axes or DEFAULT_AXES, layers)
    if axes is None and (rules.layers or not layers):
        return rules
    return PartitionRules(rules.table, axes or rules.axes, rules.layers or layers)


def match_leaves(
    rules: PartitionRules,
    leaves: Sequence[tuple[str, Any]],
    *,
    mesh: Mesh | AbstractMesh | None = None,
    min_size: int = 0,
) -> RuleMatch:
    """Specs for (path, leaf) pairs. Unmatched leaves raise; what else does not fit is left out and listed."""
    specs, findings, unmatched = [], [], []
    # The layers of a model are alike: same path but for numbers, same shape, same first rule of those that can tell
    # numbers apart -> same spec.
    replicated, decided = PartitionSpec(), {}
    alike = str if any(map(has_numbers, rules.layers)) else without_numbers
    telling = [(i, p) for i, (p, _, _) in enumerate(rules._compiled) if not ignores_numbers(p.pattern)]
    for path, leaf in leaves:
        shape = getattr(leaf, "shape", None)
        if not shape:
            specs.append(replicated)
            continue
        key = (alike(path), shape, next((i for i, p in telling if p.search(path)), None) if telling else None)
        if key in decided:
            specs.append(decided[key])
            continue
        spec, problems = replicated, []
        if not needs_no_rule(rules, path, shape, min_size):
            index = rules.find(path)
            if index is None:
                unmatched.append(f"Partition rule not found for param: {path} {tuple(shape)}")
                continue
            spec, problems = fit_rule(rules, index, path, shape, mesh)
        findings += problems
        if not problems:  # mismatches are reported per leaf, so they are not cached
            decided[key] = spec
        specs.append(spec)
    if unmatched:
        repair = "Add rules for them, or end the table with ('.*', ())."
        raise ShardingError("\n".join([*unmatched, repair, *(f"{finding}." for finding in findings)]))
    return RuleMatch(specs, findings)


def needs_no_rule(rules: PartitionRules, path: str, shape: Sequence[int], min_size: int = 0) -> bool:
    """Whether the array at `path` stays whole without a rule: of one element (a layer, in a stack), or too small."""
    return prod(shape[1:] if rules.stack(path) else shape) <= 1 or prod(shape) < min_size


def fit_rule(
    rules: PartitionRules, index: int, path: str, shape: Sequence[int], mesh: Mesh | AbstractMesh | None
) -> tuple[PartitionSpec, list[Finding]]:
    """`fit_spec` of rule `index`, and a finding for each axis that one of its dims lost to an earlier one."""
    _, written, lost = rules._compiled[index]
    spec = rules.spec(index, path)
    fitting, findings = fit_spec(path, shape, spec, mesh, rules.table[index], len(spec) - len(written))
    return fitting, [*findings, *(lost_finding(path, one) for one in lost)]


def fit_spec(
    path: str,
    shape: Sequence[int],
    spec: PartitionSpec,
    mesh: Mesh | AbstractMesh | None,
    rule: tuple[str, Dims] | None = None,
    layer_dims: int = 0,
) -> tuple[PartitionSpec, list[Finding]]:
    """The part of `spec` that fits an array of `shape` on `mesh`, and a finding for everything that does not.

    `rule`, where the spec comes from one, is named in the findings, and its dims are counted as it has them: without
    the `layer_dims` that a stack of layers puts in front.
    """
    of_rule = f" of rule {rule[0]!r}" if rule else ""
    findings, dims, taken = [], [], set()
    if len(spec) > len(shape):
        what = "one layer of the array" if layer_dims else "the array"
        written, rank = PartitionSpec(*spec[layer_dims:]), len(shape) - layer_dims
        problem = f"spec {written}{of_rule} has {len(written)} dims, {what} {tuple(shape)} has {rank}"
        findings.append(Finding(path, problem, "Give the spec at most as many dims as the array"))
    for dim, (size, entry) in enumerate(zip(shape, spec, strict=False)):
        if entry is PartitionSpec.UNCONSTRAINED:
            dims.append(entry)
            continue
        kept, in_rule = [], f"dim {dim - layer_dims}{of_rule}"
        for axis in as_tuple(entry):
            if axis in taken:
                problem = f"{in_rule} uses mesh axis {axis!r}" + (
                    " twice" if axis in kept else ", which an earlier dim has already"
                )
                findings.append(Finding(path, problem, f"Map {in_rule} to another axis or to None"))
            elif mesh is not None and axis not in mesh.axis_names:
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
            findings.append(Finding(path, problem, repair))
            kept = []
        dims.append(as_entry(kept))
    return PartitionSpec(*dims), findings


def apply_policy(findings: Iterable[Finding], on_mismatch: Policy, dropped: list[Finding] | None = None) -> None:
    """Raise for all that does not fit, or warn of it, or accept that it is left out: adds the findings to `dropped`."""
    if on_mismatch not in ("error", "warn", "drop"):
        raise ValueError(f"on_mismatch must be 'error', 'warn' or 'drop', got {on_mismatch!r}.")
    findings = list(findings)
    text = "\n".join(f"{finding}." for finding in findings)
    if findings and on_mismatch == "error":
        raise ShardingError(text)
    if findings and on_mismatch == "warn":
        warnings.warn(f"left out of the sharding:\n{text}", stacklevel=3)
    if dropped is not None:
        dropped += findings


def lost_finding(path: str, lost: Lost) -> Finding:
    problem = f"dim {lost.dim} ({lost.logical!r}) wants mesh axis {lost.mesh_axis!r}, which an earlier dim has"
    return Finding(path, problem, f"Map one of the two to None, or {lost.logical!r} to another axis")


def ignores_numbers(pattern: str) -> bool:
    """Whether `pattern` finds the same in any two paths with the same `without_numbers`; False where unsure.

    A search sees the characters of a path through literals, sets and back-references. Without a digit, a `\\N{...}`
    and a back-reference in its text a pattern treats all digits alike. Nor is a number seen by a digit that belongs
    to a word, as in `block_0/kernel`: what it is compared to stands behind a letter, and in a number none does.
    """
    return not _TELLS_DIGITS.search(pattern) or _WORDS.fullmatch(pattern) is not None


def has_numbers(path: str) -> bool:
    return any(map(_is_number, path.split("/")))


def without_numbers(path: str) -> str:
    """`path` with zeros for the digits of its numbers: "layers/12/block_0/kernel" -> "layers/00/block_0/kernel"."""
    return "/".join(["0" * len(part) if _is_number(part) else part for part in path.split("/")])


def _compile(table: tuple[tuple[str, Dims], ...], axes: PartitionAxis) -> tuple[CompiledRule, ...]:
    compiled, problems = [], []
    for number, (pattern, dims) in enumerate(table, start=1):
        try:
            spec, lost = (dims, ()) if isinstance(dims, PartitionSpec) else axes.resolve_and_report(dims or ())
            compiled.append((re.compile(pattern), spec, lost))
        except re.error as error:
            problems.append(f"rule {number}: {pattern!r} is no regular expression: {error}.")
        except ShardingError as error:
            problems.append(f"rule {number}, {pattern!r} -> {dims!r}: {error}")
    if problems:
        raise ShardingError("\n".join(problems))
    return tuple(compiled)


def _frozen(table: Iterable[Any]) -> tuple[tuple[str, Dims], ...]:
    rules, problems = [], []
    for number, rule in enumerate(table, start=1):
        pattern, dims = rule if isinstance(rule, tuple | list) and len(rule) == 2 else (None, None)
        if not isinstance(pattern, str):
            problems.append(f"rule {number} is {rule!r}: write (pattern, dims).")
        elif not isinstance(dims, PartitionSpec | tuple | list | None):
            problems.append(f"rule {number}, {pattern!r}: dims are a tuple or a PartitionSpec, got {dims!r}.")
        elif not isinstance(dims, PartitionSpec) and any(not isinstance(d, str | None) for d in dims or ()):
            problems.append(
                f"rule {number}, {pattern!r} -> {dims!r}: each dim is one logical axis or None. Write "
                f"P(...) for mesh axes, several of which may split one dim."
            )
        else:
            rules.append((pattern, tuple(dims) if isinstance(dims, list) else dims))
    if problems:
        raise ShardingError("\n".join(problems))
    return tuple(rules)


def _is_number(part: str) -> bool:
    return part.isdigit() and part.isascii()
