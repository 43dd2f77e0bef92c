"""The run folder: metrics.jsonl, config.txt and checkpoints/. Process 0 selects, locks and writes it.

Nothing is written before the first row of metrics: a run that fails earlier leaves no folder, or the old one unchanged.
"""

import errno
import fcntl
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax

from flax_mesh.checkpoint import Checkpointer
from flax_mesh.checkpoint.find import CHECKPOINTS, LAST_STEP
from flax_mesh.errors import ConfigError, SaveError, UnreadableError
from flax_mesh.processes import assert_equal, broadcast_from_process_0
from flax_mesh.recipe.overrides import RECORDED
from flax_mesh.store import StorePath, is_present, stored_path, working_copy
from flax_mesh.text import count_text
from flax_mesh.train.hooks.load import Row
from flax_mesh.train.stores.copy import COMPILED, METRICS, RunFiles, joined_rows

CONFIG, LOCK = RECORDED, ".lock"
PLAIN_ROW = re.compile(rb'\{"step": ([0-9]{1,18})(?:,[^{}\0]*)?\}')  # not two rows; found 10 times faster than by JSON
KINDS = {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder"}
FOLDER = ("a folder", os.R_OK | os.W_OK | os.X_OK)
# The required kind and rights of each entry. To replace a config.txt no right to write it is required.
ENTRIES = {METRICS: ("a file", os.R_OK | os.W_OK), CONFIG: ("a file", 0), CHECKPOINTS: FOLDER}


def is_first() -> bool:
    """Whether this is process 0, which writes files and prints for all processes."""
    return jax.process_index() == 0  # pyright: ignore[reportUnknownMemberType] (of JAX)


def next_free(folder: Path) -> Path:
    """`folder`, or the first of folder-2, folder-3 ... that does not exist."""
    candidates = (folder, *(folder.with_name(f"{folder.name}-{i}") for i in range(2, 10_000)))
    return next(path for path in candidates if not is_present(path))


@contextmanager
def run_folder(folder: Path) -> Generator[None]:
    """Create the folder if it does not exist, and lock it against a second run. Raises ConfigError if that fails.

    If nothing was added to it in the block, the folder and its parents are removed again, as far as they were created.
    """
    if problem := _problem(folder, *FOLDER):
        raise ConfigError(f"run.folder: {problem}")
    created = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            before = {*os.listdir(folder)}
            # The lock of the folder is not lost if a file in it is deleted. On a network file system it may exclude the
            # processes of this machine only; there the lock of the file excludes processes of other machines.
            for path, flags in ((folder, os.O_RDONLY), (folder / LOCK, os.O_RDWR | os.O_CREAT)):
                descriptor = os.open(path, flags, 0o666)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel releases it however the run ends
        except BlockingIOError:
            raise ConfigError(
                f"run.folder={folder} is in use by another run; stop that run, or use another folder"
            ) from None
        except OSError as error:
            _remove_empty(created)
            raise ConfigError(
                f"run.folder={folder} cannot be written ({error.strerror}); use another folder"
            ) from error
        stack.callback(_remove_unused, folder, before, created)  # while the folder is locked
        if problems := [text for name, wanted in ENTRIES.items() if (text := _problem(folder / name, *wanted))]:
            raise ConfigError([f"run.folder: {problem}" for problem in problems])
        yield


class Place(NamedTuple):
    """The folder of a run. If it is in a store, `publish` writes its files there, and is called before a save.

    Every process calls it; process 0 writes, and its errors are raised in all. `check` raises ConfigError in process 0
    if it has lost the lease.
    """

    folder: Path
    publish: Callable[[], None]
    check: Callable[[], None]


@contextmanager
def folder_of_run(wanted: Path, restart: bool, say: Callable[[str], None]) -> Generator[Place]:
    """Yield the run folder, selected and locked by process 0. A ConfigError of process 0 is raised in all processes."""
    if isinstance(wanted, StorePath) and wanted.parts == wanted.place:
        raise ConfigError(f"run.folder={wanted} is a bucket; use a folder in it, such as {wanted / 'run'}")
    files: RunFiles | None = None
    with ExitStack() as stack:

        def choose() -> str:
            nonlocal files
            folder = next_free(wanted) if restart else wanted
            stack.enter_context(run_folder(working_copy(folder)))
            if isinstance(folder, StorePath):
                files = stack.enter_context(RunFiles(folder, working_copy(folder), say))
            return str(folder)

        def publish_here() -> str:
            try:
                if files is not None:
                    files.publish()
            except SaveError as error:
                return f"{error}"
            return ""

        def publish() -> None:
            if problem := broadcast_from_process_0("publish", publish_here):
                raise SaveError(problem)

        folder = stored_path(broadcast_from_process_0("folder", choose))
        nothing = lambda: None  # noqa: E731
        yield Place(folder, publish if isinstance(folder, StorePath) else nothing, files.check if files else nothing)


def latest_step(checkpointer: Checkpointer) -> int | None:
    """The newest valid step, verified by process 0 only. Removes the leftovers of interrupted saves."""

    def look() -> str:
        checkpointer.clear_leftovers()
        step = checkpointer.latest_step()
        return json.dumps([step, list(checkpointer.damaged.items())])

    step, damaged = json.loads(broadcast_from_process_0("latest step", look))
    checkpointer.damaged = dict(damaged)
    return step


class MetricsFile:
    """metrics.jsonl of a run that has completed `start` steps: one row per line. NaN and infinities become null.

    The first row also prepares the folder: config.txt is written, and an older metrics.jsonl is cut back to the first
    `start` steps, because the later ones are computed again. A new run renames both files of an older run, unless
    `is_repeated`, called with the lines of its config.txt and its last step, returns that this run repeats its rows.
    """

    def __init__(
        self,
        folder: Path,
        settings: Sequence[str],
        start: int,
        say: Callable[[str], None],
        is_repeated: Callable[[Sequence[str], int], bool] = lambda lines, last: False,
    ):
        self._folder = folder.absolute()  # a recipe may change the current folder
        self._path = self._folder / METRICS
        self._settings, self._start, self._say, self._is_repeated = settings, start, say, is_repeated
        self._file: BinaryIO | None = None  # unbuffered
        self._written: tuple[int, ...] = ()  # identity and size of the file after the last row
        self._count = 0  # rows that the file should contain

    def write(self, row: Row) -> None:
        """Append the row. If it cannot be written completely, the file is truncated to its old size: SaveError."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        try:
            if not self._written:
                self._prepare()
            if self._file is None or self._found() != self._written:
                self._open(row["step"])
            self._append((json.dumps(clean) + "\n").encode())
        except OSError as error:
            path = error.filename2 or error.filename or self._path
            raise SaveError(
                f"the row of step {row['step']} could not be written to {path}: {error.strerror}"
            ) from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _prepare(self) -> None:
        """Write config.txt and remove the rows of steps that this run computes, or rename the files of an older run."""
        text = self._path.read_bytes() if self._path.exists() else b""
        if text and not self._start and not self._is_repeated(_lines(self._folder / CONFIG), _last_step(text)):
            names = _rename_old(self._folder, [name for name in (METRICS, CONFIG) if (self._folder / name).exists()])
            self._say(f"run: the folder has no checkpoint of its earlier run; its files are now {' and '.join(names)}")
            text = b""
        kept = rows_until(text, self._start)
        if kept != text:
            _rewrite(self._path, text, kept)
            before, after = count_text(_num_lines(text), "row"), _num_lines(kept)
            first = f"the checkpoint of step {self._start}" if self._start else "its start, as nothing was saved"
            self._say(f"run: {METRICS} is cut back to {first}: {before} before, {after} now")
        self._count = _num_lines(kept)
        lines = "\n".join(self._settings) + "\n"
        _replace(self._folder / CONFIG, lines.encode())  # in the format that @FILE reads

    def _found(self) -> tuple[int, ...]:
        """Identity and size of the file that the path names now; (0,) without a file."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return (0,)
        return status.st_dev, status.st_ino, status.st_size

    def _open(self, step: int) -> None:
        """Open the file that the path names, and create it if it is gone. Warns if rows of this run are not in it."""
        self.close()
        self._file = self._path.open("a+b", buffering=0)
        self._file.seek(0)
        text = self._file.read()
        if (lost := self._count - _num_lines(rows_until(text, step))) > 0:
            self._say(
                f"warning: {self._path} was removed, replaced or cut while the run wrote it: it lacks "
                f"{count_text(lost, 'row')} before step {step}; later rows are appended to the file of this name"
            )
        self._count = _num_lines(rows_until(text, step))
        if text and not text.endswith(b"\n"):
            self._append(b"\n")  # two rows must never share a line

    def _append(self, line: bytes) -> None:
        assert self._file is not None
        end = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(line) < len(line):  # a short write reports no errno; in practice the disk is full
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._file.truncate(end)
            raise
        status = os.fstat(self._file.fileno())
        self._written = status.st_dev, status.st_ino, status.st_size
        self._count += line != b"\n"


def rows_until(text: bytes, step: int) -> bytes:
    """The complete rows of a metrics.jsonl up to `step`, in order; of a step that it has several times, the last."""
    numbered = [(_step_of(line), line) for line in text.split(b"\n")]
    rows = {number: line + b"\n" for number, line in numbered if 0 < number <= step}
    return b"".join(rows[number] for number in sorted(rows))


def read_metrics(folder: str | Path) -> list[Row]:
    """The rows of metrics of a run, one for each step in order; its folder may be in a store, and the run in progress.

    Raises ConfigError if the folder has no metrics, and UnreadableError if they cannot be read.

    Example:
        >>> from pathlib import Path
        >>> from flax_mesh.train import read_metrics
        >>> Path("runs/two").mkdir(parents=True)
        >>> length = Path("runs/two/metrics.jsonl").write_text('{"step": 1, "loss": 5.5}\\n{"step": 2, "loss": 5.1}\\n')
        >>> [row["loss"] for row in read_metrics("runs/two")]
        [5.5, 5.1]
    """
    path = stored_path(folder)
    try:
        first, parts = joined_rows(path) if isinstance(path, StorePath) else ((path / METRICS).read_bytes(), [])
    except (FileNotFoundError, NotADirectoryError):
        first, parts = b"", []
    except OSError as error:
        raise UnreadableError(f"the metrics of {path} cannot be read: {error.strerror}") from error
    if not (rows := rows_until(first + b"".join(parts), LAST_STEP)):
        raise ConfigError(f"{path} contains no {METRICS}; pass the folder of a run that has completed a step")
    return [json.loads(line) for line in rows.splitlines()]


def _step_of(line: bytes) -> int:
    """The step of a row, 0 if the line is not a complete row."""
    if plain := PLAIN_ROW.fullmatch(line):
        return int(plain[1])
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return 0
    return step if isinstance(step, int) else 0


def _last_step(text: bytes) -> int:
    return max(map(_step_of, text.split(b"\n")))


def _lines(path: Path) -> list[str]:
    """The lines of a text file; none if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _num_lines(text: bytes) -> int:
    return text.count(b"\n") + (not text.endswith(b"\n") and text != b"")


def _rewrite(path: Path, before: bytes, after: bytes) -> None:
    """Replace the content of a file atomically, without room on the disk if only its end is removed."""
    if before.startswith(after):
        os.truncate(path, len(after))
    else:
        _replace(path.resolve(), after)


def _replace(path: Path, text: bytes) -> None:
    partial = path.with_name(path.name + ".new")
    try:
        partial.write_bytes(text)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _rename_old(folder: Path, names: Sequence[str]) -> list[str]:
    """Rename these files to NAME.old, or all to NAME.old-2 and so on if a name is taken. Returns the new names."""
    ends = (".old" + (f"-{i}" if i > 1 else "") for i in range(1, 10_000))
    end = next(end for end in ends if not any(os.path.lexists(folder / (name + end)) for name in names))
    for name in names:
        os.rename(folder / name, folder / (name + end))
    return [name + end for name in names]


def _problem(path: Path, wanted: str, rights: int) -> str:
    """One line if the entry at `path` is not `wanted`, or cannot be used with these rights; "" if nothing is there."""
    if not os.path.lexists(path):
        return ""
    try:
        kind = KINDS.get(stat.S_IFMT(path.stat().st_mode), "neither a file nor a folder")
    except OSError as error:
        kind = f"{'a broken link' if path.is_symlink() else 'something else'} ({error.strerror})"
    if kind != wanted:
        return f"{path} must be {wanted}, found {kind}; rename or remove it, or use another run.folder"
    if not os.access(path, rights, effective_ids=os.access in os.supports_effective_ids):
        return f"{path} must be readable and writable; change its rights, or use another run.folder"
    return ""


def _remove_unused(folder: Path, before: Collection[str], created: Sequence[Path]) -> None:
    """Remove lock file, compiled programs and folders that were created, if nothing else was added to the folder."""
    with suppress(OSError):
        if {*os.listdir(folder)} - {LOCK, COMPILED} != {*before} - {LOCK, COMPILED}:
            return
        if COMPILED not in before:
            shutil.rmtree(folder / COMPILED, ignore_errors=True)
        if LOCK not in before:
            os.unlink(folder / LOCK)
            _remove_empty(created)


def _remove_empty(folders: Sequence[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # it was not created, or is not empty
            folder.rmdir()


def check_agreement(record: Mapping[str, Any]) -> None:
    """Check that all processes have the same `record`. If not, all raise ConfigError with the differing fields."""
    facts = {f"config {key}": value for key, value in record["config"].items()}
    facts |= {f"version of {name}": value for name, value in record["versions"].items()}
    facts |= {"mesh": str(record["mesh"]), "rules": str(record["rules"]), "axes": str(record["axes"])}
    facts |= {"sharding of the state": record["sharding"], record["data"]["name"]: record["data"]["content_hash"]}
    assert_equal("start", facts)
