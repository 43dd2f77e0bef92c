"""The table of the names of parameters in safetensors files, and the arrays that it maps a state to.

The table maps one parameter to one or several arrays. The experts of a layer, for example, are one parameter here:

    "layers/{i}/moe/up/kernel"  (e, d, f)       "model.layers.{i}.mlp.experts.{e}.up_proj.weight"  (f, d)

    value[0]  (d, f)  <- transposed <-  model.layers.3.mlp.experts.0.up_proj.weight  (f, d)
    value[1]  (d, f)  <- transposed <-  model.layers.3.mlp.experts.1.up_proj.weight  (f, d)
"""

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from flax_mesh.errors import ConfigError
from flax_mesh.text import array_text, at_most, listed, path_lines
from flax_mesh.tree import PyTree, Shaped, named_leaves, path_and_start

NUMBER = "(?:0|[1-9][0-9]*)"  # in a path; "01" would have the name of "1" in the files
_IN_BLOCK = re.compile(rf"/each/({NUMBER})/")


class ParamMapping(NamedTuple):
    """One line of a table: the path of a parameter, its name in the files, and "dims in the file -> dims here".

    ParamMapping("layers/{i}/attention/q/kernel", "model.layers.{i}.self_attn.q_proj.weight", "(h c) d -> d h c") is a
    kernel (d, h, c) that is stored as (h * c, d) with h outermost. `{i}` is the number of the layer; if the path of a
    parameter lacks it, the parameter is a scanned stack with the layers as its first dim. A letter in the name that is
    not a dim in the file, such as {e}, numbers arrays that are stacked along that dim here: "f d -> e d f" for experts.
    Such letters come first.

    Several parameters may be one array in the files, whose lines follow each other: with `joined="concatenated"` along
    its first dim (the projections of Phi-3), with "concatenated experts" along its second one (the experts of Qwen3.5),
    with "alternating" along its last one, an element of each in turn (the experts of gpt-oss), with "inner" along the
    second of the dims here, as the parts of every head (the queries and gates of Qwen3-Next).

    `after` is the path of another list or stack whose layers come first in the files, or several with spaces between
    them: `{i}` in the name is then the number of those layers plus `{i}` in the path. A state must contain all of them.

    `{j}` in the path is the number of a layer in a block: `{i}` in the name is then the number of layers in the blocks
    before it plus `{j}`. All blocks have as many layers as the largest `{j}` shows.
    """

    path: str
    name: str
    dims: str
    joined: str = ""
    after: str = ""


class MappedArray(NamedTuple):
    """An array in the files; its `reshape(split).transpose(order)` is `value[at]` of a parameter.

    If several parameters are joined in the array, it is the part `within` of an array of the shape `whole`, which has
    the shape `merged` in the file if that is another one.
    """

    name: str
    at: tuple[int, ...]
    shape: tuple[int, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]
    within: tuple[slice, ...] = ()
    whole: tuple[int, ...] = ()
    merged: tuple[int, ...] = ()

    @property
    def file_shape(self) -> tuple[int, ...]:
        return self.merged or self.whole or self.shape


class MappedParam(NamedTuple):
    """A parameter and the arrays that it consists of; in a `stacked` one the first dim is the layer."""

    path: str
    value: Any
    stacked: bool
    arrays: tuple[MappedArray, ...]


def map_params(state: PyTree, names: Iterable[ParamMapping]) -> list[MappedParam]:
    """Every parameter with its arrays; one ConfigError lists all parameters that do not match the table."""
    table, params = tuple(names), []
    named = named_leaves(state)
    is_array = lambda x: hasattr(x, "dtype") and isinstance(getattr(x, "shape", None), tuple)  # noqa: E731
    if others := [path or "the value itself" for path, x in named if not is_array(x)]:
        raise ConfigError(f"the leaves must be arrays, and these are not: {listed(at_most(others))}")
    sizes = [int(match[1]) + 1 for path, _ in named if (match := _IN_BLOCK.search(path))]
    paths = Counter(path for path, _ in named)
    problems = [f"{path}: {count} parameters have this path" for path, count in paths.items() if count > 1]
    lines = []
    counts = {line.after: sum(_num_layers(x, named) for x in line.after.split()) for line in table if line.after}
    for path, value in named:
        try:
            param, line = _map_param(path, value, table, counts, max(sizes, default=1))
        except ConfigError as error:
            problems += error.problems
        else:
            params.append(param)
            lines.append(table.index(line))
    if problems:
        raise ConfigError(path_lines(problems), head="The table of names does not match these parameters:")
    return _joined(params, lines, table)


def _joined(params: list[MappedParam], lines: Sequence[int], table: Sequence[ParamMapping]) -> list[MappedParam]:
    """`params`, the arrays of joined lines as parts of the array that has their name."""
    sharing: dict[str, list[MappedArray]] = {}
    for line, param in sorted(zip(lines, params, strict=True), key=lambda item: item[0]):
        for array in param.arrays if table[line].joined else ():
            sharing.setdefault(array.name, []).append(array)

    def part(array: MappedArray, joined: str) -> MappedArray:
        parts = sharing[array.name]
        index = next(i for i, other in enumerate(parts) if other is array)
        dims, merged = [slice(None)] * len(array.shape), ()
        if joined == "alternating":
            dims[-1] = slice(index, None, len(parts))
            whole = (*array.shape[:-1], array.shape[-1] * len(parts))
        elif joined == "inner":
            start, size = sum(other.split[1] for other in parts[:index]), array.split[1]
            dims[:2] = [slice(None), slice(start, start + size)]
            whole = (array.split[0], sum(other.split[1] for other in parts), *array.split[2:])
            merged = whole if len(array.shape) == len(whole) else (whole[0] * whole[1], *whole[2:])
            array = array._replace(shape=array.split)
        else:
            dim = int(joined == "concatenated experts")
            start = sum(other.shape[dim] for other in parts[:index])
            dims[dim] = slice(start, start + array.shape[dim])
            total = sum(other.shape[dim] for other in parts)
            whole = (*array.shape[:dim], total, *array.shape[dim + 1 :])
        return array._replace(within=tuple(dims), whole=whole, merged=merged)

    return [
        param._replace(arrays=tuple(part(array, joined) for array in param.arrays)) if joined else param
        for param, joined in ((param, table[line].joined) for line, param in zip(lines, params, strict=True))
    ]


def _num_layers(stack: str, named: Iterable[tuple[str, Shaped]]) -> int:
    """Number of layers of a list, a scanned stack or the parts of one."""
    count = 0
    for path, value in named:
        base, start = path_and_start(path)
        if match := re.match(rf"{re.escape(stack)}/(?:({NUMBER})/)?", base):
            count = max(count, int(match[1]) + 1 if match[1] else start + value.shape[0])
    return count


def _map_param(
    path: str, value: Shaped, table: Sequence[ParamMapping], num_layers: Mapping[str, int], block: int
) -> tuple[MappedParam, ParamMapping]:
    base, start = path_and_start(path)
    matches = [(mapping, match) for mapping in table if (match := _pattern(mapping.path).fullmatch(base))]
    if len(matches) != 1:
        lines = ", ".join(mapping.path for mapping, _ in matches) or "none"
        raise ConfigError(f"{path} {array_text(value)}: exactly one line must match it, but these do: {lines}")
    line, match = matches[0]
    name, dims = line.name, line.dims
    numbers = {key: int(number) for key, number in match.groupdict().items() if number is not None}
    first = dict.fromkeys([*match.groupdict()][:1], num_layers.get(line.after, 0))
    in_block = numbers.pop("j", None)
    outer = [key for key in match.groupdict() if key != "j"]
    layers = [key for key in outer if key not in numbers]  # the layer letter of a stack, otherwise empty
    groups, here = _parse(dims)
    flat = [letter for group in groups for letter in group]
    numbered = here[: len(here) - len(flat)]  # letters that number arrays
    if set(re.findall(r"\{(\w+)\}", name)) != {*outer, *numbered}:
        raise ConfigError(f"{path}: {name!r} must contain in braces {{{', '.join([*outer, *numbered])}}}")
    if len(value.shape) != len(layers) + len(here):
        what = f"{'a stack of ' * len(layers)}{' '.join(here)}"
        raise ConfigError(f"{path} {array_text(value)}: its line has the dims {what!r}")
    counts = dict(zip([*layers, *here], value.shape, strict=True))
    over = {letter: range(counts[letter]) for letter in [*layers, *numbered]}
    split = tuple(counts[letter] for letter in flat)
    shape = tuple(math.prod(counts[letter] for letter in group) for group in groups)
    order = tuple(flat.index(letter) for letter in here[len(numbered) :])
    arrays = []
    for at in itertools.product(*over.values()):
        where = numbers | dict(zip(over, at, strict=True))
        where |= {key: where[key] + start for key in layers}
        where |= {key: where[key] + count for key, count in first.items()}
        where |= {key: block * where[key] + in_block for key in first if in_block is not None}
        arrays.append(MappedArray(name.format(**where), at, shape, split, order))
    return MappedParam(path, value, bool(layers), tuple(arrays)), line


@functools.cache
def _pattern(path: str) -> re.Pattern[str]:
    """ "layers/{i}/q/{e}" as a pattern with groups i and e; the first one, "{i}/", is optional."""
    first, *others = re.findall(r"\{(\w+)\}", path) or [None]
    text = re.escape(path)
    if first:
        text = text.replace(rf"\{{{first}\}}/", rf"(?:(?P<{first}>{NUMBER})/)?")
    for letter in others:
        text = text.replace(rf"\{{{letter}\}}", rf"(?P<{letter}>{NUMBER})")
    return re.compile(text)


@functools.cache
def _parse(dims: str) -> tuple[list[list[str]], list[str]]:
    """ "(h c) d -> d h c" as [["h", "c"], ["d"]] and ["d", "h", "c"]."""
    there, arrow, after = dims.partition("->")
    groups = [(inside or alone).split() for inside, alone in re.findall(r"\(([^()]*)\)|(\w+)", there)]
    here, flat = after.split(), [letter for group in groups for letter in group]
    once = len(set(here)) == len(here) and len(set(flat)) == len(flat)
    if not arrow or not once or not set(flat) <= set(here) or set(here[: len(here) - len(flat)]) & set(flat):
        raise ConfigError(
            f"{dims!r} must be 'dims in the file -> dims here', such as '(h c) d -> d h c', with each letter once."
        )
    return groups, here
