"""Paths in object stores: s3://bucket/run, gs://bucket/run.

A `StorePath` is a Path, so that the code that reads a checkpoint takes either. It has the methods of Path below; any
other use of it, such as `open`, raises TypeError, since an object is no file of this machine. There are no folders in
a store: a path exists if an object has its name, or a name below it. Requests go through the key-value stores of
tensorstore, which find the credentials as other programs of the cloud do.
"""

import atexit
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import cache
from pathlib import Path, PosixPath
from typing import Protocol, TypeVar, cast

from flax_mesh.errors import ConfigError, UnreadableError
from flax_mesh.fields import path_problem, user_path
from flax_mesh.text import shortened

Result = TypeVar("Result")
Answer = TypeVar("Answer", covariant=True)

# Scheme of an address -> driver of tensorstore. After a "+" the address begins with a server: s3+http://host:port/bucket
DRIVERS = {"s3": "s3", "s3+http": "s3", "s3+https": "s3", "gs": "gcs"}
_RETRIES = {"max_retries": 8, "initial_delay": "250ms", "max_delay": "8s"}  # 32 seconds, of answers such as 500 and 503
_DEADLINE, _SLOWEST = 30.0, 2**20  # seconds that an answer may need, and bytes per second of its content
_CODE, _STATUS = re.compile(r"<Code>(\w+)</Code>"), re.compile(r"\[http_response_code='(\d+)'\]")


class Future(Protocol[Answer]):
    """An answer of tensorstore."""

    def result(self, timeout: float | None = None) -> Answer: ...


class _Value(Protocol):
    """An object, or its absence; `stamp.generation` is the condition of a write that expects either."""

    state: str
    value: bytes
    stamp: "_Value"
    generation: bytes


class KvStore(Protocol):
    """The requests to a key-value store of tensorstore."""

    def __truediv__(self, prefix: str) -> "KvStore": ...
    def list(self) -> Future[list[bytes]]: ...
    def read(self, key: str) -> Future[_Value]: ...
    def write(self, key: str, value: bytes | None, *, if_equal: bytes | None = None) -> Future[object]: ...
    def delete_range(self, range: object) -> Future[None]: ...
    def spec(self) -> "KvStore": ...
    def to_json(self) -> dict[str, object]: ...


class StorePath(PosixPath):
    """A path in an object store, such as s3://bucket/run or, of an own server, s3+http://host:port/bucket/run."""

    listed: list[str] | None = None  # names below, of a path that `iterdir` returns

    def __str__(self) -> str:
        return f"{self.parts[0]}//{'/'.join(self.parts[1:])}"

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is in an object store, not a file of this machine")

    def absolute(self) -> "StorePath":
        return self

    def resolve(self, strict: bool = False) -> "StorePath":
        return self

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        return self.is_file() or self.is_dir()

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return bool(self.names())

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._read() is not None

    def is_symlink(self) -> bool:
        return False

    def is_absolute(self) -> bool:
        return True

    def iterdir(self) -> Generator["StorePath", None, None]:
        """The paths one level below, from one list of all objects; each keeps its part of it for its own `names`."""
        below: dict[str, list[str]] = {}
        for name in self.names():
            first, _, rest = name.partition("/")
            below.setdefault(first, []).extend([rest] if rest else [])
        for first, names in below.items():
            path = self / first
            path.listed = names
            yield path

    def glob(self, pattern: str, **options: object) -> Generator["StorePath", None, None]:
        raise TypeError(f"{self} is in an object store, whose names have no patterns")  # Path would find nothing

    def names(self) -> list[str]:
        """The names of all objects below, relative to this path; for a path of `iterdir`, when that was called."""
        if self.listed is not None:
            return self.listed
        store = self.objects()
        names = [name.decode() for name in self.ask(lambda: store.list())]
        if unsafe := [name for name in names if {".", "..", ""} & {*name.removesuffix("/").split("/")} and name]:
            text = f"the store has an object whose name is no path below a folder, {unsafe[0][:80]!r}"
            raise OSError(errno.EINVAL, text, str(self))
        return sorted(name for name in names if name and not name.endswith("/"))  # some programs make "folder/"

    def read_bytes(self) -> bytes:
        value = self._read()
        if value is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return value

    def write_bytes(self, data: bytes) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Write the object, or replace it."""
        self.ask(lambda: self._bucket.write(self._key, data), len(data))
        return len(data)

    def create(self, data: bytes) -> bool:
        """Write the object if there is none of its name, by a conditional request; whether it contains `data` then."""
        value = self.ask(lambda: self._bucket.read(self._key))
        if value.state == "missing":
            self.ask(lambda: self._bucket.write(self._key, data, if_equal=value.stamp.generation))
        return self._read() == data  # of a request that was repeated, the first may have written it

    def unlink(self, missing_ok: bool = True) -> None:
        self.ask(lambda: self._bucket.write(self._key, None))

    def remove(self, last: str) -> None:
        """Delete all objects below, the one with the name `last` after the others."""
        import tensorstore

        store, ranges = self.objects(), tensorstore.KvStore.KeyRange
        for others in (ranges("", last), ranges(f"{last}\0", "")):
            self.ask(lambda: store.delete_range(others))  # noqa: B023 (it is called at once)
        (self / last).unlink()

    def objects(self) -> KvStore:
        """The objects below this path as a key-value store of tensorstore."""
        return self._bucket / f"{self._key}/" if self._key else self._bucket

    def ask(self, request: Callable[[], Future[Result]], size: int = 2**26) -> Result:
        """The answer to a request. OSError if there is none; its text has no part of a request or of credentials."""
        seconds = _DEADLINE + size / _SLOWEST
        try:
            with suppress(TimeoutError):  # of the first of two attempts
                return request().result(timeout=seconds)
            return request().result(timeout=seconds)
        except TimeoutError:
            text = f"the store did not answer within {2 * seconds:.0f} seconds"
            raise OSError(errno.ETIMEDOUT, text, str(self)) from None
        except (ValueError, RuntimeError) as error:
            if not (text := _answer(f"{error}")):
                raise
            raise OSError(errno.EIO, f"the store {text}", str(self)) from None

    @property
    def place(self) -> tuple[str, ...]:
        """The parts of the path that name the bucket."""
        return self.parts[: 3 if "+" in self.parts[0] else 2]

    @property
    def _key(self) -> str:
        return "/".join(self.parts[len(self.place) :])

    @property
    def _bucket(self) -> KvStore:
        return _bucket(*self.place)

    def _read(self) -> bytes | None:
        value = self.ask(lambda: self._bucket.read(self._key))
        return None if value.state == "missing" else value.value


def stored_path(path: str | os.PathLike[str]) -> Path:
    """`user_path`, but also of an address in a store. ConfigError for an address that cannot be one."""
    text = str(path)
    scheme, _, rest = text.partition(":/")
    if scheme not in DRIVERS:
        return user_path(path)
    address = StorePath(f"{scheme}:", *rest.split("/"))
    try:
        if ".." in address.parts or {"\0", "\n"} & {*text}:
            raise ValueError("it must be SCHEME://BUCKET/NAME")
        _bucket(*address.place)
    except ValueError as error:
        raise ConfigError(f"{shortened(text, 80)!r} is not an address of a store: {error}") from error
    return address


def stored_path_problem(text: str) -> str:
    """`path_problem`, but none of an address in a store."""
    return "" if text.partition(":/")[0] in DRIVERS else path_problem(text)


@cache
def on_this_machine(folder: Path) -> Path:
    """`folder`, or a copy of a folder in a store, for small files that other programs read. Raises UnreadableError."""
    if not isinstance(folder, StorePath):
        return folder
    copy = Path(tempfile.mkdtemp(prefix="flax_mesh-"))
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    try:
        for name in folder.names():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((folder / name).read_bytes())
    except OSError as error:
        raise UnreadableError(f"{folder} cannot be read: {error.strerror}") from error
    return copy


def is_present(path: Path) -> bool:
    """Whether something has this name: a file, a folder, a link, an object, or objects below it."""
    return path.exists() if isinstance(path, StorePath) else os.path.lexists(path)


def context() -> dict[str, object]:
    """Options of a context of tensorstore: requests are repeated as long as `_RETRIES` says, and indices are kept."""
    retries = {f"{driver}_request_retries": _RETRIES for driver in ("s3", "gcs")}
    return {**retries, "cache_pool": {"total_bytes_limit": 2**26}}


@cache
def _bucket(scheme: str, *rest: str) -> KvStore:
    import tensorstore

    if len(rest) != 1 + ("+" in scheme):
        raise ValueError(f"it must be {scheme}//{'HOST:PORT/' * ('+' in scheme)}BUCKET/NAME")
    scheme = scheme.removesuffix(":")
    server = {"endpoint": f"{scheme.partition('+')[2]}://{rest[0]}"} if "+" in scheme else {}
    spec = {"driver": DRIVERS[scheme], "bucket": rest[-1], **server}
    # Its types differ in more than these requests.
    return cast(KvStore, tensorstore.KvStore.open(spec, context=tensorstore.Context(context())).result())


def _answer(text: str) -> str:
    """An error of tensorstore, "" if it is not of a request; without the answer, which may name a key of the user."""
    if status := _STATUS.search(text):
        code = _CODE.search(text)
        return f"answered {status[1]}{f' ({code[1]})' if code else ''}"
    return f"cannot be reached: {text.partition(' [')[0][:200]}" if "[curl_code=" in text else ""
