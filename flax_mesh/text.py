"""Words and tables for a terminal: bytes, dims, paths that differ in numbers alone, aligned columns."""

import io
import math
import re
from collections.abc import Hashable, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from flax_mesh.axes import as_tuple

SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}  # as JAX prints types: f32[8,128]


def bytes_text(count: float) -> str:
    """`1.49 GiB`: three figures, binary units."""
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while count >= 1000 and len(units) > 1:
        count /= 1024
        units.pop(0)
    return f"{count:.0f} B" if units[0] == "B" else f"{count:.{max(0, 3 - len(str(int(count))))}f} {units[0]}"


def dims_text(dims: Any) -> str:
    """Entries of a spec or of a rule, `-` for None; a rule that is a spec is marked as such."""
    text = ", ".join("+".join(as_tuple(entry)) or "-" for entry in dims or ())
    return f"P({text})" if isinstance(dims, PartitionSpec) and not text else text or "whole"


def group_paths(paths: Sequence[str], keys: Sequence[Hashable]) -> list[tuple[str, list[int]]]:
    """(pattern, indices) of paths that differ in numbers alone and have equal keys: `layers/{0..125}/q/kernel`.

    In the order of the first of each group. Numbers that form no product of ranges are left ungrouped.
    """
    groups: dict[Hashable, list[int]] = {}
    for i, (path, key) in enumerate(zip(paths, keys, strict=True)):
        groups.setdefault((re.sub(r"(?<![^/])\d+(?![^/])", "*", path), key), []).append(i)
    found = []
    for indices in groups.values():
        columns = zip(*(paths[i].split("/") for i in indices), strict=True)
        choices = [sorted(set(column), key=lambda part: (len(part), part)) for column in columns]
        texts = [_range_text(choice) for choice in choices]
        if math.prod(map(len, choices)) == len(indices) and None not in texts:
            found.append(("/".join(str(text) for text in texts), indices))
        else:
            found += [(paths[i], [i]) for i in indices]
    return sorted(found, key=lambda group: group[1][0])


def table_text(
    heads: Sequence[str], rows: Sequence[Sequence[str]], width: int, right: set[str], wrap: set[str] | None = None
) -> str:
    """An aligned table of at most `width` columns. Cells too long continue on the next line, first those of `wrap`."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for head in heads:
        # rich takes what is missing from the columns that may wrap, and from the others only if that is not enough.
        justify = "right" if head in right else "left"
        table.add_column(head, justify=justify, overflow="fold", no_wrap=bool(wrap) and head not in wrap)
    for row in rows:
        table.add_row(*row)
    console = Console(file=io.StringIO(), width=width, color_system=None, markup=False, highlight=False, emoji=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().rstrip("\n").split("\n"))


def _range_text(parts: list[str]) -> str | None:
    """One part as it is, consecutive numbers as {0..3}; None for other sets."""
    if len(parts) == 1:
        return parts[0]
    first, last = int(parts[0]), int(parts[-1])
    return f"{{{first}..{last}}}" if last - first + 1 == len(parts) else None
