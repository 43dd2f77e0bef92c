"""Rule tables as they are written: their patterns and dims are checked and compiled; patterns that compare numbers."""

import re
from collections.abc import Callable, Iterable, Sequence

from jax.sharding import PartitionSpec

from flax_mesh.axes import LargestDim, Lost, PartitionAxis
from flax_mesh.errors import ShardingError

Dims = PartitionSpec | LargestDim | tuple[str | None, ...] | None  # tuple: logical axes; None: replicated
CompiledRule = tuple[re.Pattern[str], PartitionSpec, tuple[Lost, ...]]  # Lost: mesh axes that an earlier dim has taken
# A pattern distinguishes digits only by a digit, a character by its name, or a back-reference.
_DISTINGUISHES_DIGITS = re.compile(r"[0-9]|\\N|\(\?P=")
# Words, groups and a few classes, in which digits appear only behind the letters of a word.
_WORDS = re.compile(r"(?:[A-Za-z_]\w*+|\((?:\?[:=!]|(?!\?))|[)|/$^.*+?-]|\\[.dw]|\[\^/\]|\[0-9\])*+", re.ASCII)


def compile_table(table: tuple[tuple[str, Dims], ...], axes: PartitionAxis) -> tuple[CompiledRule, ...]:
    """The patterns and specs of a table; a ShardingError names all rules that are malformed."""
    compiled, problems = [], []
    for number, (pattern, dims) in enumerate(table, start=1):
        try:
            if isinstance(dims, LargestDim):
                spec, lost = PartitionSpec(), ()
            else:
                spec, lost = (dims, ()) if isinstance(dims, PartitionSpec) else axes.resolve_and_report(dims or ())
            compiled.append((re.compile(pattern), spec, lost))
        except re.error as error:
            problems.append(f"rule {number}: {pattern!r} is not a regular expression: {error}.")
        except ShardingError as error:
            problems.append(f"rule {number}, {pattern!r} -> {dims!r}: {error}")
    if problems:
        raise ShardingError("\n".join(problems))
    return tuple(compiled)


def checked_table(table: str | Iterable[object]) -> tuple[tuple[str, Dims], ...]:
    """A table, or names of mesh axes as one rule for all arrays; a ShardingError names all rules of another form."""
    if isinstance(table, str):
        names = tuple(name.strip() for name in table.split("+"))
        if not all(map(str.isidentifier, names)) or len(set(names)) < len(names):
            raise ShardingError(f"rules={table!r} must name mesh axes joined by '+', each once, such as 'fsdp+dp'.")
        return ((".*", LargestDim(names)),)
    if not isinstance(table, Iterable) or getattr(table, "ndim", 1) == 0:
        raise ShardingError(f"rules must be axis names such as 'fsdp', or a list of (pattern, dims), got {table!r}.")
    rules, problems = [], []
    for number, rule in enumerate(table, start=1):
        pattern, dims = rule if isinstance(rule, tuple | list) and len(rule) == 2 else (None, None)
        if not isinstance(pattern, str):
            problems.append(f"rule {number} is {rule!r}: write (pattern, dims).")
        elif not isinstance(dims, PartitionSpec | LargestDim | tuple | list | None):
            problems.append(f"rule {number}, {pattern!r}: dims must be a tuple or a PartitionSpec, got {dims!r}.")
        elif not isinstance(dims, PartitionSpec | LargestDim) and any(
            not isinstance(d, str | None) for d in dims or ()
        ):
            problems.append(
                f"rule {number}, {pattern!r} -> {dims!r}: each dim must be one logical axis or None. For mesh axes, "
                "of which several may split one dim, write a PartitionSpec."
            )
        else:
            rules.append((pattern, tuple(dims) if isinstance(dims, list) else dims))
    if problems:
        raise ShardingError("\n".join(problems))
    return tuple(rules)


def kinds_of_paths(rules: Sequence[CompiledRule], layers: Iterable[str]) -> Callable[[str], tuple[str, int | None]]:
    """A function of a path: arrays of one shape whose paths have equal results get equal specs.

    Such paths differ only in numbers, and have the same first match among the rules that distinguish numbers.
    """
    name = str if any(map(has_numbers, layers)) else without_numbers
    numbered = [(i, pattern) for i, (pattern, _, _) in enumerate(rules) if not ignores_numbers(pattern.pattern)]
    return lambda path: (name(path), next((i for i, pattern in numbered if pattern.search(path)), None))


def ignores_numbers(pattern: str) -> bool:
    """Whether `pattern` has the same result for any two paths with the same `without_numbers`; False if unsure.

    A pattern compares characters through literals, sets and back-references. A pattern without a digit, a `\\N{...}`
    and a back-reference treats all digits alike. A digit inside a word, as in `block_0/kernel`, cannot match a number
    either: it follows a letter, and a number contains no letters.
    """
    return not _DISTINGUISHES_DIGITS.search(pattern) or _WORDS.fullmatch(pattern) is not None


def has_numbers(path: str) -> bool:
    return any(map(_is_number, path.split("/")))


def without_numbers(path: str) -> str:
    """`path` with zeros for the digits of its numbers: "layers/12/block_0/kernel" -> "layers/00/block_0/kernel"."""
    return "/".join(["0" * len(part) if _is_number(part) else part for part in path.split("/")])


def _is_number(part: str) -> bool:
    return part.isdigit() and part.isascii()
