"""Rule tables as they are written: their patterns and dims are checked and compiled."""

import re
from collections.abc import Iterable

from jax.sharding import PartitionSpec

from flax_mesh.axes import LargestDim, Lost, PartitionAxis
from flax_mesh.errors import ShardingError

Dims = PartitionSpec | LargestDim | tuple[str | None, ...] | None  # tuple: logical axes; None: replicated
CompiledRule = tuple[re.Pattern[str], PartitionSpec, tuple[Lost, ...]]  # Lost: mesh axes that an earlier dim has taken


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
