"""Text to token ids and back: bytes, or the tokenizer.json of a Hugging Face model. Files are untrusted."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from flax_mesh.checkpoint.hf.kept import CONFIG
from flax_mesh.checkpoint.hf.safetensors import read_json
from flax_mesh.errors import CheckpointCorruptedError, ConfigError
from flax_mesh.inference.source import Source
from flax_mesh.train.data.data import decode

FILE, GENERATION, STOP = "tokenizer.json", "generation_config.json", "eos_token_id"
BYTE_IDS = 256
INCOMPLETE = "\ufffd"  # what the bytes of an incomplete character are decoded to


class Encoded(NamedTuple):
    """Tokens of a text, and how many bytes of the text precede the end of each of them."""

    tokens: np.ndarray
    ends: np.ndarray


class Tokenizer(Protocol):
    """`name` for messages; `is_bytes` if every token is a byte."""

    name: str
    is_bytes: bool

    def encode(self, text: str, *, special: bool = True) -> Encoded:
        """The tokens of a text; with `special`, those that the model expects around it."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones. Incomplete characters become U+FFFD."""
        ...


class Bytes:
    """One token per byte of UTF-8, as runs on text files have."""

    name = "bytes"
    is_bytes = True

    def encode(self, text: str, *, special: bool = True) -> Encoded:
        tokens = np.array([*text.encode()], np.int32)
        return Encoded(tokens, np.arange(1, len(tokens) + 1))

    def decode(self, tokens: Sequence[int]) -> str:
        return decode(np.asarray(tokens, np.int64))


class JsonTokenizer:
    """A tokenizer.json, read by the package tokenizers."""

    is_bytes = False

    def __init__(self, path: Path):
        self.name = str(path)
        self._tokenizer = _read(path)

    def encode(self, text: str, *, special: bool = True) -> Encoded:
        found = self._tokenizer.encode(text, add_special_tokens=special)
        # Offsets count characters, and special tokens have the offsets (0, 0).
        ends = np.maximum.accumulate(np.array([end for _, end in found.offsets], np.int64)) if found.ids else []
        sizes = np.concatenate([[0], np.cumsum(_utf8_sizes(text))])
        return Encoded(np.array(found.ids, np.int32), sizes[np.asarray(ends, np.int64)])

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(map(int, tokens)), skip_special_tokens=True)


def _utf8_sizes(text: str) -> np.ndarray:
    """Number of bytes of every character."""
    codes = np.array([*map(ord, text)], np.int64)
    return 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)


def open_tokenizer(source: Source) -> Tokenizer | None:
    """Bytes for a run on text, else the tokenizer.json of `source`, else None.

    Raises ConfigError if the file cannot be read, or the package that reads it is not installed.
    """
    if source.is_text and source.model.vocab_size >= BYTE_IDS:
        return Bytes()
    path = source.files / FILE
    return JsonTokenizer(path) if path.is_file() else None


def _read(path: Path) -> Any:
    if importlib.util.find_spec("tokenizers") is None:
        raise ConfigError(
            f'{path} requires the package tokenizers, which is not installed: pip install "flax-mesh[generate]"'
        )
    from tokenizers import Tokenizer as Package

    _read_object(path)
    try:
        found = Package.from_file(str(path))
    except Exception as error:
        if type(error) is not Exception:  # the package raises Exception itself for what it cannot read
            raise
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{path} is not a tokenizer that the package tokenizers reads: {reason}; replace it by that of the model"
        ) from error
    found.no_truncation()  # the file may store both, for batches of training: prompts and texts would change
    found.no_padding()
    return found


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; one line if it contains anything else."""
    try:
        found = read_json(path)
    except CheckpointCorruptedError as error:
        raise ConfigError(
            f"{path} is{error.problems[-1].removeprefix(' ')}; replace it by that of the model"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must be a JSON object; replace it by that of the model")
    return found


def stop_tokens(source: Source) -> tuple[int, ...]:
    """The ids that end a text, eos_token_id of generation_config.json or else of config.json; none for bytes.

    Raises ConfigError if they are no ids of the model.
    """
    if source.is_text:
        return ()
    for name in (GENERATION, CONFIG):
        path = source.files / name
        found = _read_object(path) if path.is_file() else {}
        if (stop := found.get(STOP)) is not None:
            return _ids(stop, path, source.model.vocab_size)
    return ()


def _ids(stop: Any, path: Path, vocab_size: int) -> tuple[int, ...]:
    ids = stop if isinstance(stop, list) else [stop]
    if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise ConfigError(
            f"{path}: {STOP} must be an id or a list of ids from 0 to {vocab_size - 1}, got {str(stop)[:80]}; repair it"
        )
    return tuple(ids)


class TextStream:
    """The text of tokens that arrive one by one: what `add` and `end` return together is the text of all of them.

    A character whose bytes are not complete yet is held back.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._text = ""  # returned so far

    def add(self, token: int) -> str:
        self._tokens.append(token)
        return self._rest(self._tokenizer.decode(self._tokens).rstrip(INCOMPLETE))

    def end(self) -> str:
        return self._rest(self._tokenizer.decode(self._tokens))

    def _rest(self, text: str) -> str:
        if not text.startswith(self._text):  # a decoder that changes earlier text, such as one that strips spaces
            return ""
        rest, self._text = text[len(self._text) :], text
        return rest
