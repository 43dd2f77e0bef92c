"""Formatting for messages and reports: counts, bytes, meshes, arrays, groups of paths, aligned tables, plain data."""

import importlib.metadata
import itertools
import math
import re
import textwrap
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

Item = TypeVar("Item")
Key = TypeVar("Key")

UNLIMITED = 100_000  # characters in a line
GAP = 2  # characters between the columns of a table
MOST_LINES = 24  # limit of a list in a message, so that it fits a terminal
NUMBER = re.compile(r"(?<![^/.\[])(0|[1-9][0-9]{0,8})(?![^/.\]])")  # a whole component of a path
PATH = re.compile(r"^(\s*[^\s:]*)")  # at the beginning of a line
SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def version_of(package: str) -> str:
    """The version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "not installed"


def plural(noun: str, count: int) -> str:
    """The noun in singular or plural, depending on `count`: `file` or `files`, `process` or `processes`."""
    return noun if count == 1 else f"{noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"


def count_text(count: int, noun: str) -> str:
    """`1 file`, `1,024 files`."""
    return f"{count:,} {plural(noun, count)}"


def listed(items: Iterable[object]) -> str:
    """`2, 3, 5`."""
    return ", ".join(map(str, items))


def shortened(text: str, most: int = 200) -> str:
    """The text, or its beginning and its length, in at most `most` characters."""
    end = f"... ({len(text):,} characters)"
    return text if len(text) <= most else f"{text[: max(0, most - len(end))]}{end}"


def shown(value: object) -> str:
    """The repr of a value, shortened, for an error."""
    return shortened(repr(value))


def first_line(error: BaseException) -> str:
    """The first line of the text of an error, to show it."""
    return next(iter(lines_of(error)), "")


def lines_of(error: BaseException) -> list[str]:
    """The lines of the text of an error, to show them."""
    return str(error).strip().splitlines()


def says(error: BaseException, *texts: str) -> bool:
    """Whether the text of an error of another library contains these texts: JAX's and Flax's errors have no codes."""
    return all(text in str(error) for text in texts)


def one_line(error: BaseException, most: int | None = None) -> str:
    """The text of an error without line breaks, at most `most` characters of it."""
    return " ".join(str(error).split())[:most]


def at_most(lines: Sequence[str], most: int = MOST_LINES) -> list[str]:
    """The lines, or the first `most` of them and the number of the others."""
    return [*lines[:most], *([f"and {len(lines) - most:,} more"] if len(lines) > most else [])]


def processes_text(processes: Iterable[int]) -> str:
    """`process 2`, `processes 2, 3`."""
    numbers = sorted(set(processes))
    return f"{plural('process', len(numbers))} {listed(numbers)}"


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
    groups: list[tuple[str, list[int]]] = []
    for indices in grouped(range(len(paths)), lambda i: (*parts[i][::2], keys[i])).values():
        columns = zip(*(map(int, parts[i][1::2]) for i in indices), strict=True)
        choices = [sorted(set(column)) for column in columns]
        texts = [_range_text(choice) for choice in choices]
        if math.prod(map(len, choices)) == len(indices) and None not in texts:
            words = parts[indices[0]][::2]
            groups.append(("".join(f"{word}{text}" for word, text in zip(words, [*texts, ""], strict=True)), indices))
        else:
            groups += [(paths[i], [i]) for i in indices]
    return sorted(groups, key=lambda group: group[1][0])


def group_lines(lines: Iterable[str]) -> list[str]:
    """Lines that begin with a path; lines that differ only in the numbers of their paths become one.

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
    """An aligned table of `width` characters; the columns in `right` are right-aligned.

    If it is too wide, cells are continued on the next line after a space or a /, first in the columns in `wrap`, then
    in all other columns. Numbers and names are never cut: the table stays wider if they do not fit.
    """
    columns = [list(column) for column in zip(heads, *rows, strict=True)]
    widths = [max(map(len, column)) for column in columns]
    least = [max(map(_least_width, column)) for column in columns]
    for some in (wrap, heads):
        while sum(widths) + GAP * (len(heads) - 1) > width:
            shrinking = [i for i, head in enumerate(heads) if head in some and widths[i] > least[i]]
            if not shrinking:
                break
            widths[max(shrinking, key=widths.__getitem__)] -= 1
    lines: list[str] = []
    for row in zip(*columns, strict=True):
        cells = [_folded(cell, size) for cell, size in zip(row, widths, strict=True)]
        for part in itertools.zip_longest(*cells, fillvalue=""):
            aligned = [
                text.rjust(size) if head in right else text.ljust(size)
                for head, text, size in zip(heads, part, widths, strict=True)
            ]
            lines.append((" " * GAP).join(aligned).rstrip())
    return "\n".join(lines)


@dataclass(frozen=True)
class Table:
    """A table of a report, for text and for HTML. `right` and `wrap` are heads, as in `table_text`."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    right: Collection[str] = ()
    wrap: Collection[str] = ()

    def to_text(self, width: int = UNLIMITED) -> str:
        """The table below its caption; "" if it has no rows."""
        text = table_text(self.heads, self.rows, width, right=self.right, wrap=self.wrap)
        return "\n".join(filter(None, [self.caption, text])) if self.rows else ""


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Key -> items with this key; keys and items are in the order of `items`."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def plain_data(value: Any) -> Any:
    """Named tuples as dicts and tuples as lists, at any depth: data for `json.dumps`."""
    value = value._asdict() if hasattr(value, "_asdict") else value
    if isinstance(value, Mapping):
        return {name: plain_data(each) for name, each in cast("Mapping[object, object]", value).items()}
    return [plain_data(each) for each in cast("Sequence[object]", value)] if isinstance(value, tuple | list) else value


def folded(text: str, width: int, indent: str = "") -> str:
    """The text in lines of at most `width` characters, except for words that are longer, such as paths."""
    options: dict[str, Any] = {"break_on_hyphens": False, "break_long_words": False}
    return textwrap.fill(text, max(width, 20), subsequent_indent=indent, **options)


def _pieces(cell: str) -> list[str]:
    """The parts of a cell after which it may be continued on the next line, without the indentation of the cell."""
    return re.findall(r"[^ /]*[ /]+|[^ /]+", cell.lstrip(" ")) or [""]


def _indent(cell: str) -> str:
    return " " * (len(cell) - len(cell.lstrip(" ")))


def _least_width(cell: str) -> int:
    return len(_indent(cell)) + max(len(piece.rstrip(" ")) for piece in _pieces(cell))


def _folded(cell: str, width: int) -> list[str]:
    """The lines of a cell."""
    lines = [_indent(cell)]
    for piece in _pieces(cell):
        if len(lines[-1]) + len(piece.rstrip(" ")) > width and lines[-1].strip():
            lines.append(_indent(cell))
        lines[-1] += piece
    return [line.rstrip(" ") for line in lines]


def _range_text(numbers: Sequence[int]) -> str | None:
    """A single number unchanged, consecutive numbers as {0..3}; None for any other set."""
    first, last = numbers[0], numbers[-1]
    if first == last:
        return str(first)
    return f"{{{first}..{last}}}" if last - first + 1 == len(numbers) else None
