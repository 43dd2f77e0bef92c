"""Sizes and names of mesh axes: validation, inference, parsing, splitting between hosts. No devices, no JAX."""

# Users may pass other types than the annotated ones, which this file reports.
# pyright: reportUnnecessaryIsInstance=false

import math
from collections.abc import Sequence

from flax_mesh.fields import is_index
from flax_mesh.text import shortened, shown

DEFAULT_AXIS_DIMS = (1, -1, 1, 1, 1)
DEFAULT_AXIS_NAMES = ("dp", "fsdp", "ep", "tp", "sp")


def format_mesh_shape(names: Sequence[str], sizes: Sequence[int]) -> str:
    """`dp:2,tp:1`, as parsed by `parse_mesh_shape`: all axes, while `text.mesh_text` omits axes of size 1."""
    return ",".join(f"{name}:{size}" for name, size in zip(names, sizes, strict=True))


def check_axis_names(names: Sequence[str]) -> tuple[str, ...]:
    """The names as a tuple; raises a ValueError unless they are unique, non-empty strings."""
    if isinstance(names, str):
        text = shown(names)
        raise ValueError(f"axis_names must be a sequence of names, got the string {text}. Write ({text},).")
    try:
        names = tuple(names)
    except TypeError:
        raise ValueError(f"axis_names must be a sequence of names, got {shown(names)}.") from None
    wrong = [repr(name) for name in names if not isinstance(name, str) or not name]
    if wrong:
        raise ValueError(f"Axis names must be non-empty strings, got {shortened(', '.join(wrong))} in {shown(names)}.")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"Axis names must be unique, but {names} contains {', '.join(twice)} more than once. Rename the duplicates."
        )
    if not names:
        raise ValueError("A mesh requires at least one axis; for one device pass axis_dims=(1,), axis_names=('dp',).")
    return names


def integers(sizes: Sequence[int], argument: str, *, least: int | None = None) -> tuple[int, ...]:
    """The sizes as a tuple of ints. A ValueError names `argument` and all entries that are invalid.

    An entry must be an integer, and at least `least`. Numbers such as 2.5 and strings are refused: `int` accepts them,
    and the mesh would have another shape.
    """
    try:
        values = tuple(sizes)
    except TypeError:
        raise ValueError(f"{argument} must be a sequence of integers, got {shown(sizes)}.") from None
    wrong = [repr(size) for size in values if not is_index(size) or isinstance(size, bool)]
    if wrong:
        raise ValueError(f"{argument} must contain integers, got {shortened(', '.join(wrong))} in {shown(values)}.")
    low = [str(size) for size in values if least is not None and size < least]
    if low:
        raise ValueError(
            f"{argument} must contain integers of at least {least}, got {shortened(', '.join(low))} in {shown(values)}."
        )
    return tuple(int(size) for size in values)


def resolve_dims(
    dims: Sequence[int],
    names: Sequence[str],
    total: int,
    *,
    what: str = "axis_dims",
    unit: str = "devices",
    advice: str = "",
) -> tuple[int, ...]:
    """`dims` with the -1, if any, replaced so that the product is `total`.

    In errors, the argument is called `what` and its sizes are numbers of `unit`; `advice` is appended if the product
    does not match.

    >>> resolve_dims((1, -1, 2), ("dp", "fsdp", "tp"), 8)
    (1, 4, 2)
    """
    sizes = integers(dims, what)
    if len(sizes) != len(names):
        raise ValueError(
            f"{what} has {len(sizes)} sizes {sizes} for {len(names)} axes {tuple(names)}. Pass one size per axis."
        )
    text = format_mesh_shape(names, sizes)
    problems = [f"{name}:{size}" for name, size in zip(names, sizes, strict=True) if size == 0 or size < -1]
    if problems:
        raise ValueError(f"{what} {text}: sizes must be positive, or -1 for one of them; found {', '.join(problems)}.")
    free = [i for i, size in enumerate(sizes) if size == -1]
    if len(free) > 1:
        both = ", ".join(names[i] for i in free)
        raise ValueError(f"{what} {text}: only one size can be -1, found {len(free)} ({both}). Fix all but one.")
    known = math.prod(size for size in sizes if size != -1)
    if free:
        if total % known:
            raise ValueError(
                f"{what} {text}: the given sizes multiply to {known}, which does not divide {total}, the number of "
                f"{unit}, so {names[free[0]]} cannot be inferred. {_repair(sizes, names, total)} {advice}".rstrip()
            )
        return tuple(total // known if size == -1 else size for size in sizes)
    if known != total:
        raise ValueError(
            f"{what} {text}: the sizes multiply to {known}, not to {total}, the number of {unit}. "
            f"{_repair(sizes, names, total)} {advice}".rstrip()
        )
    return sizes


def parse_mesh_shape(text: str, names: Sequence[str], *, omitted: int | None = None) -> dict[str, int]:
    """Axis sizes from `"dp:2,tp:4"` (in the order of the string) or `"2,4"` (in the order of `names`).

    Spaces, `=` instead of `:`, and one -1 are allowed. Every axis of `names` must appear, unless `omitted` is set: it
    is the size of the missing axes, which are appended in the order of `names`. One ValueError reports all mistakes.

    >>> parse_mesh_shape("tp = 4, dp: -1", ("dp", "tp"))
    {'tp': 4, 'dp': -1}
    """
    names = check_axis_names(names)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"A mesh string must contain axis sizes, got {shown(text)}. {_example(names)}")
    items = [item.strip() for item in text.split(",")]
    if not any(":" in item or "=" in item for item in items):
        return _positional(text, items, names)
    sizes: dict[str, int] = {}
    problems: list[str] = []
    malformed: set[str] = set()
    for item in items:
        name, colon, size = (part.strip() for part in item.replace("=", ":").partition(":"))
        if not colon or not name or not _is_int(size):
            problems.append(f"{shown(item)} is malformed: write name:size with an integer size")
            malformed.add(name)
            continue
        if name not in names:
            problems.append(f"unknown axis {shown(name)}: the axes are {', '.join(names)}")
        if name in sizes:
            problems.append(f"duplicate axis {shown(name)}: it is {sizes[name]} and then {int(size)}")
        sizes.setdefault(name, int(size))
    left = [name for name in names if name not in sizes and name not in malformed]
    if left and omitted is None:
        problems.append(f"missing axis {', '.join(map(repr, left))}: add {','.join(f'{name}:1' for name in left)}")
    return _checked(text, sizes | dict.fromkeys(left, omitted or 1), problems, names)


def split_between_hosts(shape: Sequence[int], num_hosts: int) -> tuple[int, ...] | None:
    """How many ways each axis is split so that `num_hosts` hosts own equal blocks, leading axes first, or None.

    Taking gcd(remaining hosts, size) from each axis in turn finds a split whenever one exists: each prime factor of
    `num_hosts` is taken from the earliest axis that has it, so the result is the lexicographically largest split, and
    if a factor remains, no split exists.

    >>> split_between_hosts((4, 6), 6)
    (2, 3)
    """
    left = num_hosts
    splits: list[int] = []
    for size in shape:
        splits.append(math.gcd(left, size))
        left //= splits[-1]
    return tuple(splits) if left == 1 else None


def _repair(sizes: Sequence[int], names: Sequence[str], total: int) -> str:
    """The changes of a single size that make the product match."""
    repairs: list[str] = []
    for i, size in enumerate(sizes):
        others = math.prod(other for j, other in enumerate(sizes) if j != i and other != -1)
        if -1 not in sizes and total % others == 0:
            repairs.append(f"{names[i]}:{total // others}")
        elif -1 in sizes and size > 1:
            repairs += [f"{names[i]}:{d}" for d in range(size - 1, 0, -1) if total % (others * d) == 0][:1]
    return f"Valid changes of one size: {', '.join(repairs)}." if repairs else f"Sizes must multiply to {total}."


def _positional(text: str, items: list[str], names: tuple[str, ...]) -> dict[str, int]:
    problems = [f"{shown(item)} is malformed: write an integer" for item in items if not _is_int(item)]
    if len(items) != len(names):
        problems.append(f"{len(items)} sizes for {len(names)} axes {', '.join(names)}")
    sizes = {name: int(item) for name, item in zip(names, items, strict=False) if _is_int(item)}
    return _checked(text, sizes, problems, names)


def _checked(text: str, sizes: dict[str, int], problems: list[str], names: tuple[str, ...]) -> dict[str, int]:
    problems += [
        f"{name} has size {size}: sizes are positive, or -1" for name, size in sizes.items() if size == 0 or size < -1
    ]
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1:
        problems.append(f"only one size can be -1, found {len(free)} ({', '.join(free)})")
    if problems:
        raise ValueError(f"Mesh string {shown(text)}: {shortened('; '.join(problems), 1000)}. {_example(names)}")
    return sizes


def _example(names: Sequence[str]) -> str:
    sizes = [-1] + [1] * (len(names) - 1)
    return f"For example {format_mesh_shape(names, sizes)!r} or {','.join(map(str, sizes))!r}."


def _is_int(text: str) -> bool:
    return len(text) < 20 and text.removeprefix("-").isdecimal()
