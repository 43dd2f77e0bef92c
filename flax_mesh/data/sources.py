"""The rows of `data.source`: a file of JSON lines, a Parquet file, or a dataset of the Hugging Face hub."""

# pyright: reportMissingImports=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

import gzip
import importlib.util
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from flax_mesh.checkpoint.hf.kept import DATASET, model_folder
from flax_mesh.data.config import ChatConfig
from flax_mesh.data.tokenizers.chat import EXTRA
from flax_mesh.errors import ConfigError, Problem, labelled
from flax_mesh.text import one_line

Rows: TypeAlias = Iterator[tuple[int, bytes | Mapping[str, object]]]  # the number of each, from 1, and its content
KEYS = {"messages", "prompt", "completion", "text", "chosen", "rejected", "tools"}
ROWS_AT_A_TIME = 256
JSON_LINES, PARQUET = (".jsonl", ".jsonl.gz"), ".parquet"


def open_rows(config: ChatConfig) -> tuple[str, Rows]:
    """The file or the dataset by its name, and its rows, of which only a few are in memory at a time.

    Raises a ConfigError for a source that is none of these, here or when its rows are read.
    """
    with labelled("data.source"):
        path = model_folder(config.source, DATASET)
    if path.is_dir():
        return config.source, _of_dataset(path, config)
    if not path.is_file() or not path.name.endswith((*JSON_LINES, PARQUET)):
        kinds = "a .jsonl, .jsonl.gz or .parquet file, a folder with a dataset, or an id of the hub (org/name)"
        raise ConfigError(Problem("data.source", f"must be {kinds}", value=config.source))
    given = {"data.split": config.split != ChatConfig.split, "data.subset": bool(config.subset)}
    if names := [name for name, is_given in given.items() if is_given]:
        raise ConfigError(
            [Problem(name, f"is for datasets, but data.source={path} is a file; remove it") for name in names]
        )
    return str(path), _of_parquet(path) if path.name.endswith(PARQUET) else _of_lines(path)


def _of_lines(path: Path) -> Rows:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from ((i, line) for i, line in enumerate(file, 1) if line.strip())
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"data.source={path} cannot be read: {error}") from error


def _of_parquet(path: Path) -> Rows:
    _require("pyarrow", path)
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            used = [name for name in file.schema_arrow.names if name in KEYS]
            batches = file.iter_batches(ROWS_AT_A_TIME, columns=used or None)
            yield from _numbered(row for batch in batches for row in batch.to_pylist())
    except (OSError, ValueError) as error:  # errors of pyarrow are one of them
        raise ConfigError(f"data.source={path} cannot be read: {one_line(error, 200)}") from error


def _of_dataset(folder: Path, config: ChatConfig) -> Rows:
    _require("datasets", folder)
    import datasets

    try:
        yield from _numbered(
            datasets.load_dataset(str(folder), config.subset or None, split=config.split, streaming=True)
        )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        which = f"data.subset={config.subset} " * bool(config.subset) + f"data.split={config.split}"
        raise ConfigError(f"data.source={config.source} {which} cannot be read: {one_line(error, 300)}") from error


def _require(package: str, path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"data.source={path} {EXTRA.format(package)}")


def _numbered(rows: Iterable[Mapping[str, object]]) -> Rows:
    """Without the nulls in messages: a column gives every object all of the keys that any of them has."""
    for number, row in enumerate(rows, 1):
        yield number, {name: _without_nulls(value) for name, value in row.items()}


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without_nulls(x) for name, x in value.items() if x is not None}
    return [_without_nulls(x) for x in value] if isinstance(value, list) else value
