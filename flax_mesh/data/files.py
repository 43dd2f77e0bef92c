"""Finding the files of `data.source`: relative posix path -> path, sorted."""

import codecs
import difflib
import glob
import itertools
import os
import sysconfig
from pathlib import Path

from flax_mesh.errors import ConfigError
from flax_mesh.fields import user_path
from flax_mesh.text import count_text

TEXT_SUFFIXES = (".txt", ".md", ".py", ".rst", ".json", ".csv")
TOKEN_SUFFIXES = (".npy", ".bin")
NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
TEXT_PROBE_BYTES = 64 * 1024


def stdlib_files() -> dict[str, Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = {name: path for name, path in _walk(root, NOT_STDLIB).items() if path.suffix == ".py"}
    if not files:
        raise ConfigError(f"{root} contains no .py files (Python without sources). Use a text file instead.")
    return files


def find_files(source: str) -> dict[str, Path]:
    path = user_path(source)
    if os.path.isfile(path):
        return {path.name: path}
    if os.path.isdir(path):
        return _text_files(path)
    fixed = Path(*itertools.takewhile(lambda part: glob.escape(part) == part, path.parts))
    if fixed == path or not os.path.isdir(fixed):
        raise _missing(fixed)
    matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True) if os.path.isfile(match))
    if not matches:
        raise ConfigError(f"no file in {fixed.absolute()} matches {source}.")
    return _distinct({match.relative_to(fixed).as_posix(): match for match in matches})


def _text_files(root: Path) -> dict[str, Path]:
    def is_text(path: Path) -> bool:
        return path.suffix.lower() in TEXT_SUFFIXES or (not path.suffix and is_utf8(path))

    files = _walk(root, excluded=set())
    texts = {name: path for name, path in files.items() if is_text(path)}
    if not texts:
        tokens = {path.suffix.lower() for path in files.values()} & set(TOKEN_SUFFIXES)
        hint = "".join(f" For its token files, use {root / '**' / ('*' + suffix)}." for suffix in sorted(tokens))
        raise ConfigError(
            f"{root} contains no text files (suffix {' '.join(TEXT_SUFFIXES)}, or none and UTF-8) "
            f"among its {count_text(len(files), 'file')}.{hint}"
        )
    return texts


def _walk(root: Path, excluded: set[str]) -> dict[str, Path]:
    def fail(error: OSError) -> None:  # by default os.walk skips folders that cannot be read
        raise error

    files: dict[str, Path] = {}
    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = [name for name in folders if name not in excluded and not name.startswith(".")]
        paths = [Path(folder, name) for name in names if not name.startswith(".")]
        files |= {path.relative_to(root).as_posix(): path for path in paths if os.path.isfile(path)}
    return _distinct(files)


def _distinct(files: dict[str, Path]) -> dict[str, Path]:
    """Sort by name. A file with several names (links) is kept once, so that it cannot be in both parts."""
    by_target = {os.path.realpath(files[name]): name for name in sorted(files, reverse=True)}
    return {name: files[name] for name in sorted(by_target.values())}


def _missing(path: Path) -> ConfigError:
    path = path.absolute()
    folder = next(parent for parent in path.parents if os.path.isdir(parent))
    first_missing = path.relative_to(folder).parts[0]
    similar = difflib.get_close_matches(first_missing, os.listdir(folder), n=3)
    hint = f"; did you mean {' or '.join(similar)}?" if similar else "."
    return ConfigError(f"{path} does not exist; the nearest folder that does is {folder}{hint}")


def is_utf8(path: Path) -> bool:
    """Whether the first 64 KiB are UTF-8. A character may be incomplete at their end."""
    with path.open("rb") as file:
        head = file.read(TEXT_PROBE_BYTES)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True
