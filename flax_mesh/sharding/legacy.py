"""Functions that read shardings and specs from trees, and specs from short text patterns."""

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from flax_mesh.axes import AxisName, as_entry
from flax_mesh.errors import ShardingError
from flax_mesh.fields import check_types
from flax_mesh.mesh.context import current_mesh, get_incontext_mesh
from flax_mesh.sharding.rules import apply_policy, fit_spec
from flax_mesh.text import at_most, path_lines, shown
from flax_mesh.tree import PyTree, map_named, named_leaves


def extract_sharding_structure(tree: PyTree) -> PyTree:
    """Returns a tree of the same structure with the NamedSharding of each leaf, or None.

    The result is None for numpy arrays, numbers, abstract leaves without a sharding, and arrays on one device that were
    never placed on a mesh. `jax.tree` functions skip None: pass them `is_leaf=lambda x: x is None`.

    Example:
        >>> w = fm.shard(np.ones((8, 2)), jax.P("fsdp"), fm.create_mesh((8,), ("fsdp",)))
        >>> shardings = fm.extract_sharding_structure({"w": w, "step": 3})
        >>> shardings["w"].spec, shardings["step"]
        (P('fsdp',), None)
    """
    return map_named(lambda _, leaf: _named(getattr(leaf, "sharding", None)), tree)


get_shardings_with_structure = extract_sharding_structure  # both names are in use


@check_types
def extract_shardings(tree: PyTree, mesh: Mesh | AbstractMesh | None = None) -> PyTree:
    """As `extract_sharding_structure`, but leaves may also be PartitionSpecs, or have one as `sharding`.

    A PartitionSpec becomes a NamedSharding on `mesh`, or on the mesh in context; raises NoMeshError without either. A
    tree without PartitionSpecs requires no mesh. One ShardingError names all specs that do not fit the mesh.

    Example:
        >>> fm.extract_shardings({"w": jax.P("fsdp")}, fm.create_mesh((8,), ("fsdp",)))["w"].shard_shape((8, 2))
        (1, 2)
    """
    findings = []

    def sharding(path: str, leaf: object) -> NamedSharding | None:
        layout = leaf if isinstance(leaf, PartitionSpec) else getattr(leaf, "sharding", None)
        if not isinstance(layout, PartitionSpec):
            return _named(layout)
        target = mesh if mesh is not None else get_incontext_mesh()
        shape = getattr(leaf, "shape", (0,) * len(layout))  # for a spec without an array: 0 is divisible by every size
        spec, problems = fit_spec(path, shape, layout, target)
        findings.extend(problems)
        return NamedSharding(target, spec)

    shardings = map_named(sharding, tree)
    apply_policy(findings, "error")
    return shardings


def get_partition_spec(tree: PyTree) -> PyTree:
    """Returns a tree of the same structure with the PartitionSpec of each leaf.

    It is `P()` for numbers, numpy arrays, and jax arrays on one device without a mesh. One ShardingError names all
    leaves without a spec: abstract leaves without a sharding, arrays on several devices whose sharding is not a
    NamedSharding, and leaves that are not arrays.

    Example:
        >>> w = fm.shard(np.ones((8, 2)), jax.P("fsdp"), fm.create_mesh((8,), ("fsdp",)))
        >>> fm.get_partition_spec({"step": 3, "w": w})
        {'step': P(), 'w': P('fsdp',)}
    """
    problems = []

    def spec(path: str, leaf: object) -> PartitionSpec | None:
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            return sharding.spec
        if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1:
            problems.append((path, f"{type(leaf.sharding).__name__} has no spec; place it with a NamedSharding"))
        elif isinstance(leaf, jax.ShapeDtypeStruct):
            problems.append((path, "an abstract leaf without a sharding; create it with abstract_state"))
        elif not hasattr(leaf, "dtype") and not isinstance(leaf, bool | int | float | complex):
            problems.append((path, f"{type(leaf).__name__} is neither an array nor a number"))
        return PartitionSpec()

    specs = map_named(spec, tree)
    if problems:
        lines = path_lines(f"{path}: {problem}" for path, problem in problems)
        raise ShardingError("no PartitionSpec for\n" + "\n".join(lines))
    return specs


def get_names_from_partition_spec(specs: PyTree) -> list[str]:
    """Mesh axes in a PartitionSpec, a sequence or mapping of them, or a tree: each once, in the order of first use.

    >>> P = jax.sharding.PartitionSpec
    >>> fm.get_names_from_partition_spec(P(("dp", "fsdp"), None, "tp"))
    ['dp', 'fsdp', 'tp']
    """
    names: dict[str, None] = {}

    def visit(node: PyTree) -> None:
        children: Iterable[PyTree] = ()
        if isinstance(node, str):
            names.setdefault(node)
        elif isinstance(node, Mapping):
            children = node.values()
        elif isinstance(node, PartitionSpec | list | tuple | set | frozenset):
            children = sorted(node) if isinstance(node, set | frozenset) else node  # sets: independent of the hash seed
        elif node is not None and node is not PartitionSpec.UNCONSTRAINED:
            children = [child for _, child in named_leaves(node)]
            if len(children) == 1 and children[0] is node:
                raise TypeError(f"specs must be PartitionSpecs, mesh axis names or a tree of them, got {shown(node)}.")
        for child in children:
            visit(child)

    visit(specs)
    return list(names)


@check_types
def create_pattern_based_partition_spec(
    pattern: str,
    mesh: Mesh | AbstractMesh | None = None,
    default_spec: PartitionSpec = PartitionSpec(),  # noqa: B008 (a frozen value)
) -> Callable[..., PartitionSpec]:
    r"""Parses text such as `"attention|mlp->data,hidden->model"` into a function (path, array) -> PartitionSpec.

    Entries are separated by commas. Each consists of patterns separated by `|`, an arrow, and a spec. In a spec, `.`
    separates dims, `+` separates the axes of one dim, and `_`, `None` or an empty text is a replicated dim:
    `kernel->fsdp+dp._.tp` is `P(("fsdp", "dp"), None, "tp")`. The first pattern that `re.search` finds in the path
    applies, or `default_spec` if no pattern is found. A backslash before `,`, `|` or `->` in a pattern makes it part of
    the pattern: `a{1\,2}` is the regular expression `a{1,2}`, `(q\|k)` is `(q|k)`. Other backslashes keep their meaning
    in `re`, such as `\.` and `\d`.

    Axis names are checked against `mesh`, or against the mesh in context, if any. The returned function ignores
    its array argument. One ShardingError names every entry that is invalid.

    Example:
        >>> spec_of = fm.create_pattern_based_partition_spec("attention|mlp->fsdp._,embed->tp")
        >>> spec_of("layers/0/mlp/kernel", None)
        P('fsdp', None)
    """
    rules: list[tuple[re.Pattern[str], PartitionSpec]] = []
    problems: list[str] = []
    mesh = mesh if mesh is not None else current_mesh()
    for entry in _split(pattern, ","):
        sides = _split(entry, "->")
        if len(sides) != 2:
            problems.append(f"{entry.strip()!r}: write PATTERN|PATTERN->AXIS.AXIS, with one arrow")
            continue
        spec = PartitionSpec(*map(_dim, sides[1].strip().split("."))) if sides[1].strip() else PartitionSpec()
        problems += map(str, fit_spec(repr(entry.strip()), (0,) * len(spec), spec, mesh)[1])
        for text in _split(sides[0], "|"):
            try:
                rules.append((re.compile(_unescape(text.strip())), spec))
            except re.error as error:
                problems.append(f"{text.strip()!r} is not a regular expression: {error}")
            if not text.strip():
                problems.append(f"{entry.strip()!r}: an empty pattern would match every path; write .* to mean that")
    if problems:
        raise ShardingError("\n".join(at_most(problems)))

    def spec_of(path: str, array: object = None) -> PartitionSpec:
        return next((spec for regex, spec in rules if regex.search(path)), default_spec)

    return spec_of


def _named(sharding: object) -> NamedSharding | None:
    return sharding if isinstance(sharding, NamedSharding) else None


def _split(text: str, separator: str) -> list[str]:
    """`text` split at every separator without a backslash before it. Two backslashes are one escaped backslash."""
    # The first alternative consumes escaped characters, so that the second alternative does not match an escaped
    # separator.
    matches = re.finditer(rf"\\(?:->|.)|{re.escape(separator)}", text, re.DOTALL)
    spans = [(0, 0), *(match.span() for match in matches if match[0] == separator), (len(text), len(text))]
    return [text[end:start] for (_, end), (start, _) in pairwise(spans)]


def _unescape(pattern: str) -> str:
    return re.sub(r"\\(->|.)", lambda m: m[1] if m[1] in (",", "|", "->") else m[0], pattern, flags=re.DOTALL)


def _dim(text: str) -> AxisName:
    return None if text.strip() in ("", "_", "None") else as_entry(name.strip() for name in text.split("+"))
