"""Checksums of the files of a checkpoint: written before it is committed, compared before it is read.

Every byte of every file is covered, since neither Orbax nor most file systems detect a flipped bit. Each block has an
XXH3 checksum (64 bits, Collet 2019), which runs at the speed of memory and is therefore always enabled. The probability
that damage is not detected is 2**-64.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from flax_mesh.errors import CheckpointCorruptedError, ConfigError, StepDeletedError, UnreadableError
from flax_mesh.store import StorePath

CHECKSUMS = "checksums.json"
BLOCK = 2**26  # bytes that one checksum covers
_READ = 2**19  # bytes read at a time: they stay in the cache of a core while they are hashed
PART = "checksums.process_{}.json"  # of the files written by one process of several; removed before the commit
NUMBER = "step"  # the file with the number of the step, as text
RECORD = "metadata/metadata"  # of Orbax; until 0.1.0 only the record of a run contains the number
_FileSums: TypeAlias = tuple[int, list[Any]]  # bytes of a file, and the checksums of its blocks
# Orbax writes these at the very end, after the checksums; restoring reads neither.
MARKERS = ("_CHECKPOINT_METADATA", "commit_success.txt")
ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)  # no other OSError means it
SYSTEM_ERROR = re.compile(r"\[os_error_code='(\d+)'\]")  # in the texts of tensorstore


def write_part(part: Path, folder: Path, below: str, prefix: str) -> None:
    """Write to `part` the checksums of the files below `folder`/`below`; their names start with `prefix`/`below`/."""
    names = [f"{below}/{name}" for name in sorted(files_below(folder / below))]
    files = checksums_of(folder, names)
    part.write_bytes(_encode(BLOCK, {f"{prefix}/{name}": sums for name, sums in files.items()}))


def write_checksums(folder: Path, parts: Iterable[Path] = ()) -> None:
    """Write checksums.json for all files below `folder`; takes over the checksums in `parts`, and removes `parts`.

    Files in `parts` need not be below `folder`: processes that save to a store have their files there.
    """
    known: dict[str, _FileSums] = {}
    for part in parts:
        known |= _decode(part.read_bytes())[1]
        part.unlink()
    names = sorted(set(files_below(folder)) - {CHECKSUMS, *MARKERS})
    others = [name for name in names if name not in known or known[name][0] != (folder / name).stat().st_size]
    files = known | checksums_of(folder, others)
    (folder / CHECKSUMS).write_bytes(_encode(BLOCK, files))


def find_damage(folder: Path, reads: Callable[[str], bool] | None = None) -> list[str]:
    """Problems of the files below `folder`, one line per file: missing, another size, or the damaged bytes.

    Undamaged files of another step than the folder's name are a problem too. `reads` selects files by name; files
    without checksums and the name of the folder are then not reported. Raises UnreadableError and StepDeletedError as
    `reading`; neither means that the checkpoint is damaged.
    """
    with reading(folder):
        problems = _damage(folder, reads)
        if problems:
            _check_exists(folder, None)  # a run renames a step before it deletes its files
    return problems


@contextmanager
def reading(step: Path) -> Iterator[None]:
    """Report errors in reading a step as StepDeletedError if it is gone, and as UnreadableError if the system refused.

    Other errors pass.
    """
    try:
        yield
    except (StepDeletedError, UnreadableError):
        raise
    except Exception as error:  # Orbax raises Exception itself for an array that it cannot read
        _check_exists(step, error)
        if not (reason := _refusal(error)):
            raise
        raise UnreadableError(
            reason,
            head=f"{step} cannot be read, so that it is not known whether it is damaged:",
            repair="Repair the cause (rights, the disk), or move the folder away to use another step.",
        ) from error


def read_metadata(step: Path) -> dict[str, Any]:
    """The metadata of a step as it was saved. Raises CheckpointCorruptedError if it is not a JSON object."""
    try:
        with reading(step):
            metadata = json.loads((step / RECORD).read_bytes())
    except ConfigError:
        raise
    except (*ABSENT, RecursionError, ValueError) as error:
        raise CheckpointCorruptedError(f"{step}: its metadata cannot be read: {error}") from error
    if not isinstance(metadata, dict):
        raise CheckpointCorruptedError(f"{step}: its metadata must be a JSON object, got a {type(metadata).__name__}")
    return metadata


@contextmanager
def noticing_deletion(step: Path) -> Iterator[None]:
    """Report a ConfigError as StepDeletedError if the step is gone: the missing files may be the reason of any."""
    try:
        yield
    except ConfigError as error:
        if not isinstance(error, StepDeletedError):
            _check_exists(step, error)
        raise


def _check_exists(step: Path, error: Exception | None) -> None:
    """Raise StepDeletedError because of `error` if the step is gone."""
    if _is_gone(step):
        raise StepDeletedError(
            f"{step} was deleted or renamed while it was read: a run retains only some of its checkpoints "
            "(checkpoint.keep). Read a newer one, or let the run retain more."
        ) from error


class _Refused(OSError):
    """The system refused to read files; `args` are lines."""


def _refusal(error: BaseException) -> list[str]:
    """Lines on the files that the system refused to read, none if `error` has another reason."""
    if isinstance(error, _Refused):
        return list(error.args)
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ABSENT):
        return [f"{error.filename}: {error.strerror}"]
    code = SYSTEM_ERROR.search(f"{error} {error.__cause__}")  # Orbax names the reason in the cause only
    reason = OSError(int(code[1]), os.strerror(int(code[1]))) if code else None
    return [] if reason is None or isinstance(reason, ABSENT) else [str(reason.strerror)]


def _is_gone(step: Path) -> bool:
    try:
        if isinstance(step, StorePath):
            return not (step / MARKERS[1]).is_file()
        os.lstat(step)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def _damage(folder: Path, reads: Callable[[str], bool] | None) -> list[str]:
    try:
        block, files = _decode((folder / CHECKSUMS).read_bytes())
    except FileNotFoundError:
        return [] if reads else [f"{CHECKSUMS} is missing: the other files cannot be verified"]
    except (*ABSENT, ValueError) as error:
        return [] if reads else [f"{CHECKSUMS} is damaged: {error}"]
    if reads:
        files = {name: sums for name, sums in files.items() if reads(name)}
    damage: dict[str, str] = {}
    refused: dict[str, OSError] = {}
    for name, content in _read(folder, list(files), block).items():
        if isinstance(content, ABSENT):
            damage[name] = "missing"
        elif isinstance(content, OSError):
            refused[name] = content
        else:
            damage[name] = _differences(files[name], content, block)
    if refused:
        raise _Refused(*(f"{name}: {error.strerror}" for name, error in refused.items()))
    problems = [f"{name}: {problem}" for name, problem in damage.items() if problem]
    return problems if reads else problems + _marker_problems(folder) or find_other_step(folder)


def write_number(folder: Path) -> None:
    """Write the number in the name of `folder`, or of Orbax's temporary folder, to a file in it."""
    (folder / NUMBER).write_text(folder.name.partition(".")[0])


def find_other_step(folder: Path) -> list[str]:
    """A problem if `folder` contains the checkpoint of another step than its name; reads no array."""
    named, number = re.match(r"[0-9]+(?=\.|$)", folder.name), _number(folder)
    if not named or number is None or number == int(named[0]):
        return []
    return [
        f"the folder is named {named[0]}, but contains the checkpoint of step {number}: it was renamed or overwritten. "
        f"Rename it to {number}, or remove it if that exists"
    ]


def _number(folder: Path) -> int | None:
    """The number of the step in its files, None if they contain none."""
    try:
        if (folder / NUMBER).exists():
            return int((folder / NUMBER).read_bytes())
        record = json.loads((folder / RECORD).read_bytes())
        return int(record["step"]) if isinstance(record["format"], int) else None
    except (KeyError, OSError, RecursionError, TypeError, ValueError):
        return None


def _marker_problems(folder: Path) -> list[str]:
    """Orbax writes another record of the step after the checksums: it must exist and be JSON."""
    path = folder / MARKERS[0]
    try:
        json.loads(path.read_bytes())
    except FileNotFoundError:
        return [f"{path.name}: missing"]
    except (*ABSENT, RecursionError, ValueError) as error:
        return [f"{path.name}: damaged: {error}"]
    return []


def checksums_of(folder: Path, names: Sequence[str]) -> dict[str, _FileSums]:
    """Raises one OSError that names every file that cannot be read."""
    contents = _read(folder, names, BLOCK)
    if errors := [f"{folder / name}: {x.strerror}" for name, x in contents.items() if isinstance(x, OSError)]:
        raise OSError("; ".join(errors))
    return {name: x for name, x in contents.items() if not isinstance(x, OSError)}


def saved_size(folder: Path) -> int:
    """The bytes of the files of a step according to its checksums, 0 if they are damaged."""
    try:
        return sum(size for size, _ in _decode((folder / CHECKSUMS).read_bytes())[1].values())
    except (OSError, ValueError):
        return 0


def _encode(block: int, files: Mapping[str, object]) -> bytes:
    import xxhash  # imported here: training without checkpoints does not need it

    text = json.dumps(files, separators=(",", ":"), sort_keys=True)
    checksum = xxhash.xxh3_64_intdigest(f"{block},{text}".encode())
    return f'{{"block":{block},"xxh3_64":{checksum},"files":{text}}}'.encode()


def _decode(data: bytes) -> tuple[int, dict[str, _FileSums]]:
    """Bytes per block, and path -> (bytes, checksums); ValueError if they are not as written."""
    try:
        content = json.loads(data)
        block, files = content["block"], content["files"]
        is_valid = isinstance(block, int) and block > 0 and _encode(block, files) == data
        is_valid = is_valid and all(len(sums) == len(range(0, size, block)) for size, sums in files.values())
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        is_valid = False
    if not is_valid:
        raise ValueError("its own checksum does not match")
    if outside := [name for name in files if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts]:
        raise ValueError(f"it names files outside the checkpoint: {', '.join(outside)}")
    return block, files


def _differences(saved: _FileSums, now: _FileSums, block: int) -> str:
    """How a file differs from the one that was saved, "" if it does not."""
    if saved[0] != now[0]:
        return f"{now[0]} bytes, saved with {saved[0]}"
    differences = [
        f"within bytes {i * block} to {min(saved[0], (i + 1) * block)}: checksum {got}, saved with {value}"
        for i, (value, got) in enumerate(zip(saved[1], now[1], strict=True))
        if got != value
    ]
    return f"damaged {', and '.join(differences)}" if differences else ""


def files_below(folder: Path) -> Iterator[str]:
    if isinstance(folder, StorePath):
        yield from folder.names()
        return
    for parent, _, names in os.walk(folder):
        for name in names:
            yield (Path(parent) / name).relative_to(folder).as_posix()


def _read(folder: Path, names: Sequence[str], block: int) -> dict[str, _FileSums | OSError]:
    """Bytes and checksums of files, or the error of reading one."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing releases the GIL
        if isinstance(folder, StorePath):
            return dict(zip(names, pool.map(lambda name: _read_object(folder / name, block), names), strict=True))
        sizes = {name: _size(folder / name) for name in names}
        starts = [(name, at) for name, size in sizes.items() if isinstance(size, int) for at in range(0, size, block)]
        sums = iter([*pool.map(lambda start: _checksum(folder / start[0], start[1], block), starts)])
    contents: dict[str, _FileSums | OSError] = {}
    for name, size in sizes.items():
        if isinstance(size, OSError):
            contents[name] = size
        else:
            values = [next(sums) for _ in range(0, size, block)]
            contents[name] = next((x for x in values if isinstance(x, OSError)), (size, values))
    return contents


def _read_object(path: StorePath, block: int) -> _FileSums | OSError:
    """As `_read`, by one request."""
    import xxhash

    try:
        data = memoryview(path.read_bytes())
    except OSError as error:
        return error
    return len(data), [xxhash.xxh3_64_intdigest(data[at : at + block]) for at in range(0, len(data), block)]


def _size(path: Path) -> int | OSError:
    try:
        return path.stat().st_size
    except OSError as error:
        return error


def _checksum(path: Path, start: int, size: int) -> int | OSError:
    import xxhash

    value, left = xxhash.xxh3_64(), size
    buffer = memoryview(bytearray(_READ))
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while left and (count := file.readinto(buffer[: min(left, _READ)])):
                value.update(buffer[:count])
                left -= count
    except OSError as error:
        return error
    return value.intdigest()
