"""Where a Writer puts steps: a folder of this machine, or a store. In both a step appears at once, when it is complete.

In a folder Orbax writes a step under a temporary name, and its commit is a rename. A store cannot rename: there Orbax
writes to a temporary folder of this machine, from which the files are uploaded, the marker of the commit last.
"""

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from flax_mesh.checkpoint.checksums import MARKERS, files_below
from flax_mesh.checkpoint.find import find_leftovers
from flax_mesh.errors import UnreadableError
from flax_mesh.store import StorePath

_UPLOADS = 8  # at a time


class Place(Protocol):
    """The folder of the steps, as the Writer changes it."""

    def open(self) -> None:
        """Prepare the first save, or the next one after a failure."""
        ...

    def check(self) -> None:
        """Raise OSError if the folder that `open` found is gone."""
        ...

    def written(self, step: int) -> Path:
        """The folder to which Orbax writes a step."""
        ...

    def commit(self, step: int) -> None:
        """Make a step that Orbax has written visible under its name."""
        ...

    def remove_unfinished(self) -> None:
        """Remove the files of a save that failed."""
        ...

    def rename(self, step: int, name: str) -> None: ...

    def withdraw(self, step: int) -> Path:
        """Make a step invisible at once; returns the path that `remove` deletes later."""
        ...

    def remove(self, paths: Iterable[Path]) -> None: ...

    def close(self) -> None: ...


class Folder:
    """A folder of this machine."""

    def __init__(self, path: Path):
        self._path = path
        self._inode: int | None = None  # of the folder, as found or created by the first save

    def open(self) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        self._inode = self._path.stat().st_ino

    def check(self) -> None:
        """One that was created again meanwhile may be on another disk."""
        inode = self._path.stat().st_ino if self._path.is_dir() else None
        if self._inode is not None and inode != self._inode:
            raise OSError("the folder is gone")

    def written(self, step: int) -> Path:
        return self._path / str(step)

    def commit(self, step: int) -> None:
        """Orbax has committed it."""

    def remove_unfinished(self) -> None:
        self.remove(self._path.glob("*.orbax-checkpoint-tmp*"))

    def rename(self, step: int, name: str) -> None:
        os.rename(self._path / str(step), self._path / name)

    def withdraw(self, step: int) -> Path:
        self.rename(step, f"{step}.deleted")
        return self._path / f"{step}.deleted"

    def remove(self, paths: Iterable[Path]) -> None:
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Nothing is open."""


class Store:
    """A folder in a store. A step exists there from the creation of its marker to the deletion of its marker."""

    def __init__(self, path: StorePath):
        self._path = path
        self._here: tempfile.TemporaryDirectory[str] | None = None

    def open(self) -> None:
        self.close()
        self._here = tempfile.TemporaryDirectory(prefix="flax_mesh-")

    def check(self) -> None:
        """A store has no folders that could be gone."""

    def written(self, step: int) -> Path:
        assert self._here is not None
        return Path(self._here.name) / str(step)

    def commit(self, step: int) -> None:
        folder, marker = self.written(step), MARKERS[1]
        names = sorted({*files_below(folder)} - {marker})
        upload = lambda name: (self._path / str(step) / name).write_bytes((folder / name).read_bytes())  # noqa: E731
        with ThreadPoolExecutor(_UPLOADS) as pool:
            list(pool.map(upload, names))
        text = f"Checkpoint commit was successful to {self._path / str(step)} ({uuid.uuid4()})"
        if not (self._path / str(step) / marker).create(text.encode()):
            raise OSError("another process has saved this step")
        shutil.rmtree(folder)

    def remove_unfinished(self) -> None:
        self.close()
        with suppress(UnreadableError):  # the next save removes what cannot be removed now
            self.remove(find_leftovers(self._path))

    def rename(self, step: int, name: str) -> None:
        for file in (old := self._path / str(step)).names():
            (self._path / name / file).write_bytes((old / file).read_bytes())
        self.remove([self.withdraw(step)])

    def withdraw(self, step: int) -> Path:
        (self._path / str(step) / MARKERS[1]).unlink()
        return self._path / str(step)

    def remove(self, paths: Iterable[Path]) -> None:
        for path in paths:
            assert isinstance(path, StorePath)
            with suppress(OSError):
                path.remove()

    def close(self) -> None:
        if self._here is not None:
            self._here.cleanup()
            self._here = None
