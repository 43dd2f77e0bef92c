"""Parameters from safetensors and back, by a table that says what every array is called there and how its dims lie.

The state may have any layout: lists or scanned stacks of layers, one device, any mesh, the groups of a pipeline.
"""

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from flax_mesh.checkpoint.hf.safetensors import open_safetensors, write_safetensors
from flax_mesh.errors import ConfigError
from flax_mesh.sharding.gather import gather
from flax_mesh.text import array_text
from flax_mesh.tree import named_leaves, path_and_start

Tree = TypeVar("Tree")
REPAIR = "  Use the config and the table of the model that was saved; ignore= takes names that have no place here."
BYTES_IN_FLIGHT = 1 << 28  # from devices to the host
COLUMNS = 8  # of a transposed copy at a time: three to eight times as fast as all at once (1 to 4 byte elements)


class ParamMapping(NamedTuple):
    """One line of a table: a parameter, its name in the files, and its dims there and here.

    ParamMapping("layers/{i}/attention/q/kernel", "model.layers.{i}.self_attn.q_proj.weight", "(h c) d -> d h c") is a
    kernel (d, h, c) that is stored as (h * c, d), h outermost. `{i}/` may be absent from a path: the leaf is then a
    scanned stack, with the layers as its first dim. A letter that stands in the name, as {e}, and not among the dims
    there numbers arrays of which each is a part of the leaf, such as experts: "f d -> e d f". Those letters stand
    first.
    """

    path: str
    name: str
    dims: str


class MappedArray(NamedTuple):
    """An array of the files; `reshape(split).transpose(order)` makes `value[at]` of a parameter of it."""

    name: str
    at: tuple[int, ...]
    shape: tuple[int, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]


class MappedParam(NamedTuple):
    """A parameter and the arrays that make it up; in a `stacked` one the first dim is that of the layers."""

    path: str
    value: Any
    stacked: bool
    arrays: tuple[MappedArray, ...]


def load_safetensors(
    folder: str | Path, abstract: Tree, names: Iterable[ParamMapping], *, ignore: Iterable[str] = (), threads: int = 4
) -> Tree:
    """The parameters in `folder` (or one file), laid out and cast as `abstract` says; every device gets its own slices.

    abstract: an nnx.State, or another tree, of parameters alone: without those of an optimizer. Arrays do as well
    ignore: patterns of names in the folder that have no place in the model
    threads: so many leaves are read at a time; of each, what this process needs is on the host

    Raises one ConfigError that lists every array that is missing, left over or of another shape.
    """
    params = map_params(abstract, names)
    stored = open_safetensors(folder)
    problems = _sharding_problems(params) + _differences(params, stored, tuple(ignore))
    if problems:
        raise ConfigError([f"{folder} is of another model ({len(problems)} differences):", *problems, REPAIR])
    with ThreadPoolExecutor(threads) as pool:
        arrays = list(pool.map(lambda param: _load(param, stored), params))
    return jax.tree.unflatten(jax.tree.structure(abstract), arrays)


def save_safetensors(
    folder: str | Path,
    state: Any,
    names: Iterable[ParamMapping],
    *,
    config: Mapping[str, Any] | None = None,
    dtype: Any = None,
    max_file_bytes: int = 5_000_000_000,
) -> None:
    """Write parameters as `folder`, one file or several with an index; `config` becomes its config.json.

    The folder must not exist, and appears whole or not at all. `dtype` casts floating arrays, and is then the
    torch_dtype of the config. One parameter of one layer is on the host at a time. For one process: of a run over
    several, save a checkpoint and convert that.
    """
    if jax.process_count() > 1:
        raise ConfigError("save_safetensors writes from one process. Save a checkpoint, and convert it in one process.")
    params = map_params(state, names)
    arrays = [(one.name, jax.ShapeDtypeStruct(one.shape, _dtype(p.value, dtype))) for p in params for one in p.arrays]
    if twins := [name for name, count in Counter(name for name, _ in arrays).items() if count > 1]:
        raise ConfigError(f"The table gives several parameters one name: {', '.join(twins)}. Names must differ.")
    cast = {} if dtype is None else {"torch_dtype": jnp.dtype(dtype).name}
    files = {} if config is None else {"config.json": {**config, **cast}}
    write_safetensors(
        folder, dict(arrays), _stored_values(params, dtype), json_files=files, max_file_bytes=max_file_bytes
    )


def map_params(state: Any, names: Iterable[ParamMapping]) -> list[MappedParam]:
    """Every parameter with the arrays that make it up; one ConfigError lists those that do not fit the table."""
    table, params, problems = tuple(names), [], []
    for path, value in named_leaves(state):
        try:
            params.append(_map_param(path, value, table))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(["The table of names does not fit these parameters:", *problems])
    return params


def _map_param(path: str, value: Any, table: Sequence[ParamMapping]) -> MappedParam:
    base, start = path_and_start(path)
    found = [(mapping, match) for mapping in table if (match := _pattern(mapping.path).fullmatch(base))]
    if len(found) != 1:
        lines = ", ".join(mapping.path for mapping, _ in found) or "none"
        raise ConfigError(f"  {path} {array_text(value)}: one line must name it, but these do: {lines}")
    (_, name, dims), match = found[0]
    numbers = {key: int(number) for key, number in match.groupdict().items() if number is not None}
    layers = [key for key in match.groupdict() if key not in numbers]  # of a stack, else empty
    groups, here = _parse(dims)
    flat = [letter for group in groups for letter in group]
    apart = here[: len(here) - len(flat)]  # letters that number arrays
    if set(re.findall(r"\{(\w+)\}", name)) != {*match.groupdict(), *apart}:
        raise ConfigError(f"  {path}: {name!r} must have in braces {{{', '.join([*match.groupdict(), *apart])}}}")
    if len(value.shape) != len(layers) + len(here):
        what = f"{'a stack of ' * len(layers)}{' '.join(here)}"
        raise ConfigError(f"  {path} {array_text(value)}: its line has {what!r} as its dims")
    counts = dict(zip([*layers, *here], value.shape, strict=True))
    over = {letter: range(counts[letter]) for letter in [*layers, *apart]}
    split = tuple(counts[letter] for letter in flat)
    shape = tuple(math.prod(counts[letter] for letter in group) for group in groups)
    order = tuple(flat.index(letter) for letter in here[len(apart) :])
    arrays = []
    for at in itertools.product(*over.values()):
        where = numbers | dict(zip(over, at, strict=True))
        where |= {key: where[key] + start for key in layers}
        arrays.append(MappedArray(name.format(**where), at, shape, split, order))
    return MappedParam(path, value, bool(layers), tuple(arrays))


@functools.cache
def _pattern(path: str) -> re.Pattern[str]:
    """ "layers/{i}/q/{e}" as a pattern with groups i and e; "{i}/", the first, may be absent."""
    first, *others = re.findall(r"\{(\w+)\}", path) or [None]
    text = re.escape(path)
    if first:
        text = text.replace(rf"\{{{first}\}}/", rf"(?:(?P<{first}>\d+)/)?")
    for letter in others:
        text = text.replace(rf"\{{{letter}\}}", rf"(?P<{letter}>\d+)")
    return re.compile(text)


@functools.cache
def _parse(dims: str) -> tuple[list[list[str]], list[str]]:
    """ "(h c) d -> d h c" as [["h", "c"], ["d"]] and ["d", "h", "c"]."""
    there, arrow, after = dims.partition("->")
    groups = [(inside or alone).split() for inside, alone in re.findall(r"\(([^()]*)\)|(\w+)", there)]
    here, flat = after.split(), [letter for group in groups for letter in group]
    once = len(set(here)) == len(here) and len(set(flat)) == len(flat)
    if not arrow or not once or not set(flat) <= set(here) or set(here[: len(here) - len(flat)]) & set(flat):
        raise ConfigError(f"{dims!r} must be dims there -> dims here, such as '(h c) d -> d h c': each letter once.")
    return groups, here


def _differences(params: Sequence[MappedParam], stored: Mapping[str, np.ndarray], ignore: Sequence[str]) -> list[str]:
    problems, used = [], set()
    for param in params:
        for one in param.arrays:
            used.add(one.name)
            found = stored.get(one.name)
            wanted = array_text(jax.ShapeDtypeStruct(one.shape, param.value.dtype))
            if found is None:
                problems.append(f"  {one.name}: only in the model, {wanted} ({param.path})")
            elif found.shape != one.shape or not _can_cast(found.dtype, param.value.dtype):
                problems.append(f"  {one.name}: folder {array_text(found)}, model {wanted} ({param.path})")
    left = [name for name in stored.keys() - used if not any(re.search(pattern, name) for pattern in ignore)]
    return problems + [f"  {name}: only in the folder, {array_text(stored[name])}" for name in sorted(left)]


def _sharding_problems(params: Sequence[MappedParam]) -> list[str]:
    found = []
    for param in params:
        sharding = getattr(param.value, "sharding", None)
        if sharding is None or (isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh)):
            found.append(f"  {param.path}: needs a sharding over devices, got {sharding}; abstract_state gives them")
    return found


def _load(param: MappedParam, stored: Mapping[str, np.ndarray]) -> jax.Array:
    value, done = param.value, {}

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        bounds = tuple(one.indices(size)[:2] for one, size in zip(index or (), value.shape, strict=True))
        if bounds not in done:  # several devices may hold the same
            done[bounds] = read_slice(param.arrays, stored, bounds, value.dtype)
        return done[bounds]

    return jax.make_array_from_callback(value.shape, value.sharding, read, dtype=value.dtype)


def read_slice(
    arrays: Sequence[MappedArray], stored: Mapping[str, np.ndarray], bounds: Sequence[tuple[int, int]], dtype: Any
) -> np.ndarray:
    """A slice of the parameter that `arrays` make up, (start, stop) of every dim; nothing else is read."""
    out = np.empty([stop - start for start, stop in bounds], dtype)
    for one in arrays:
        lead = bounds[: len(one.at)]
        if all(start <= at < stop for at, (start, stop) in zip(one.at, lead, strict=True)):
            here = tuple(at - start for at, (start, _) in zip(one.at, lead, strict=True))
            there = tuple(slice(*pair) for pair in bounds[len(one.at) :])
            copy_slice(out[(*here, ...)], stored[one.name].reshape(one.split).transpose(one.order)[(*there, ...)])
    return out


def copy_slice(out: np.ndarray, values: np.ndarray) -> None:
    """`out[...] = values`, whatever the order of their dims and their dtypes."""
    if values.ndim < 2 or values.strides[-1] == values.itemsize:
        np.copyto(out, values, casting="unsafe")
    elif out.dtype == values.dtype:
        _copy_across(out, values)
    else:  # put into order first, for numpy is slow at casting what lies across
        ordered = np.empty(values.shape, values.dtype)
        _copy_across(ordered, values)
        np.copyto(out, ordered, casting="unsafe")


def _copy_across(out: np.ndarray, values: np.ndarray) -> None:
    if out.itemsize <= 8:  # as integers, for numpy is slow at copying dtypes not its own
        out, values = (x.view(f"u{x.itemsize}") for x in (out, values))
    for start in range(0, out.shape[-1], COLUMNS):
        columns = (..., slice(start, start + COLUMNS))
        np.copyto(out[columns], values[columns])


def stored_value(array: MappedArray, value: Any) -> np.ndarray:
    """The array as it is stored, from `value[array.at]` of its parameter."""
    out = np.empty(array.split, value.dtype)
    copy_slice(out, np.asarray(value).transpose(np.argsort(array.order)))
    return out.reshape(array.shape)


def _stored_values(params: Iterable[MappedParam], dtype: Any) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array as it is stored) of all parameters, one of them in one layer at a time on the host."""
    for param in params:
        groups: dict[Any, list[MappedArray]] = {}
        for one in param.arrays:
            groups.setdefault(one.at[0] if param.stacked else None, []).append(one)
        for layer, arrays in groups.items():
            taken = param.value if layer is None else _take(param.value, layer)
            whole = gather(taken, dtype=dtype, bytes_in_flight=BYTES_IN_FLIGHT)
            for one in arrays:
                yield one.name, stored_value(one, whole[one.at[1:] if param.stacked else one.at])


def _take(stack: Any, layer: int) -> Any:
    return stack[layer] if isinstance(stack, np.ndarray) else jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False)


def _dtype(value: Any, dtype: Any) -> Any:
    return jnp.dtype(dtype) if dtype is not None and jnp.issubdtype(value.dtype, jnp.floating) else value.dtype


def _can_cast(found: Any, wanted: Any) -> bool:
    return found == wanted or (jnp.issubdtype(found, jnp.floating) and jnp.issubdtype(wanted, jnp.floating))
