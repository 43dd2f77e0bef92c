"""Places of models, data and runs: paths in object stores, s3://bucket/run, and ids of the Hugging Face hub, org/name.

A `StorePath` is a Path, so that the code that reads a checkpoint takes either. It has the methods of Path below; any
other use of it, such as `open`, raises TypeError, since an object is no file of this machine. There are no folders in
a store: a path exists if an object has its name, or a name below it. Requests go through the key-value stores of
tensorstore, which find the credentials as other programs of the cloud do.
"""

import atexit
import errno
import hashlib
import importlib.util
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
from flax_mesh.text import one_line, shortened

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
        """Write the object if there is none of its name; whether it contains `data` then."""
        return self.exchange(lambda content: content is None, data)

    def exchange(self, is_expected: Callable[[bytes | None], bool], data: bytes | None) -> bool:
        """Write a small object, or delete it, if its content `is_expected`, by a conditional request; None: no object.

        Returns whether it contains `data` then.
        """
        value = self.ask(lambda: self._bucket.read(self._key), 0)
        if is_expected(None if value.state == "missing" else value.value):
            self.ask(lambda: self._bucket.write(self._key, data, if_equal=value.stamp.generation), 0)
        return self._read(0) == data  # of a request that was repeated, the first may have written it

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
            text = _answer(f"{error}") or "refused the request"
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

    def _read(self, size: int = 2**26) -> bytes | None:
        value = self.ask(lambda: self._bucket.read(self._key), size)
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


def working_copy(folder: Path) -> Path:
    """`folder`, or the folder of this machine with the files of a run in a store, in ~/.cache or XDG_CACHE_HOME."""
    if not isinstance(folder, StorePath):
        return folder
    cache, name = os.environ.get("XDG_CACHE_HOME") or "~/.cache", hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    return Path(os.path.expanduser(cache), "flax_mesh", "runs", name, folder.name)


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


# Models and datasets of the Hugging Face hub, `org/name` or `org/name@revision`, in the cache of huggingface_hub

MODEL, DATASET = "model", "dataset"
# Small files: of a model for its settings and for its tokenizer, of a dataset for the commit.
SETTINGS, TOKENIZER, CARD = "settings", "tokenizer", "card"
# What to load -> the kind of repository, and its files. A file of a model that is in a folder belongs to another
# format, as do `consolidated` parameters.
_SMALL, _IGNORED = ["*.json", "*.model", "*.txt", "*.jinja"], ["*/*", "consolidated*"]
FILES: dict[str, tuple[str, dict[str, list[str]]]] = {
    MODEL: (MODEL, {"allow_patterns": [*_SMALL, "*.safetensors"], "ignore_patterns": _IGNORED}),
    TOKENIZER: (MODEL, {"allow_patterns": _SMALL, "ignore_patterns": _IGNORED}),
    DATASET: (DATASET, {}),
    SETTINGS: (MODEL, {"allow_patterns": ["config.json", "adapter_config.json"]}),
    CARD: (DATASET, {"allow_patterns": ["README.md"]}),
}
DATA_FILES = (".jsonl", ".gz", ".parquet", ".json", ".npy", ".bin", ".txt")  # no id ends like this
_SHARD = re.compile(r"-of-(\d+)\.safetensors")
_NAME = r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
_ID, _WITH_COMMIT = (
    re.compile(rf"{_NAME}(?:@(?P<revision>[\w./-]+))?"),
    re.compile(rf"{_NAME}@(?P<commit>[0-9a-f]{{40}})"),
)


def model_folder(source: str | os.PathLike[str], kind: str = MODEL) -> Path:
    """The folder at a path, or the folder in the cache of a model of the hub, which is downloaded if it is not there.

    A path that exists comes first. A text that cannot be an id is a path too, whether it exists or not. ConfigError for
    an id that cannot be loaded. `kind` is a key of FILES; SETTINGS and TOKENIZER load no parameters.
    """
    path = stored_path(source)
    match = _id_of(source)
    if match is None or os.path.lexists(path):
        return path
    snapshot = _snapshot(match["name"], match["revision"], kind)
    if isinstance(snapshot, str):
        raise ConfigError(snapshot)
    return snapshot


def model_here(source: str | os.PathLike[str], kind: str = MODEL) -> Path:
    """`model_folder`, but ConfigError for an address in a store."""
    path = model_folder(source, kind)
    return user_path(str(path)) if isinstance(path, StorePath) else path


def _id_of(source: str | os.PathLike[str]) -> re.Match[str] | None:
    """The parts of an id; None for a path object, and for a text that names a file of data."""
    if not isinstance(source, str) or source.endswith(DATA_FILES):
        return None
    return _ID.fullmatch(source)


def with_commit(source: str, earlier: str = "", kind: str = MODEL) -> str:
    """`org/name@commit` for an id: the commit of its revision or, of the main branch, of `earlier` with the same name.

    An id that already has a commit, a path, and an id that cannot be loaded are returned unchanged.
    """
    before, match = commit_of(earlier), _id_of(source)
    if match is None or path_problem(source) or os.path.lexists(user_path(source)) or commit_of(source):
        return source
    if before and before[0] == match["name"] and match["revision"] in (None, "main"):
        return earlier
    try:
        return f"{match['name']}@{model_folder(source, CARD if kind == DATASET else SETTINGS).name}"
    except ConfigError:
        return source


def commit_of(source: str) -> tuple[str, str] | None:
    """The name and the commit of `org/name@commit`, None for other texts."""
    match = _WITH_COMMIT.fullmatch(source)
    return (match["name"], match["commit"]) if match else None


@cache  # one commit for all readers of a program, also if the branch moves
def _snapshot(name: str, revision: str | None, content: str) -> Path | str:
    """The folder, or the text of an error, which is not asked for again."""
    kind, files = FILES[content]
    given = name + (f"@{revision}" if revision else "")
    both = f"{given} is not a path of this machine, and as a {kind} of the Hugging Face hub"
    if importlib.util.find_spec("huggingface_hub") is None:
        return f'{both} it requires the package huggingface_hub: pip install "flax-mesh[hub]"'
    import huggingface_hub
    from huggingface_hub import errors

    network: type[Exception] = errors.HfHubHTTPError.__bases__[0]  # of its HTTP client, whose name differs by version
    download: Callable[..., str] = getattr(huggingface_hub, "snapshot_download")  # noqa: B009 (its type is not known)
    try:
        folder = download(name, revision=revision, repo_type=kind, **files)
    except errors.GatedRepoError:
        page = f"https://huggingface.co/{'datasets/' * (kind == DATASET)}{name}"
        reason = f"requires access: ask for it at {page}, and log in with: hf auth login"
    except errors.RepositoryNotFoundError:
        reason = "does not exist, or is private: log in with: hf auth login"
    except errors.RevisionNotFoundError:
        reason = f"has no revision {revision}"
    except errors.LocalEntryNotFoundError:
        reason = "is not in the cache of this machine, or only a part of it, and the hub cannot be reached"
    except (OSError, ValueError, RuntimeError, network) as error:
        reason = f"cannot be downloaded: {one_line(error, 200)}"
    else:
        reason = _lacking(Path(folder), content)
        if not reason:
            return Path(folder)
    options = " --repo-type dataset" * (kind == DATASET) + (f" --revision {revision}" if revision else "")
    command = f"hf download {name}{options}"
    return f"{both} it {reason}. Correct the path or the id, or download the {kind} with: {command}"


def _lacking(folder: Path, content: str) -> str:
    """What a folder lacks, as without a network, when `huggingface_hub` returns what an earlier call has loaded."""
    names = [path.name for path in folder.rglob("*") if path.is_file()]
    if content == DATASET and not {*names} - {"README.md", ".gitattributes"}:
        return "has no files of data in the cache of this machine"
    shards = [name for name in names if name.endswith(".safetensors")]
    count = max([1, *(int(match[1]) for name in shards if (match := _SHARD.search(name)))])
    if content == MODEL and len(shards) < count:
        return "has no safetensors, or not all of them, in the cache of this machine"
    return ""
