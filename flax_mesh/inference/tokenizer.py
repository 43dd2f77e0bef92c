"""Text to token ids and back: bytes, or the tokenizer.json of a Hugging Face model. Files are untrusted."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from flax_mesh.checkpoint.hf.kept import end_tokens, read_object
from flax_mesh.data.corpus import decode
from flax_mesh.data.tokenizers.process import REPAIR, Process, Reply
from flax_mesh.errors import ConfigError
from flax_mesh.inference.source import Source

FILE, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
BYTE_IDS = 256
INCOMPLETE = "\ufffd"  # the decoded bytes of an incomplete character
FEWEST = 8  # tokens of a prompt that are decoded with the tokens after it
MOST_HELD = 64  # tokens without a complete character; the bytes of one are 4


class Encoded(NamedTuple):
    """Tokens of a text, and how many bytes of the text precede the end of each of them."""

    tokens: np.ndarray
    ends: np.ndarray


class Tokenizer(Protocol):
    """`name` for messages; `is_bytes` if every token is a byte."""

    name: str
    is_bytes: bool

    def encode(self, text: str, *, special: bool = True) -> Encoded:
        """The tokens of a text; with `special`, also the tokens that the model expects around it."""
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


class JsonTokenizer(Process):
    """A tokenizer.json, read by the package tokenizers in a separate process."""

    is_bytes = False

    def __init__(self, path: Path):
        if importlib.util.find_spec("tokenizers") is None:
            raise ConfigError(
                f'{path} requires the package tokenizers, which is not installed: pip install "flax-mesh[generate]"'
            )
        read_object(path)
        super().__init__("tokenizers", path)
        self.name = str(path)

    def encode(self, text: str, *, special: bool = True) -> Encoded:
        ids, ends = self._asked("encode every text", {"text": text, "special": special}).value
        # Special tokens end at 0. A normalizer may report more characters than the text has.
        last = np.maximum.accumulate(np.clip(np.array(ends, np.int64), 0, len(text))) if ids else np.zeros(0, np.int64)
        sizes = np.concatenate([[0], np.cumsum(_utf8_sizes(text))])
        is_small = max(ids, default=0) < 2**31  # others are not ids of any model, and refused later
        return Encoded(np.array(ids, np.int32 if is_small else np.int64), sizes[last])

    def decode(self, tokens: Sequence[int]) -> str:
        return self._asked("decode all ids", {"ids": list(map(int, tokens))}).value

    def _asked(self, must: str, request: Mapping[str, object]) -> Reply:
        reply = self.ask(request)
        if reply.problem is not None:
            raise ConfigError(f"{self.path} must {must}, and failed: {reply.problem}; {REPAIR}, or use another text")
        return reply


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


def stop_tokens(source: Source) -> tuple[int, ...]:
    """`end_tokens` of the model; none for bytes."""
    return () if source.is_text else end_tokens(source.files, source.model.vocab_size)


def named_token(source: Source, tokenizer: Tokenizer, name: str) -> tuple[str, int] | None:
    """The text and the id of "bos_token" or "eos_token" in tokenizer_config.json; None if it is null or not there.

    Raises ConfigError if the text is not one token of the model.
    """
    path = source.files / TOKENIZER_CONFIG
    value = read_object(path).get(name) if path.is_file() else None
    text = value.get("content") if isinstance(value, dict) else value
    if text is None:
        return None
    ids = tokenizer.encode(text, special=False).tokens.tolist() if isinstance(text, str) else []
    if len(ids) != 1 or ids[0] >= source.model.vocab_size:
        what = f"must be one token with an id below {source.model.vocab_size}, got {str(value)[:80]}"
        raise ConfigError(f"{path}: {name} {what}; repair it")
    return str(text), ids[0]


def text_after(tokenizer: Tokenizer, before: Sequence[int], tokens: Sequence[int]) -> str:
    """The text `tokens` add to the text of `before`: the decoders of some tokenizers strip the first space of a text.

    If they change the text of `before`, as wrong bytes at the end of a run of byte tokens do: the text of `tokens`.
    """
    earlier, text = tokenizer.decode(before), tokenizer.decode([*before, *tokens])
    return text[len(earlier) :] if text.startswith(earlier) else tokenizer.decode(tokens)


def text_of(tokens: Sequence[int], stops: frozenset[int], tokenizer: Tokenizer | None, prompt: Sequence[int]) -> str:
    """The text that a continuation adds to its prompt, or its ids without a tokenizer; no stop at its end."""
    shown = tokens[:-1] if len(tokens) and int(tokens[-1]) in stops else tokens
    return " ".join(map(str, shown)) if tokenizer is None else text_after(tokenizer, prompt, shown)


class TextStream:
    """The text of tokens that arrive one by one after a prompt: `add` and `end` return the new text.

    Together they return `text_after` of all tokens, with two exceptions, both in tokens that are not UTF-8. A text that
    was returned stays, where a decoder of byte tokens replaces all characters of a run that has a wrong byte by U+FFFD.
    And a character whose bytes are not complete is held back, but not for more than MOST_HELD tokens.

    Every token is decoded with the tokens whose text was returned last, not with all of them.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._before = _last_tokens(tokenizer, prompt)
        self._held: list[int] = []

    def add(self, token: int) -> str:
        self._held.append(token)
        text = self._text()
        is_incomplete = not text or text.endswith(INCOMPLETE)
        return "" if is_incomplete and len(self._held) < MOST_HELD else self._release(text)

    def end(self) -> str:
        return self._release(self._text())

    def _text(self) -> str:
        return text_after(self._tokenizer, self._before, self._held)

    def _release(self, text: str) -> str:
        if text:  # special tokens have none, and the tokens after them are decoded after tokens that do
            self._before = self._held
        self._held = []
        return text


def _last_tokens(tokenizer: Tokenizer, tokens: Sequence[int]) -> Sequence[int]:
    """The end of a prompt, with text that does not begin within a character."""
    count = FEWEST
    while count < len(tokens) and (not (text := tokenizer.decode(tokens[-count:])) or INCOMPLETE in text):
        count *= 2
    return tokens[-count:]
