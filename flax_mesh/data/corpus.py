"""Reading files as tokens: the training part, the held-out part, and a hash that detects changes of the data.

Text is read as bytes, one token each (UTF-8, 256 ids). Token files are memory-mapped: `.npy` (1-D, integers) and `.bin`
(little-endian, no header; uint16, or uint32 with `data.bin_dtype`). Batches are formed in batches.py.
"""

import hashlib
import mmap
import os
import platform
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flax_mesh.data.config import STDLIB, DataConfig, check_data_config
from flax_mesh.data.files import TEXT_SUFFIXES, TOKEN_SUFFIXES, find_files, is_utf8, stdlib_files
from flax_mesh.errors import ConfigError, labelled
from flax_mesh.text import count_text, one_line

# Raised by numpy for headers, which it evaluates as Python.
_NPY_ERRORS = (ValueError, TypeError, EOFError, OverflowError, SyntaxError, SystemError, RecursionError, MemoryError)
_NPY_ERRORS += (tokenize.TokenError,)
WIDTH_PROBE = 2**16  # tokens that are compared with halves of wider integers
MAPPED_BYTES = 64 * 1024**2
FULL_HASH_BYTES = 1024**3
HASH_BLOCK_BYTES = 64 * 1024
NUM_HASH_BLOCKS = 256


@dataclass(frozen=True, eq=False)
class TokenFiles:
    """The concatenation of several memory-mapped token files of one dtype. A slice reads only the tokens it covers."""

    pieces: tuple[np.ndarray, ...]

    @property
    def dtype(self) -> np.dtype:
        return self.pieces[0].dtype

    def __len__(self) -> int:
        return sum(len(piece) for piece in self.pieces)

    def __getitem__(self, window: slice) -> np.ndarray:
        start, stop, _ = window.indices(len(self))
        pieces, offset = [np.empty(0, self.dtype)], 0
        for piece in self.pieces:
            if offset < stop and start < offset + len(piece):
                pieces.append(piece[max(start - offset, 0) : stop - offset])
            offset += len(piece)
        return np.concatenate(pieces)


Tokens = np.ndarray | TokenFiles
FileStamp = tuple[int, int, int]  # size, mtime_ns, inode
_CHANGED = (
    "data.source: {} {} while the run read it; its tokens must not change under a run. Restore the file and resume "
    "from the newest checkpoint, or start a new run; write new data to another file."
)


@dataclass(frozen=True, eq=False)
class Corpus:
    """Training tokens and held-out tokens. No file is in both, except that a single file is divided between them."""

    train: Tokens  # 1-D integers, at least one window
    held_out: Tokens
    description: str  # one line, printed by the run
    content_hash: str  # SHA-256 of both parts, sampled above 1 GiB
    vocab_size: int | None  # 256 for text; None for token files: the largest id is unknown
    bytes_per_token: float | None  # 1.0 for text; None for token files
    bin_dtype: str | None = None  # of .bin files, which do not contain it; None for other files
    stamps: dict[str, FileStamp | None] = field(default_factory=dict)  # of the memory-mapped files, by path

    def check_unchanged(self) -> None:
        """Raise ConfigError if a memory-mapped file was rewritten since the corpus was read.

        The tokens are hashed again only if size, time or inode of a file differ from the values last seen. A file
        that was replaced by another of the same name stays mapped as it was.
        """
        stamps = {path: _stamp(path) for path in self.stamps}
        changed = [path for path, stamp in stamps.items() if stamp != self.stamps[path]]
        if not changed:
            return
        for part in (self.train, self.held_out):
            check_sizes(part)
        if _hash_tokens([self.train, self.held_out]) != self.content_hash:
            raise ConfigError([_CHANGED.format(path, "was rewritten") for path in changed])
        self.stamps.update(stamps)


def check_sizes(part: Tokens) -> None:
    """Raise ConfigError if a file is shorter than its memory map: reading past its end would end the process."""
    for piece in part.pieces if isinstance(part, TokenFiles) else (part,):
        if isinstance(piece, np.memmap):
            base = piece.base
            while isinstance(base, np.ndarray):
                base = base.base
            if isinstance(base, mmap.mmap) and base.size() < len(base):
                what = f"was shortened from {len(base):,} to {base.size():,} bytes"
                raise ConfigError(_CHANGED.format(piece.filename, what))


def load_corpus(config: DataConfig) -> Corpus:
    """Read or memory-map the files of `config.source`, and divide them into a training part and a held-out part.

    Text files are concatenated in the order of their relative paths, separated by a zero byte; empty files are left
    out. Token files are concatenated without a separator. Token files, and a single text file of 64 MiB or more, are
    memory-mapped.

    The end of a single file is held out. Of several files, a file is held out if the hash of its path (relative to the
    folder or to the fixed part of the glob) is below `held_out`: a share of the files, not of the tokens. The file with
    the lowest hash is always held out, the file with the highest never.

    Raises ConfigError if no file is found, a file is unreadable or of the wrong kind, or a part is shorter than one
    window.
    """
    if wrong := check_data_config(config):
        raise ConfigError(wrong)
    with labelled("data.source"):
        loaded = load_documents(config.source, config.bin_dtype)
    documents, files = loaded.tokens, loaded.paths
    # Before the tokens are hashed: a file that is written after that has another stamp.
    stamps = {str(files[name]): _stamp(files[name]) for name, x in documents.items() if isinstance(x, np.memmap)}
    with labelled("data.source"):
        train, held_out, split = _split(loaded, config.held_out)
    window = config.sequence_length + 1
    if problems := [
        f"data.source: the {name} part of {config.source} has {len(part)} tokens, but one window requires {window}. "
        f"Use more text, change data.held_out ({config.held_out}) or lower data.sequence_length."
        for name, part in (("training", train), ("held-out", held_out))
        if len(part) < window
    ]:
        raise ConfigError(problems)
    label = f"standard library of Python {platform.python_version()}" if config.source == STDLIB else config.source
    size = f"{sum(map(len, documents.values())):,} {'bytes' if loaded.is_text else 'tokens'}"
    return Corpus(
        train=train,
        held_out=held_out,
        description=f"{label}: {count_text(len(documents), 'file')}, {size}; {split}",
        content_hash=_hash_tokens([train, held_out]),
        vocab_size=256 if loaded.is_text else None,
        bytes_per_token=1.0 if loaded.is_text else None,
        bin_dtype=config.bin_dtype if any(path.suffix.lower() == ".bin" for path in files.values()) else None,
        stamps=stamps,
    )


@dataclass(frozen=True, eq=False)
class Documents:
    """The files of a source that are not empty, as tokens."""

    tokens: dict[str, np.ndarray]  # by name; bytes if `is_text`
    is_text: bool
    paths: dict[str, Path]  # of all files, empty ones too

    def join(self, names: Sequence[str] | None = None) -> Tokens:
        """All of them, or the files `names`, as one sequence: text with a zero byte between two files."""
        chosen = [self.tokens[name] for name in (self.tokens if names is None else names)]
        if self.is_text:
            return np.frombuffer(b"\0".join(tokens.data for tokens in chosen), np.uint8)
        dtypes = sorted({str(tokens.dtype) for tokens in chosen})
        if len(dtypes) > 1:
            raise ConfigError(f"the token files must have the same integer dtype, found {', '.join(dtypes)}.")
        return TokenFiles(tuple(chosen))


def load_documents(source: str, bin_dtype: str, *, option: str = "data.bin_dtype") -> Documents:
    """Read or memory-map the files of `source`, as `load_corpus` does, without a division into parts.

    Errors do not name the setting of the source; `option` names the setting of `bin_dtype`.
    """
    try:
        files = stdlib_files() if source == STDLIB else find_files(source)
        return _open_files(files, source, bin_dtype, option)
    except OSError as error:
        raise _unreadable(error.filename or source, error) from error


def _open_files(files: dict[str, Path], source: str, bin_dtype: str, option: str) -> Documents:
    tokenized = [path.suffix.lower() in TOKEN_SUFFIXES for path in files.values()]
    if any(tokenized) and not all(tokenized):
        raise ConfigError(
            f"{source} matches {sum(tokenized)} token files ({', '.join(TOKEN_SUFFIXES)}) and "
            f"{tokenized.count(False)} others. Use a pattern that matches one kind."
        )
    is_text = not any(tokenized)
    opened = {name: _open(path, is_text, bin_dtype, option) for name, path in files.items()}
    documents = {name: tokens for name, tokens in opened.items() if len(tokens)}
    if not documents:
        raise ConfigError(f"{source} is empty: {count_text(len(files), 'file')} without content.")
    return Documents(documents, is_text, files)


def _stamp(path: str | Path) -> FileStamp | None:
    """None if the file is gone. Its memory map remains valid."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ino


def _split(loaded: Documents, share: float) -> tuple[Tokens, Tokens, str]:
    """(training tokens, held-out tokens, description of the division)."""
    documents = loaded.tokens
    if len(documents) == 1:
        (tokens,) = documents.values()
        cut = len(tokens) - round(len(tokens) * share)
        return tokens[:cut], tokens[cut:], f"trains on the first {cut:,}, holds out the last {len(tokens) - cut:,}"
    names = _held_out_names(documents, share)
    train = loaded.join([name for name in documents if name not in names])
    held_out = loaded.join([name for name in documents if name in names])
    trains = f"trains on {count_text(len(documents) - len(names), 'file')} ({len(train):,})"
    holds_out = f"holds out {count_text(len(names), 'file')} ({len(held_out):,})"
    return train, held_out, f"{trains}, {holds_out}, by a hash of their paths"


def _held_out_names(names: Sequence[str] | dict[str, np.ndarray], share: float) -> set[str]:
    """Names of the held-out files of two or more. They are the same on every machine and in every process."""
    score = {n: int.from_bytes(hashlib.blake2b(os.fsencode(n), digest_size=8).digest(), "big") / 2**64 for n in names}
    ranked = sorted(names, key=lambda name: (score[name], name))
    return {ranked[0]} | {name for name in ranked[:-1] if score[name] < share}


def _hash_tokens(parts: Sequence[Tokens]) -> str:
    """SHA-256 of the dtype, length and bytes of every part, as hex.

    Above a total of 1 GiB, only 256 blocks of 64 KiB of each part are hashed, evenly spaced from its first to its last
    byte: a change of size is always detected, a change between the blocks is not.
    """
    digest = hashlib.sha256()
    sampled = sum(len(part) * part.dtype.itemsize for part in parts) > FULL_HASH_BYTES
    for part in parts:
        digest.update(f"{part.dtype.str} {len(part)}\n".encode())
        block = HASH_BLOCK_BYTES // part.dtype.itemsize
        last = max(len(part) - block, 0)
        starts = np.linspace(0, last, NUM_HASH_BLOCKS).astype(int) if sampled else range(0, len(part), block)
        for start in starts:
            digest.update(part[start : start + block].tobytes())
    return digest.hexdigest()


def decode(tokens: np.ndarray) -> str:
    """Decode byte tokens of any integer dtype as UTF-8. Invalid bytes and ids above 255 become U+FFFD."""
    tokens = np.asarray(tokens)
    not_a_byte = (tokens < 0) | (tokens > 255)
    return np.where(not_a_byte, 0xFF, tokens).astype(np.uint8).tobytes().decode("utf-8", errors="replace")


# --- reading one file, and joining several ---


def _open(path: Path, is_text: bool, bin_dtype: str, option: str) -> np.ndarray:
    try:
        if is_text:
            return _open_text(path, option)
        return _open_tokens(path, np.dtype(bin_dtype).newbyteorder("<"), option)
    except OSError as error:  # read errors of the disk have no file name
        raise _unreadable(path, error) from error


def _unreadable(what: object, error: OSError) -> ConfigError:
    return ConfigError(f"{what} cannot be read: {error.strerror or error}.")


def _open_text(path: Path, option: str) -> np.ndarray:
    if path.suffix.lower() not in TEXT_SUFFIXES and not is_utf8(path):
        raise ConfigError(
            f"{path} is not UTF-8 text. Convert it, or use token files: .npy (1-D integers) or .bin ({option})."
        )
    if path.stat().st_size >= MAPPED_BYTES:
        return np.memmap(path, np.uint8, mode="r")
    return np.frombuffer(path.read_bytes(), np.uint8)


def _open_tokens(path: Path, bin_dtype: np.dtype, option: str) -> np.ndarray:
    size = path.stat().st_size
    if path.suffix.lower() == ".bin":
        if size % bin_dtype.itemsize:
            raise ConfigError(
                f"{path} has {size} bytes; {bin_dtype.name} tokens ({option}) require a multiple of "
                f"{bin_dtype.itemsize}."
            )
        tokens = np.memmap(path, bin_dtype, mode="r") if size else np.empty(0, bin_dtype)
        _check_width(path, tokens, option)
        return tokens
    try:
        tokens = np.lib.format.open_memmap(path, mode="r")
    except _NPY_ERRORS as error:
        reason = one_line(error, 200)
        raise ConfigError(f"{path} is not a readable .npy file: {reason}; write it again by numpy.save") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ConfigError(
            f"{path} must contain token ids as a 1-D array of integers, got shape {tokens.shape} of {tokens.dtype}."
        )
    return tokens


def _check_width(path: Path, tokens: np.ndarray, option: str) -> None:
    """Raise ConfigError if the tokens are the halves of wider integers: the upper halves of ids are 0 or small."""
    first, second = tokens[:WIDTH_PROBE:2], tokens[1:WIDTH_PROBE:2]
    if len(second) >= 64 and second.max() < 16 and np.mean(first >= 16) > 0.25:
        wider = f"Set {option}=uint32 if its tokens are uint32; save" if tokens.dtype.itemsize == 2 else "Save"
        raise ConfigError(
            f"every second token of {path} is below 16 and the others are not, as in a file of wider integers than "
            f"{tokens.dtype.name} ({option}). {wider} tokens of another type as .npy."
        )
