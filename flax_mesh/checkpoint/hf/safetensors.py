"""The safetensors file format: arrays are memory-mapped, folders are written atomically.

A file consists of the length N of its header (8 bytes, little-endian), N bytes of JSON with dtype, shape and offsets of
every array, and the data, without gaps (github.com/huggingface/safetensors, "Format"). A folder contains
model.safetensors, or several files and model.safetensors.index.json, which maps names to files. Both are untrusted
input. The package safetensors is not used, because it needs all arrays of a file in memory to write it.
"""

import json
import math
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax.numpy as jnp
import numpy as np

from flax_mesh.errors import CheckpointCorruptedError, ConfigError, UnreadableError
from flax_mesh.fields import read_file, user_path
from flax_mesh.store import model_here
from flax_mesh.text import at_most, listed, path_lines, shown
from flax_mesh.tree import Shaped, in_batches

SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER = 100_000_000  # bytes; the limit that the format sets
MAX_DIMS, MAX_SIZE = 32, 2**50  # below the limits of numpy
# Dtype in a file -> numpy's. Dtypes below a byte are left out, since JAX does not pack them.
DTYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8"},
    **{"U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"},
}
CODES = {jnp.dtype(name): code for code, name in DTYPES.items()}


class _FileSlice(NamedTuple):
    """Where an array is stored: bytes `begin` to `end` of the data of its file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def open_safetensors(path: str | Path) -> dict[str, np.ndarray]:
    """Memory-map every array of a file or a folder, by name: a slice reads only its pages. Arrays are read-only.

    Raises one CheckpointCorruptedError that lists all errors in the headers and the index. The format has no checksums:
    changed data is not detected.
    """
    path = model_here(path)
    if not path.is_dir():
        return _open_file(path)
    single, index = path / SINGLE_FILE, path / INDEX
    if single.exists() == index.exists():
        names = ", ".join(sorted(file.name for file in path.glob("*.safetensors"))) or "no safetensors files"
        if single.exists():
            raise ConfigError(f"{path} must hold either {SINGLE_FILE} or {INDEX}, not both; it contains {names}.")
        raise ConfigError(
            f"{path} has no parameters: it contains {names}, and neither {SINGLE_FILE} nor {INDEX}. "
            "Add the safetensors files of the model; other formats, such as pytorch_model.bin, are not read."
        )
    return _open_file(single) if single.exists() else _open_sharded(path)


def write_safetensors(
    folder: str | Path,
    arrays: Mapping[str, Shaped],
    values: Iterable[tuple[str, np.ndarray]],
    *,
    json_files: Mapping[str, object] | None = None,
    copies: Iterable[Path] = (),
    file: str = SINGLE_FILE,
    max_file_bytes: int = 5_000_000_000,
) -> None:
    """Write a folder atomically: it appears complete, with its data synced to disk, or not at all.

    folder: must not exist, or be empty
    arrays: name -> anything with the shape and dtype of the array
    values: (name, array) for each of them, once, in any order; only one at a time is in memory
    json_files: further files, such as {"config.json": {...}}
    copies: files to copy, under the names that they have
    file: the name of the file, if all arrays are in one
    max_file_bytes: limit for the data in a file, unless a single array is larger

    After an error the folder is unchanged. A process that is killed leaves a hidden folder beside it.
    """
    folder = user_path(folder).absolute()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder} exists; nothing was overwritten. Pass a folder that does not exist, or remove it.")
    if max_file_bytes < 1:
        raise ConfigError(f"max_file_bytes must be at least 1, got {max_file_bytes}.")
    files = _plan(arrays, max_file_bytes, file)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        work = Path(temporary) / folder.name
        work.mkdir()
        places = {}
        for name, entries in files.items():
            header = _header(entries)
            (work / name).write_bytes(header)
            places |= {array: (work / name, len(header), stored) for array, stored in entries.items()}
        _write_values(places, values)
        for name, data in {**_index(files), **(json_files or {})}.items():
            (work / name).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        for path in copies:
            shutil.copyfile(path, work / path.name)
        for path in [*work.iterdir(), work]:
            _sync(path)
        work.rename(folder)
    _sync(folder.parent)


def read_json(path: Path) -> Any:
    """Parse an untrusted JSON file; CheckpointCorruptedError if it is invalid."""
    with refusals(path):
        data = read_file(path)
    return _parse_json(path, data)


@contextmanager
def refusals(path: str | Path) -> Iterator[None]:
    """Raise UnreadableError where the system refuses to read `path`."""
    try:
        yield
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error.strerror}") from error


def _open_sharded(folder: Path) -> dict[str, np.ndarray]:
    index = read_json(folder / INDEX)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        _refuse(folder / INDEX, ['it must be an object with a "weight_map" from names to files'])
    if strange := sorted({repr(file) for file in weight_map.values() if not _is_file_name(file)}):
        _refuse(folder / INDEX, [f"{file} must be the name of a .safetensors file in the folder" for file in strange])
    all_arrays: dict[str, np.ndarray] = {}
    problems = []
    for file in sorted(set(weight_map.values())):
        try:
            arrays = _open_file(folder / file)
        except ConfigError as error:
            problems += error.lines
            continue
        expected = {name for name, where in weight_map.items() if where == file}
        problems += [f"{name}: listed in the index, but not in {file}" for name in expected - arrays.keys()]
        problems += [f"{name}: in {file}, but not listed in the index" for name in arrays.keys() - expected]
        all_arrays |= arrays
    if problems:
        raise CheckpointCorruptedError(sorted(problems), head=f"{folder / INDEX} and its files do not match:")
    return all_arrays


def _is_file_name(file: object) -> bool:
    """Whether `file` is the name of a visible file directly in the folder."""
    return isinstance(file, str) and bool(re.fullmatch(r"[\w-][\w.-]*\.safetensors", file, re.ASCII))


def _open_file(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    with refusals(path):
        header_size, entries = _read_header(path)
        data = np.memmap(path, mode="r")[8 + header_size :]
    return {
        # asarray: slices of a memmap are memmaps, which are slower and have no use here
        name: np.asarray(data)[stored.begin : stored.end].view(stored.dtype).reshape(stored.shape)
        for name, stored in entries.items()
    }


def _read_header(path: Path) -> tuple[int, dict[str, _FileSlice]]:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > min(size - 8, _MAX_HEADER):
            _refuse(path, [f"its header should have {length} bytes, but the file has {size} (limit {_MAX_HEADER})"])
        header = _parse_json(path, file.read(length))
    if not isinstance(header, dict):
        _refuse(path, ["its header must be a JSON object"])
    metadata = header.pop("__metadata__", {})
    problems = []
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        problems.append("__metadata__ must map strings to strings")
    entries = {}
    for name, entry in header.items():
        stored = _entry(entry)
        if isinstance(stored, str):
            problems.append(f"{name!r}: {stored}")
        elif not name or not name.isprintable():
            problems.append(f"{name!r}: a name must be printable text")
        else:
            entries[name] = stored
    if problems := problems or _layout_problems(entries, size - 8 - length):
        _refuse(path, problems)
    return length, entries


def _entry(entry: object) -> _FileSlice | str:
    """The entry, or a text on its error."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        return f"must have dtype, shape and data_offsets, got {shown(entry)}"
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        return f"dtype must be one of {', '.join(DTYPES)}, got {shown(code)}"
    if not _are_sizes(shape) or len(shape) > MAX_DIMS or math.prod(max(size, 1) for size in shape) > MAX_SIZE:
        return f"shape must be at most {MAX_DIMS} non-negative integers and {MAX_SIZE} elements, got {shown(shape)}"
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"data_offsets must be two ascending non-negative integers, got {shown(offsets)}"
    dtype = jnp.dtype(DTYPES[code])
    size = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != size:
        return f"{code} {shape} needs {size} bytes, but data_offsets are {offsets}"
    return _FileSlice(dtype, tuple(shape), *offsets)


def _layout_problems(entries: Mapping[str, _FileSlice], data_size: int) -> list[str]:
    """The format requires that arrays are contiguous, do not overlap and fill the file."""
    problems, end, before = [], 0, "the header"
    for name, stored in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if stored.end > data_size:
            problems.append(f"{name!r}: ends at byte {stored.end} of the data, which has {data_size} bytes")
        elif stored.begin != end:
            what = "overlaps" if stored.begin < end else "leaves a gap after"
            problems.append(f"{name!r}: begins at byte {stored.begin}, which {what} {before} (it ends at {end})")
        end, before = max(end, stored.end), repr(name)
    if not problems and end != data_size:
        problems.append(f"{data_size - end} bytes after {before} belong to no array")
    return problems


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= MAX_SIZE for value in values)


def _parse_json(path: Path, text: bytes) -> object:
    def without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
        parsed = dict(pairs)
        if len(parsed) < len(pairs):
            duplicates = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
            raise ValueError(f"duplicate keys: {listed(at_most(duplicates))}")
        return parsed

    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:  # invalid UTF-8, invalid JSON, very long numbers, very deep nesting
        _refuse(path, [f"not valid JSON: {error}"])


def _refuse(path: Path, problems: Sequence[str]) -> NoReturn:
    raise CheckpointCorruptedError(path_lines(problems), head=f"{path} is damaged, or not in the expected format:")


def _plan(arrays: Mapping[str, Shaped], max_file_bytes: int, single: str) -> dict[str, dict[str, _FileSlice]]:
    """The entries of every file: names in natural order, a new file where the next array would exceed the limit."""
    sizes = {name: math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for name, x in arrays.items()}
    wrong = [f"{name}: {x.dtype}" for name, x in arrays.items() if jnp.dtype(x.dtype) not in CODES]
    wrong += [f"{name!r}: a name must be printable text" for name in arrays if not name or not name.isprintable()]
    if wrong:
        raise ConfigError(path_lines(wrong), head="the safetensors format cannot store:")
    groups = [*in_batches(sorted(arrays, key=_natural), sizes.__getitem__, max_file_bytes)] or [[]]
    planned = {}
    for number, names in enumerate(groups, 1):
        end, entries = 0, {}
        # Wide dtypes come first, so that every array is aligned.
        for name in sorted(names, key=lambda name: -jnp.dtype(arrays[name].dtype).itemsize):
            begin, end = end, end + sizes[name]
            entries[name] = _FileSlice(jnp.dtype(arrays[name].dtype), tuple(arrays[name].shape), begin, end)
        planned[single if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"] = entries
    return planned


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sort key that puts layer 2 before layer 10: the number with more digits is larger."""
    return [
        (part.isdecimal(), len(part.lstrip("0")) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", name)
    ]


def _header(entries: Mapping[str, _FileSlice]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers refuses files without it
    for name, (dtype, shape, begin, end) in entries.items():
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # to align the data
    return len(text).to_bytes(8, "little") + text


def _index(files: Mapping[str, Mapping[str, _FileSlice]]) -> dict[str, object]:
    if len(files) == 1:
        return {}
    total = sum(stored.end - stored.begin for entries in files.values() for stored in entries.values())
    weight_map = {name: file for file, entries in files.items() for name in entries}
    return {INDEX: {"metadata": {"total_size": total}, "weight_map": weight_map}}


def _write_values(places: Mapping[str, tuple[Path, int, _FileSlice]], values: Iterable[tuple[str, np.ndarray]]) -> None:
    missing = dict(places)
    for name, array in values:
        if name not in missing:
            raise ValueError(f"{name}: in `values` twice, or not in `arrays`")
        file, start, stored = missing.pop(name)
        if (array.shape, array.dtype) != (stored.shape, stored.dtype):
            raise ValueError(
                f"{name}: {stored.dtype}{stored.shape} in `arrays`, {array.dtype}{array.shape} in `values`"
            )
        with file.open("r+b") as out:
            out.seek(start + stored.begin)
            out.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    if missing:
        raise ValueError(f"in `arrays`, but not in `values`: {listed(at_most(list(missing)))}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
