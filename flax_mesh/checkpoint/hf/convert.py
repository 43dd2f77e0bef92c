"""Parameters from and to safetensors, by a table with the name of every array in the files (`mapping`).

The state may have any layout: lists or scanned stacks of layers, one device, any mesh, the groups of a pipeline.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding
from jax.typing import DTypeLike

from flax_mesh.checkpoint.hf.mapping import MappedArray, MappedParam, ParamMapping, map_params
from flax_mesh.checkpoint.hf.quantized import Packed, Scaled, Stored, unpacked
from flax_mesh.checkpoint.hf.safetensors import open_safetensors, write_safetensors
from flax_mesh.errors import ConfigError, Problem
from flax_mesh.fields import check_types
from flax_mesh.modes import array_from
from flax_mesh.sharding.gather import gather
from flax_mesh.text import array_text, at_most, listed, path_lines
from flax_mesh.tree import PyTree, check_dtype, path_and_start

Tree = TypeVar("Tree")
_Bounds = tuple[int, int]  # start and stop of a dim
REPAIR = "Use the config and the table of the model that was saved; pass arrays that have no effect to ignore=."
THREADS = 4  # parameters that are read at a time; the slices that this process needs of each are on the host
_BYTES_IN_FLIGHT = 1 << 28  # from devices to the host
# Balancing biases: models compute with them in float32, and changes below the precision of bfloat16 choose experts.
IN_FLOAT32 = "moe/balance"
COLUMNS = 8  # of a transposed copy at a time: 3 to 8 times as fast as a single copy (elements of 1 to 4 bytes)


@check_types
def load_safetensors(
    folder: str | Path, abstract: Tree, names: Iterable[ParamMapping], *, ignore: Iterable[str] = ()
) -> Tree:
    """Load parameters from safetensors directly into the layout of `abstract`.

    Every device reads only its slices of the memory-mapped files; a slice that several devices hold is read once.
    The files may come from any layout. Floating arrays are cast to the dtypes of `abstract`.

    Args:
        folder: Folder with safetensors, or one file.
        abstract: An nnx.State or another tree of parameters, without an optimizer: ShapeDtypeStructs with shardings, as
            `fm.abstract_state` returns them, or arrays.
        names: Table of names and dims, such as `DECODER_NAMES["llama"]`.
        ignore: Regular expressions for names of arrays in the folder that have no effect in this model.

    Returns:
        A tree of the same structure as `abstract`, of arrays.

    Raises:
        ConfigError: The arrays do not match `abstract`: the error lists every array that is missing, left over, or of
            another shape. Or the table does not match `abstract`, or `abstract` has no shardings over devices.
        CheckpointCorruptedError: The header of a file or the index is invalid. Changed data is not detected, as the
            format has no checksums.

    Example:
        >>> from flax_mesh.checkpoint import ParamMapping, load_safetensors, save_safetensors
        >>> table = [ParamMapping("kernel", "weight", "out in -> in out"), ParamMapping("bias", "bias", "out -> out")]
        >>> make = lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0))
        >>> save_safetensors("exported", nnx.state(make()), table)
        >>> rules = [("kernel", ("embed", "mlp")), ("bias", ("mlp",))]
        >>> abstract = fm.abstract_state(make, fm.create_mesh((2, 4), ("fsdp", "tp")), rules)
        >>> load_safetensors("exported", abstract, table)["kernel"].sharding.spec
        P('fsdp', 'tp')
    """
    params = map_params(abstract, names)
    stored = unpacked(open_safetensors(folder))
    problems = _sharding_problems(params) + _differences(params, stored, tuple(ignore))
    if problems:
        head = f"{folder} does not match the model ({len(problems)} differences):"
        raise ConfigError(
            [Problem("", line, can_ignore=True) for line in path_lines(problems)], head=head, repair=REPAIR
        )
    with ThreadPoolExecutor(THREADS) as pool:
        arrays = list(pool.map(lambda param: _load(param, stored), params))
    return jax.tree.unflatten(jax.tree.structure(abstract), arrays)


@check_types
def save_safetensors(
    folder: str | Path,
    state: PyTree,
    names: Iterable[ParamMapping],
    *,
    config: Mapping[str, object] | None = None,
    dtype: DTypeLike | None = None,
    max_file_bytes: int = 5_000_000_000,
) -> None:
    """Write parameters to a new folder, as one file or several with an index; `config` becomes its config.json.

    The folder must not exist; it is written completely or not at all. `dtype` casts floating arrays, except for
    balancing biases of experts, and replaces the torch_dtype in `config`. Only one parameter of one layer is on the
    host at a time. Works in one process only: in a run over several, save a checkpoint and convert it
    (`flax-mesh checkpoint export`).

    Example:
        >>> from flax_mesh.checkpoint import DECODER_NAMES, huggingface_config, save_safetensors
        >>> from flax_mesh.models import DecoderConfig, make_decoder
        >>> config = DecoderConfig()
        >>> model = make_decoder(config, nnx.Rngs(0))
        >>> save_safetensors("exported", model, DECODER_NAMES["llama"], config=huggingface_config(vars(config)))
    """
    if jax.process_count() > 1:
        raise ConfigError(
            "save_safetensors works in one process only. Save a checkpoint, and use flax-mesh checkpoint export."
        )
    check_dtype(dtype)
    params = map_params(state, names)
    arrays = file_arrays(params, dtype)
    cast = {} if dtype is None else {"torch_dtype": jnp.dtype(dtype).name}
    files = {} if config is None else {"config.json": {**config, **cast}}
    write_safetensors(
        folder, arrays, assembled(_stored_values(params, dtype)), json_files=files, max_file_bytes=max_file_bytes
    )


def file_arrays(params: Iterable[MappedParam], dtype: DTypeLike | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """Name -> shape and dtype of every array in the files; ConfigError if two parameters have the same."""
    all_arrays = [(p, array) for p in params for array in p.arrays]
    alone = Counter((array.name, str(array.within)) for _, array in all_arrays)
    if duplicates := [name for (name, _), count in alone.items() if count > 1]:
        raise ConfigError(
            f"The table maps several parameters to one name: {listed(at_most(duplicates))}. Names must differ."
        )
    return {
        array.name: jax.ShapeDtypeStruct(array.file_shape, cast_dtype(p.path, p.value.dtype, dtype))
        for p, array in all_arrays
    }


def assembled(pieces: Iterable[tuple[MappedArray, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array in the files) from the values of parameters as stored; a joined one when its last part has come."""
    begun: dict[str, np.ndarray] = {}
    missing: dict[str, int] = {}
    for array, value in pieces:
        if not array.within:
            yield array.name, value
            continue
        whole = begun.setdefault(array.name, np.empty(array.whole, value.dtype))
        whole[array.within] = value
        missing[array.name] = missing.get(array.name, whole.size) - value.size
        if not missing[array.name]:
            yield array.name, begun.pop(array.name).reshape(array.file_shape)


def _differences(params: Sequence[MappedParam], stored: Mapping[str, Stored], ignore: Sequence[str]) -> list[str]:
    problems, used = [], set()
    for param in params:
        for array in param.arrays:
            used.add(array.name)
            in_file = stored.get(array.name)
            expected = array_text(jax.ShapeDtypeStruct(array.file_shape, param.value.dtype))
            if in_file is None:
                problems.append(f"{array.name}: only in the model, {expected}")
            elif in_file.shape != array.file_shape or not _can_cast(in_file.dtype, param.value.dtype):
                problems.append(f"{array.name}: folder {array_text(in_file)}, model {expected}")
    left = [name for name in stored.keys() - used if not any(re.search(pattern, name) for pattern in ignore)]
    return problems + [f"{name}: only in the folder, {array_text(stored[name])}" for name in sorted(left)]


def _sharding_problems(params: Sequence[MappedParam]) -> list[str]:
    lines = []
    for param in params:
        sharding = getattr(param.value, "sharding", None)
        if sharding is None or (isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh)):
            lines.append(f"{param.path}: needs a sharding over devices, got {sharding}; use abstract_state with a Mesh")
    return lines


def _load(param: MappedParam, stored: Mapping[str, Stored]) -> jax.Array:
    value, slices = param.value, {}

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index or (), value.shape, strict=True))
        if bounds not in slices:  # replicated over several devices, but read once
            slices[bounds] = read_slice(param.arrays, stored, bounds, value.dtype)
        return slices[bounds]

    return array_from(value.shape, value.sharding, read, value.dtype)


def read_slice(
    arrays: Iterable[MappedArray], stored: Mapping[str, Stored], bounds: Sequence[_Bounds], dtype: DTypeLike
) -> np.ndarray:
    """Read one slice of a parameter that consists of `arrays`; `bounds` are (start, stop) of every dim."""
    out = np.empty([stop - start for start, stop in bounds], dtype)
    for mapped in arrays:
        lead = bounds[: len(mapped.at)]
        if all(start <= at < stop for at, (start, stop) in zip(mapped.at, lead, strict=True)):
            here = tuple(at - start for at, (start, _) in zip(mapped.at, lead, strict=True))
            there = tuple(slice(*pair) for pair in bounds[len(mapped.at) :])
            array, split = stored[mapped.name], mapped.split
            if isinstance(array, Packed):  # its first dim, the experts, is the first one here
                array, there = array.decode(there[0]), (slice(None), *there[1:])
                split = (array.shape[0], *split[1:])
            elif isinstance(array, Scaled):
                array = array.decode(slice(None))
            array = array.reshape(mapped.whole) if mapped.merged else array
            array = array[mapped.within] if mapped.within else array
            copy_slice(out[(*here, ...)], array.reshape(split).transpose(mapped.order)[(*there, ...)])
    return out


def copy_slice(out: np.ndarray, values: np.ndarray) -> None:
    """`out[...] = values`, fast for transposed dims and other dtypes."""
    if values.ndim < 2 or values.strides[-1] == values.itemsize:
        np.copyto(out, values, casting="unsafe")
    elif out.dtype == values.dtype:
        _copy_transposed(out, values)
    else:  # transpose first, since numpy is slow at casting with strides
        ordered = np.empty(values.shape, values.dtype)
        _copy_transposed(ordered, values)
        np.copyto(out, ordered, casting="unsafe")


def _copy_transposed(out: np.ndarray, values: np.ndarray) -> None:
    if out.itemsize <= 8:  # as integers, since numpy is slow at copying foreign dtypes
        out, values = (x.view(f"u{x.itemsize}") for x in (out, values))
    for start in range(0, out.shape[-1], COLUMNS):
        columns = (..., slice(start, start + COLUMNS))
        np.copyto(out[columns], values[columns])


def stored_value(array: MappedArray, value: np.ndarray) -> np.ndarray:
    """The array as stored in the file, from `value[array.at]` of its parameter."""
    out = np.empty(array.split, value.dtype)
    copy_slice(out, np.asarray(value).transpose(np.argsort(array.order)))
    return out.reshape(array.shape)


def _stored_values(params: Iterable[MappedParam], dtype: DTypeLike | None) -> Iterator[tuple[MappedArray, np.ndarray]]:
    """(array, its value) of all parameters; one parameter of one layer is on the host at a time.

    Parameters that are joined in one array follow each other.
    """
    jobs: dict[str, list[tuple[MappedParam, int | None, list[MappedArray]]]] = {}
    for param in params:
        groups: dict[int | None, list[MappedArray]] = {}
        for array in param.arrays:
            groups.setdefault(array.at[0] if param.stacked else None, []).append(array)
        for layer, arrays in groups.items():
            jobs.setdefault(arrays[0].name, []).append((param, layer, arrays))
    for param, layer, arrays in itertools.chain.from_iterable(jobs.values()):
        taken = param.value if layer is None else _take(param.value, layer)
        value = gather(
            taken, dtype=dtype and cast_dtype(param.path, taken.dtype, dtype), bytes_in_flight=_BYTES_IN_FLIGHT
        )
        for array in arrays:
            yield array, stored_value(array, value[array.at[1:] if param.stacked else array.at])


def _take(stack: jax.Array | np.ndarray, layer: int) -> jax.Array | np.ndarray:
    return stack[layer] if isinstance(stack, np.ndarray) else jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False)


def cast_dtype(path: str, stored: DTypeLike, dtype: DTypeLike | None) -> np.dtype:
    """The dtype of a parameter that is exported with the option `dtype`."""
    keeps = dtype is None or not jnp.issubdtype(stored, jnp.floating) or path_and_start(path)[0].endswith(IN_FLOAT32)
    return jnp.dtype(stored if keeps else dtype)


def _can_cast(stored: DTypeLike, target: DTypeLike) -> bool:
    return stored == target or (jnp.issubdtype(stored, jnp.floating) and jnp.issubdtype(target, jnp.floating))
