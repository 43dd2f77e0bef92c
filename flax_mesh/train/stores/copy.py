"""The files of a run whose folder is in a store: the run uses a working copy on this machine, which is published.

Rows of metrics are objects metrics/000000.jsonl, metrics/000001.jsonl and so on, of which a run writes only the last,
until that has a megabyte. Together they are metrics.jsonl, whose steps may be repeated if a resumed run was killed.
"""

import errno
import os
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from flax_mesh.errors import ConfigError, SaveError
from flax_mesh.store import StorePath
from flax_mesh.train.stores import lease

METRICS = "metrics.jsonl"
COMPILED = "compiled"  # the cache of compiled programs, which the command line uses
PARTS = "metrics"
LARGEST = 5 * 2**30  # bytes of an object that S3 takes in one request
PART = 2**20  # bytes from which on the rows are in the next object
LOCAL = (COMPILED, "wandb")  # folders that stay on this machine, as hidden files do; wandb sends its files itself
_UNFINISHED = (".new", ".part")


def joined_rows(folder: StorePath) -> tuple[bytes, list[bytes]]:
    """The rows in a metrics.jsonl, of a folder that was copied to the store, and those in its parts."""
    names = folder.names()
    parts = [(folder / name).read_bytes() for name in names if re.fullmatch(rf"{PARTS}/\d{{6}}\.jsonl", name)]
    return (folder / METRICS).read_bytes() if METRICS in names else b"", parts


class RunFiles:
    """The files of the run in `folder`, whose working copy `here` is locked. As a context: with the lease.

    `publish` writes what has changed since the last call to the store. A thread publishes new rows, another one renews
    the lease. At the start the store replaces the working copy, except for what is LOCAL.
    """

    def __init__(self, folder: StorePath, here: Path, say: Callable[[str], None]):
        self._folder, self._here, self._say = folder, here, say
        self._lease, self._lock, self._over = lease.Lease(folder, here, say), threading.Lock(), threading.Event()
        self._sent: dict[str, tuple[int, int]] = {}  # name -> size and time of change
        self._number, self._start, self._last = 0, 0, b""  # of the last part: number, place in metrics.jsonl, content
        self._num_parts = 0  # in the store
        self._unread: list[str] = []  # files that could not be read, one text each
        actions = (self._lease.renew, self._publish_rows)
        self._threads = [threading.Thread(target=self._repeat, args=(action,), daemon=True) for action in actions]

    def __enter__(self) -> "RunFiles":
        with ExitStack() as stack:
            stack.callback(self._end)
            try:
                self._lease.claim()
                self._threads[0].start()  # files may take longer than a lease
                self._fetch()
            except OSError as error:
                raise ConfigError(
                    f"run.folder={self._folder} cannot be used: {error.strerror}; repair that, or use another folder"
                ) from error
            self._threads[1].start()
            stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        with ExitStack() as stack:
            stack.callback(self._end)
            try:
                if not self._lease.is_lost:
                    self.publish()
            except (ConfigError, SaveError) as failure:
                self._say(f"warning: {failure}")

    def _end(self) -> None:
        self._over.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        self._lease.release()

    def _repeat(self, action: Callable[[], None]) -> None:
        while not self._over.wait(lease.RENEWED):
            with suppress(ConfigError, SaveError, OSError):  # the next save raises it
                action()

    def check(self) -> None:
        """ConfigError if another run has the lease, after a renewal."""
        self._lease.renew()

    def publish(self) -> None:
        """Write all changes. SaveError if the store refuses, and ConfigError if another run has the lease."""
        self._publish(lambda: True)

    def _publish(self, is_for_all: Callable[[], bool]) -> None:
        with self._lock:
            try:
                self._lease.renew()
                if is_for_all():
                    self._send_files()
                self._send_rows()
            except OSError as error:
                raise SaveError(
                    f"metrics and other files could not be written to {self._folder}: {error.strerror}; they are in "
                    f"{self._here}, from where the next save writes them. Copy them before you start the run again"
                ) from error

    def _publish_rows(self) -> None:
        self._publish(lambda: not self._rows(self._start).startswith(self._last))

    def _fetch(self) -> None:
        """Replace the working copy by the objects that are directly in the folder, and by the joined metrics."""
        for entry in self._here.iterdir():
            if entry.name not in LOCAL and not entry.name.startswith("."):
                (shutil.rmtree if entry.is_dir() and not entry.is_symlink() else os.unlink)(entry)
        for name in self._folder.names():
            if "/" in name or name in (lease.LEASE, *LOCAL) or not _is_published(name):
                continue  # an object of others would be deleted: `_files` does not find it here
            (self._here / name).write_bytes((self._folder / name).read_bytes())
            self._sent[name] = _status(self._here / name)
        first, parts = joined_rows(self._folder)
        if rows := first + b"".join(parts):
            (self._here / METRICS).write_bytes(rows)
        self._num_parts = len(parts)
        if parts and not first:
            self._number, self._start, self._last = len(parts) - 1, sum(map(len, parts[:-1])), parts[-1]

    def _send_files(self) -> None:
        """All files but the metrics; those that are gone here are deleted there.

        Files that cannot be read, and those that the store refuses, are a warning, not a reason to save nothing more.
        """
        names, unread = _files(self._here), list[str]()
        for name in names:
            try:
                if self._sent.get(name) == (status := _status(self._here / name)):
                    continue
                if status[0] > LARGEST:
                    raise OSError(errno.EFBIG, "it is larger than 5 GiB, which a store refuses")
                self._lease.check()
                (self._folder / name).write_bytes((self._here / name).read_bytes())
            except FileNotFoundError:  # it was renamed meanwhile
                continue
            except OSError as error:
                unread.append(f"{self._here / name}: {error.strerror}")
                continue
            self._sent[name] = status
        if unread and unread != self._unread:
            self._say(f"warning: not written to {self._folder}: {'; '.join(unread)}")
        self._unread = unread
        self._lease.check()
        for name in self._sent.keys() - {*names, METRICS}:
            (self._folder / name).unlink()
            del self._sent[name]

    def _send_rows(self) -> None:
        rows, at = self._rows(self._start), 0
        if not rows.startswith(self._last):  # cut back to a checkpoint, or of another run
            self._number, self._start, self._last = 0, 0, b""
            rows = self._rows(0)
        while at < len(rows):
            end = rows.find(b"\n", at + PART) + 1 or len(rows)
            if rows[at:end] != self._last:
                self._lease.check()
                (self._folder / PARTS / f"{self._number:06}.jsonl").write_bytes(rows[at:end])
                self._num_parts, self._last = max(self._num_parts, self._number + 1), rows[at:end]
            if end < len(rows):
                self._number, self._start, self._last = self._number + 1, self._start + end - at, b""
            at = end
        while self._num_parts > self._number + (self._last != b""):
            (self._folder / PARTS / f"{self._num_parts - 1:06}.jsonl").unlink()
            self._num_parts -= 1
        if self._sent.pop(METRICS, None):
            (self._folder / METRICS).unlink()

    def _rows(self, start: int) -> bytes:
        """The complete lines of metrics.jsonl from the byte `start` on."""
        with suppress(FileNotFoundError), (self._here / METRICS).open("rb") as file:
            file.seek(start)
            rows = file.read()
            return rows[: rows.rfind(b"\n") + 1]
        return b""


def _is_published(name: str) -> bool:
    return not name.startswith(".") and not name.endswith(_UNFINISHED)


def _files(folder: Path) -> Sequence[str]:
    """The names of the files to publish."""
    names: list[str] = []
    for parent, folders, files in os.walk(folder, onerror=_raise):  # not as if the folder was empty
        folders[:] = [
            name for name in folders if not name.startswith(".") and (name not in LOCAL or parent != str(folder))
        ]
        paths = [Path(parent, name) for name in files if _is_published(name)]
        names += [path.relative_to(folder).as_posix() for path in paths if path.is_file() and not path.is_symlink()]
    return sorted({*names} - {METRICS})


def _raise(error: OSError) -> None:
    raise error


def _status(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
