"""Writer: saves steps to a folder, in agreement with the other processes, and deletes the steps that are not retained.

A save has phases, at the end of which processes learn of each other's failures. A step becomes visible under its name
at the end of "commit"; a save that fails before leaves only files that the next save removes.
"""

import ctypes
import json
import os
import re
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax

from flax_mesh.checkpoint.checksums import BLOCK, CHECKSUMS, MARKERS, PART, SYSTEM_ERROR, files_below
from flax_mesh.checkpoint.find import UPLOAD, committed_steps, find_leftovers
from flax_mesh.errors import ConfigError, PeerError, SaveError, UnreadableError
from flax_mesh.processes.agree import Phases
from flax_mesh.store import StorePath, is_present

_REQUESTS = 8  # at a time
# The storage reports the end of "folders", "files" and "commit".
PHASES = ("begin", "folders", "start", "files", "commit", "clear")


class Writer:
    """Writes one step at a time to `folder`, in the background. `host_bytes` and `compress` are as in Checkpointer.

    `retained` returns the steps to retain, and is called after each save.
    """

    def __init__(
        self,
        folder: Path,
        retained: Callable[[], set[int]],
        before_commit: Callable[[], None] | None,
        *,
        host_bytes: int | None,
        compress: bool,
    ):
        self._folder, self._retained = folder, retained
        before = before_commit or (lambda: None)
        self._place = _Store(folder, before) if isinstance(folder, StorePath) else _Folder(folder, before)
        self._host_bytes, self._compress = host_bytes, compress
        self._storage: Any = None  # created by the first save, and again after a failed one
        self._is_tidy = False  # whether leftovers were removed since `_storage` was created
        self._has_failed = False  # whether the last save did: threads of the storage may still write its files
        self._saving: int | None = None  # the step being saved
        self._upload: Future[None] | None = None  # of this step, to a store
        self._phases: Any = None  # of the last save
        self._deleting: threading.Thread | None = None

    def begin(self, step: int, damaged: Collection[int]) -> None:
        """Start a save: agree with the other processes, remove leftovers and quarantine the `damaged` steps.

        Raises ConfigError if `step` exists and is not damaged. The previous save must have ended.
        """
        self._phases = Phases("save", PHASES)
        existing = ""
        with self._as_save_error(step):
            # All processes see the same store, which answers one of them alone.
            if step not in damaged and (self._clears or not isinstance(self._place, _Store)):
                existing = self._existing(step)
        if existing:
            problem = f"{self._folder} already contains {existing}; nothing was overwritten."
            # Another process may not see this step, and would wait for this one.
            self._phases.failed(f"process {jax.process_index()}: {problem}")
            raise ConfigError(problem)
        with self._as_save_error(step):
            self._open()
            self._phases.passed("begin")  # from here on no other process writes to the folder
            self._tidy(damaged)

    def _existing(self, step: int) -> str:
        """What a save of `step` would overwrite, "" if nothing."""
        path = self._folder / str(step)
        if step in committed_steps(self._folder):
            return f"a checkpoint of step {step}"
        # `_tidy` removes the leftovers of a store; a folder of this machine has them under other names.
        is_free = path in find_leftovers(self._folder) or not is_present(path)
        return "" if is_free else f"{step}, which is not a committed checkpoint"

    def write(self, step: int, arrays: Iterable[tuple[str, object]], metadata: Mapping[str, object]) -> None:
        """Write the step that `begin` has started; returns once the arrays may change."""
        with self._as_save_error(step):
            self._saving = step
            self._storage.save(self._place.written(step), arrays, metadata)
            self._phases.passed("start")
            if isinstance(self._place, _Store) and not self._phases.together:
                pool = ThreadPoolExecutor(1)
                self._upload = pool.submit(self._commit)
                pool.shutdown(wait=False)

    def wait(self) -> None:
        """Return once the step being written is durable and old steps are being deleted; SaveError if that failed."""
        if self._saving is not None:
            with self._as_save_error(self._saving):
                if self._upload is not None:
                    self._upload.result()
                else:
                    self._storage.wait()
                    if not self._phases.together:
                        self._meet("commit")
            self._saving = None
            if self._has_failed:
                self._remove_unfinished()
                self._has_failed = False

    def close(self) -> None:
        """End the background threads, after `wait`."""
        if self._deleting is not None:
            self._deleting.join()
        if self._storage is not None:
            self._storage.close()
            self._storage = None
        self._place.close()

    def clear_leftovers(self) -> None:
        """Remove the leftovers of interrupted saves and deletions."""
        self._place.remove(find_leftovers(self._folder))

    def _commit(self) -> None:
        self._storage.wait()
        self._meet("commit")

    def _meet(self, phase: str) -> None:
        """Wait for all processes at the end of a phase, in the thread that reached it."""
        if phase == "folders" and self._clears:
            self._place.claim()
        if phase == "files" and not self._clears:
            self._place.send()
        if phase == "commit" and self._clears:
            self._place.commit()
        self._phases.passed(phase)
        if phase == "commit":
            if self._clears:
                self._delete(sorted({*committed_steps(self._folder)} - self._retained()))
            self._phases.passed("clear")

    @contextmanager
    def _as_save_error(self, step: int) -> Iterator[None]:
        """Turn the errors of storage libraries into a SaveError of one line."""
        try:
            yield
        # Tensorstore raises ValueError for most file errors, Orbax RuntimeError and TimeoutError.
        except (OSError, RuntimeError, TypeError, ValueError) as error:
            reason, self._saving = _reason(error), None
            if self._phases.together and not isinstance(error, PeerError):
                reason = f"process {jax.process_index()}: {reason}"
            self._phases.failed(reason)
            self._give_up()
            committed = self._phases.is_past("commit")
            what = f"the checkpoint of step {step} could not be saved"
            what = "old checkpoints could not be removed" if committed else what
            left: list[int] = []
            with suppress(UnreadableError):
                left = [other for other in committed_steps(self._folder) if committed or other != step]
            newest = f"the newest checkpoint is of step {left[-1]}" if left else "no checkpoint exists"
            raise SaveError(f"{what} in {self._folder}: {reason}; {newest}") from error

    @property
    def _clears(self) -> bool:
        """Whether this process renames and deletes; of several only process 0 does."""
        return jax.process_index() == 0

    def _open(self) -> None:
        from flax_mesh.checkpoint.orbax import Storage

        self._place.check()
        if self._storage is None:
            self._place.open()
            file_bytes = BLOCK if isinstance(self._place, _Store) else None
            gather = self._place.gather if isinstance(self._place, _Store) and jax.process_count() > 1 else None
            limits = {"host_bytes": self._host_bytes, "file_bytes": file_bytes}
            self._storage = Storage(
                compress=self._compress, meet=self._meet, finish=self._place.finish, gather=gather, **limits
            )
            self._is_tidy = False

    def _give_up(self) -> None:
        """Remove a failed save: the errors that the storage still reports and its files, for the disk may be full."""
        if self._storage is not None:
            self._storage.abandon()
            self._storage = None
        self._has_failed = True
        self._remove_unfinished()

    def _remove_unfinished(self) -> None:
        if self._clears:
            self._place.remove_unfinished()

    def _tidy(self, damaged: Collection[int]) -> None:
        """Remove the leftovers of earlier saves, and quarantine damaged steps by renaming them."""
        if self._clears and not self._is_tidy:
            if self._deleting is not None:
                self._deleting.join()
            self.clear_leftovers()
        self._is_tidy = True
        for step in damaged if self._clears else ():
            names = (f"{step}.damaged" + (f"-{i}" if i > 1 else "") for i in range(1, 10_000))
            self._place.rename(step, next(name for name in names if not is_present(self._folder / name)))

    def _delete(self, steps: Iterable[int]) -> None:
        """Withdraw now, so that no partly deleted checkpoint is ever seen, and delete in the background."""
        renamed = [self._place.withdraw(step) for step in steps]
        if self._deleting is not None:
            self._deleting.join()
        # Files that cannot be deleted are leftovers, which the next run removes.
        self._deleting = threading.Thread(target=lambda: self._place.remove(renamed))
        self._deleting.start()


class _Folder:
    """The folder of the steps on this machine. Orbax writes there under a temporary name, and commits by a rename."""

    def __init__(self, path: Path, before_commit: Callable[[], None]):
        self._path, self._before_commit = path, before_commit
        self._step = -1  # the last one that was saved, or is being saved
        self._inode: int | None = None  # of the folder, as found or created by the first save

    def open(self) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        self._inode = self._path.stat().st_ino

    def check(self) -> None:
        """Raise OSError if the folder was removed. One that was created again meanwhile may be on another disk."""
        inode = self._path.stat().st_ino if self._path.is_dir() else None
        if self._inode is not None and inode != self._inode:
            raise OSError("the folder is gone")

    def written(self, step: int) -> Path:
        """Where Orbax writes this step, which is then the step of the methods below."""
        self._step = step
        return self._path / str(step)

    def claim(self) -> None:
        """In process 0, before any process writes files."""

    def send(self) -> None:
        """In another process, after it has written its files."""

    def finish(self) -> None:
        """In process 0, when its folder of the step is complete and Orbax renames it next."""
        self._before_commit()

    def commit(self) -> None:
        """In process 0, after it has written its files and all others have sent theirs."""
        self.check()
        if self._step not in committed_steps(self._path):
            raise OSError("its folder is gone")

    def remove_unfinished(self) -> None:
        self.remove(self._path.glob("*.orbax-checkpoint-tmp*"))

    def rename(self, step: int, name: str) -> None:
        os.rename(self._path / str(step), self._path / name)

    def withdraw(self, step: int) -> Path:
        """Make a step invisible at once. Returns the path to delete."""
        self.rename(step, f"{step}.deleted")
        return self._path / f"{step}.deleted"

    def remove(self, paths: Iterable[Path]) -> None:
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Nothing is open."""


class _Store(_Folder):
    """A folder of steps in a store. A step exists there from the creation of its marker until the marker is deleted.

    A store cannot rename, so Orbax writes to a temporary folder of each process, from which the files are uploaded. The
    first object of a step, UPLOAD, and its marker, the last, are created once. So of two runs that save the same step,
    one uploads it and the other fails; and a run whose objects another one has removed as leftovers of an interrupted
    save fails, too.
    """

    def __init__(self, path: StorePath, before_commit: Callable[[], None]):
        super().__init__(path, before_commit)
        self._here = ""  # the temporary folder
        self._claim = b""  # what UPLOAD of the step contains

    def open(self) -> None:
        self.close()
        self._here = tempfile.mkdtemp(prefix="flax_mesh-")

    def check(self) -> None:
        """A store has no folder that could be gone."""

    def claim(self) -> None:
        self._claim = str(uuid.uuid4()).encode()
        if not (self._target / UPLOAD).create(self._claim):
            raise OSError("another process has saved this step, or is saving it")

    def send(self) -> None:
        (folder,) = Path(self._here).iterdir()  # with a name of Orbax, as the folder of the state in it has
        for state in folder.glob("state.*"):
            state.rename(folder / "state")
        self._upload(folder)

    def gather(self, folder: Path) -> dict[str, StorePath]:
        """Fetch the checksums that the other processes have uploaded, to the `folder` of a step.

        Returns where the files of each are, by the name of their folder.
        """
        target, names = self._target, self._target.names()
        parts = [part for process in range(1, jax.process_count()) if (part := PART.format(process)) in names]
        if len(parts) < jax.process_count() - 1:
            raise OSError("another process has removed objects of this step")
        with ThreadPoolExecutor(_REQUESTS) as pool:
            for part, content in zip(parts, pool.map(lambda part: (target / part).read_bytes(), parts), strict=True):
                (folder / part).write_bytes(content)
            list(pool.map(lambda part: (target / part).unlink(), parts))
        folders = {name.split("/")[1] for name in names if name.startswith("state/ocdbt.process_")}
        return {name: target / "state" / name for name in sorted(folders)}

    def finish(self) -> None:
        """The rename on this machine commits nothing."""

    def written(self, step: int) -> Path:
        return Path(self._here, super().written(step).name)

    def commit(self) -> None:
        folder, target, claim = Path(self._here, str(self._step)), self._target, self._claim
        names = {UPLOAD, *json.loads((folder / CHECKSUMS).read_bytes())["files"], *self._upload(folder)}
        if {*target.names()} != names or (target / UPLOAD).read_bytes() != claim:
            raise OSError("another process has removed objects of this step, or added some")
        self._before_commit()
        if not (target / MARKERS[1]).create(f"Checkpoint commit was successful to {target} ".encode() + claim):
            raise OSError("another process has saved this step")

    def _upload(self, folder: Path) -> set[str]:
        """Upload the files below `folder`, and remove it. Returns their names."""
        names, target = {*files_below(folder)} - {MARKERS[1]}, self._target
        with ThreadPoolExecutor(_REQUESTS) as pool:
            list(pool.map(lambda name: (target / name).write_bytes((folder / name).read_bytes()), sorted(names)))
        shutil.rmtree(folder)
        _return_freed_memory()
        return names

    @property
    def _target(self) -> StorePath:
        target = self._path / str(self._step)
        assert isinstance(target, StorePath)
        return target

    def remove_unfinished(self) -> None:
        self.close()
        if jax.process_count() > 1:
            return  # others may still upload files; the next save removes them, when all have ended
        with suppress(OSError, UnreadableError):  # the next save removes what cannot be removed now
            if (self._target / UPLOAD).read_bytes() == self._claim:
                self.remove({*find_leftovers(self._path)} & {self._target})

    def rename(self, step: int, name: str) -> None:
        for file in files_below(old := self._path / str(step)):
            (self._path / name / file).write_bytes((old / file).read_bytes())
        self.remove([self.withdraw(step)])

    def withdraw(self, step: int) -> Path:
        (self._path / str(step) / MARKERS[1]).unlink()
        return self._path / str(step)

    def remove(self, paths: Iterable[Path]) -> None:
        for path in paths:
            assert isinstance(path, StorePath)
            with suppress(OSError):
                path.remove(last=UPLOAD)

    def close(self) -> None:
        shutil.rmtree(self._here, ignore_errors=True)


def _return_freed_memory() -> None:
    """Give memory that was freed back to the system: glibc keeps it for each thread, up to 64 MiB, as if it leaked."""
    with suppress(AttributeError, OSError):  # another library of C
        ctypes.CDLL(None).malloc_trim(0)


def _reason(error: BaseException) -> str:
    """The text of an error on one line; of tensorstore's long texts only the reason that the system reported."""
    # Since Python 3.13, shutil adds a file to an OSError without a number, whose text is then "[Errno None] None".
    unnumbered = isinstance(error, OSError) and error.errno is None and error.args
    text = " ".join(str(error.args[0] if unnumbered else error).split()) or type(error).__name__
    if code := SYSTEM_ERROR.search(text):
        return os.strerror(int(code[1]))
    return re.sub(r" \[\w+=.*", "", text)[:300]
