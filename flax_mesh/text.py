"""Formatting for messages and reports: counts, bytes, meshes, arrays, groups of paths, aligned tables."""

import io
import math
import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

UNLIMITED = 100_000  # characters in a line
MOST_LINES = 24  # of a list in a message, so that it fits a terminal
NUMBER = re.compile(r"(?<![^/.\[])(0|[1-9][0-9]{0,8})(?![^/.\]])")  # a whole component of a path
PATH = re.compile(r"^(\s*[^\s:]*)")  # at the beginning of a line
SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def plural(noun: str, count: int) -> str:
    """The noun in the number of `count`: `file` or `files`, `process` or `processes`."""
    return noun if count == 1 else f"{noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"


def count_text(count: int, noun: str) -> str:
    """`1 file`, `1,024 files`."""
    return f"{count:,} {plural(noun, count)}"


def listed(items: Iterable[object]) -> str:
    """`2, 3, 5`."""
    return ", ".join(map(str, items))


def shortened(text: str, most: int = 200) -> str:
    """The text, or its first `most` characters and the number of all of them."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def at_most(lines: Sequence[str], most: int = MOST_LINES) -> list[str]:
    """The lines, or the first `most` of them and the number of the others."""
    return [*lines[:most], *([f"and {len(lines) - most:,} more"] if len(lines) > most else [])]


def processes_text(processes: Iterable[int]) -> str:
    """`process 2`, `processes 2, 3`."""
    found = sorted(set(processes))
    return f"{plural('process', len(found))} {listed(found)}"


def mesh_text(shape: Mapping[str, int]) -> str:
    """`pp:2,fsdp:2`, as in the setting mesh.shape, without axes of size 1 (`format_mesh_shape` includes them)."""
    return ",".join(f"{name}:{size}" for name, size in shape.items() if size != 1) or "one device"


def axes_text(sizes: Mapping[str, int], axes: Iterable[str]) -> str:
    """`fsdp=2, tp=4`: the given axes with their sizes."""
    return ", ".join(f"{axis}={sizes[axis]}" for axis in axes)


def array_text(array: Any) -> str:
    """`f32[8,128]`, as JAX prints types, for any object with a dtype and a shape."""
    name, bits = re.fullmatch(r"(\D*)(.*)", str(array.dtype)).groups()  # pyright: ignore[reportOptionalMemberAccess]
    return f"{SHORT.get(name, name)}{bits}[{','.join(map(str, array.shape))}]"


def bytes_text(count: float) -> str:
    """`1.49 GiB`: three significant digits, binary units."""
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while count >= 1000 and len(units) > 1:
        count /= 1024
        units.pop(0)
    return f"{count:.0f} B" if units[0] == "B" else f"{count:.{max(0, 3 - len(str(int(count))))}f} {units[0]}"


def group_paths(paths: Sequence[str], keys: Sequence[Hashable]) -> list[tuple[str, list[int]]]:
    """(pattern, indices) for paths that have equal keys and differ only in numbers: `layers/{0..125}/q/kernel`.

    Groups are in the order of their first path. Numbers that do not form a product of ranges stay ungrouped. Paths may
    also have dots (`layers.{0..125}.q`) or the form of `jax.tree_util.keystr` (`['layers'][{0..125}]['q']`).
    """
    parts = [NUMBER.split(path) for path in paths]  # words and numbers alternate
    groups: dict[Hashable, list[int]] = {}
    for i, (part, key) in enumerate(zip(parts, keys, strict=True)):
        groups.setdefault((*part[::2], key), []).append(i)
    found = []
    for indices in groups.values():
        columns = zip(*(map(int, parts[i][1::2]) for i in indices), strict=True)
        choices = [sorted(set(column)) for column in columns]
        texts = [_range_text(choice) for choice in choices]
        if math.prod(map(len, choices)) == len(indices) and None not in texts:
            words = parts[indices[0]][::2]
            found.append(("".join(f"{word}{text}" for word, text in zip(words, [*texts, ""], strict=True)), indices))
        else:
            found += [(paths[i], [i]) for i in indices]
    return sorted(found, key=lambda group: group[1][0])


def group_lines(lines: Iterable[str]) -> list[str]:
    """Lines that begin with a path; those that differ only in the numbers of their paths as one.

    >>> group_lines(["layers/0/q: missing", "layers/1/q: missing", "embed: missing"])
    ['layers/{0..1}/q: missing', 'embed: missing']
    """
    halves = [PATH.split(line, maxsplit=1)[1:] for line in lines]
    groups = group_paths([path for path, _ in halves], [text for _, text in halves])
    return [pattern + halves[members[0]][1] for pattern, members in groups]


def path_lines(lines: Iterable[str]) -> list[str]:
    """`group_lines`, cut to a screen: the list of arrays or layers in an error message."""
    return at_most(group_lines(lines))


def paths_text(paths: Iterable[str]) -> str:
    """The paths in one line: `embed, layers/{0..3}/q`."""
    return listed(path_lines(paths))


def table_text(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int = UNLIMITED,
    *,
    right: Collection[str] = (),
    wrap: Collection[str] = (),
) -> str:
    """An aligned table of at most `width` characters; the columns in `right` are right-aligned.

    Cells that are too long wrap onto the next line, those of the columns in `wrap` first.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for head in heads:
        # rich narrows the columns that may wrap first, and the others only if that is not enough.
        justify = "right" if head in right else "left"
        table.add_column(head, justify=justify, overflow="fold", no_wrap=bool(wrap) and head not in wrap)
    for row in rows:
        table.add_row(*row)
    console = Console(file=io.StringIO(), width=width, color_system=None, markup=False, highlight=False, emoji=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().rstrip("\n").split("\n"))


def _range_text(numbers: Sequence[int]) -> str | None:
    """A single number unchanged, consecutive numbers as {0..3}; None for any other set."""
    first, last = numbers[0], numbers[-1]
    if first == last:
        return str(first)
    return f"{{{first}..{last}}}" if last - first + 1 == len(numbers) else None
