"""Rows of text or messages as token ids of a Hugging Face tokenizer, and which of them are trained."""

import json
import logging
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from flax_mesh.checkpoint.find import CHECKPOINTS
from flax_mesh.checkpoint.hf.kept import KEPT, tokenizer_file
from flax_mesh.errors import ConfigError, Problem, labelled
from flax_mesh.fields import user_path
from flax_mesh.text import first_line, listed

FORMATS = (("messages",), ("prompt", "completion"), ("text",))
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
EXTRA = 'requires the package {}, which is not installed: pip install "flax-mesh[finetune]"'


class BadRowError(ValueError):
    """Why a row has no tokens to train on."""


class Tokens(NamedTuple):
    """Token ids of a row, and whether each of them is trained, (n,)."""

    ids: np.ndarray
    trained: np.ndarray


def open_tokenizer(folder: str, vocab_size: int) -> Any:
    """The tokenizer of `checkpoint.start_from`: a Hugging Face folder, or a run that started from one.

    Raises ConfigError without a tokenizer, for one with more ids than the model has, and without transformers.
    """
    with labelled("checkpoint.start_from"):
        path = user_path(folder) if folder else None
    source = next((x for x in (path, path / CHECKPOINTS / KEPT) if tokenizer_file(x)), None) if path else None
    if source is None:
        text = "must be a folder with a tokenizer (tokenizer.json, ...), which encodes data.source"
        raise ConfigError(Problem("checkpoint.start_from", text, value=folder or "''"))
    logger, quiet = logging.getLogger("transformers"), lambda record: "PyTorch was not found" not in record.getMessage()
    logger.addFilter(quiet)
    try:
        import jinja2  # noqa: F401 # pyright: ignore[reportMissingImports] (of chat templates)
        from transformers import AutoTokenizer  # pyright: ignore[reportMissingImports]

        tokenizer = AutoTokenizer.from_pretrained(str(source), local_files_only=True, trust_remote_code=False)
    except ModuleNotFoundError as error:
        raise ConfigError(f"the tokenizer of {source} {EXTRA.format(error.name)}") from error
    except (ValueError, OSError, TypeError, LookupError, AttributeError, ImportError) as error:
        problem = f"the tokenizer of {source} cannot be read: {type(error).__name__}: {first_line(error)}"
        raise ConfigError(f"{problem}; replace its files by those of the model") from error
    finally:
        logger.removeFilter(quiet)
    tokenizer.model_max_length = 2**31  # data.sequence_length is the limit
    if (size := max(tokenizer.get_vocab().values(), default=-1) + 1) > vocab_size:
        text = f"must be at least {size}, the number of ids of the tokenizer in {source}"
        raise ConfigError(Problem("model.vocab_size", text, value=vocab_size))
    return tokenizer


class Encoder:
    """Rows in the format of the first one, as tokens. `names` are its keys."""

    def __init__(self, tokenizer: Any, train_on: str):
        self.names: tuple[str, ...] = ()
        self._tokenizer, self._all, self._only_last = tokenizer, train_on == "all", train_on == "last"

    def __call__(self, line: bytes) -> Tokens:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadRowError(f"is no JSON: {first_line(error)}") from error
        if not isinstance(row, dict):
            raise BadRowError(f"must be a JSON object, got {type(row).__name__}")
        self.names = self.names or self._format_of(row)
        if missing := [name for name in self.names if name not in row]:
            raise BadRowError(f"has no {' and no '.join(map(repr, missing))}, which the first row has")
        values = [row[name] for name in self.names]
        if self.names == FORMATS[0] or (values[1:] and all(isinstance(x, list) for x in values)):
            return self._chat(values, row.get("tools"))
        return self._texts(values)

    def prompt(self, messages: Sequence[Any]) -> np.ndarray:
        """The tokens of messages and of the beginning of an answer, (n,)."""
        return np.array(self._apply(messages, add_generation_prompt=True)["input_ids"], np.int32)

    def _format_of(self, row: dict[str, Any]) -> tuple[str, ...]:
        names_of = next((names for names in FORMATS if all(name in row for name in names)), None)
        if names_of is None:
            wanted = " or ".join(" and ".join(map(repr, names)) for names in FORMATS)
            raise BadRowError(f"must have {wanted}, got {listed(map(repr, [*row][:8])) or 'no key'}")
        return names_of

    @cached_property
    def _has_marks(self) -> bool:
        if not self._tokenizer.chat_template:
            raise ConfigError("checkpoint.start_from: its tokenizer has no chat_template, which messages require")
        return MARKS.search(self._tokenizer.get_chat_template()) is not None

    def _texts(self, texts: Sequence[Any]) -> Tokens:
        """One text, or a prompt and its completion."""
        if not all(isinstance(x, str) for x in texts) or not texts[-1]:
            kinds = "text, or lists of messages" if texts[1:] else "text"
            raise BadRowError(f"{self._keys} must be {kinds}, and {self.names[-1]!r} not empty")
        ids, prompt = self._ids("".join(texts)), self._ids(texts[0]) if texts[1:] else []
        if ids[: len(prompt)] != prompt:
            raise BadRowError(
                "the tokens of 'prompt' do not begin those of both texts; move white space between them to 'completion'"
            )
        end = self._tokenizer.eos_token_id
        ids = ids if end is None else [*ids, end]
        return Tokens(np.array(ids, np.int32), np.arange(len(ids)) >= (0 if self._all else len(prompt)))

    def _ids(self, text: str) -> list[int]:
        """With the one token for the beginning that the tokenizer adds, and without any for the end."""
        try:
            ids = self._tokenizer(text)["input_ids"]
        except (ValueError, TypeError) as error:  # such as a surrogate
            raise BadRowError(f"cannot be encoded: {first_line(error)}") from error
        begin, end = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        while begin not in (None, end) and ids[:2] == [begin, begin]:  # the text has one too
            ids = ids[1:]
        while ids and ids[-1] == end:
            ids = ids[:-1]
        return ids

    @property
    def _keys(self) -> str:
        return " and ".join(map(repr, self.names))

    def _chat(self, values: Sequence[Any], tools: Any) -> Tokens:
        """Messages, or the messages of a prompt and of its completion, which alone is trained."""
        if not all(isinstance(x, list) and all(isinstance(message, dict) for message in x) for x in values):
            raise BadRowError(f"{self._keys} must be a list of objects")
        messages = [message for part in values for message in part]
        for i, message in enumerate(messages, 1):
            texts = message.get("role"), "" if message.get("tool_calls") else message.get("content")
            if not all(isinstance(x, str) for x in texts):
                raise BadRowError(f"'role' and 'content' of message {i} must be text")
        rendered = self._apply(messages, tools=tools, return_assistant_tokens_mask=self._has_marks)
        ids, prompt = rendered["input_ids"], len(messages) - len(values[-1])
        marks = np.array(rendered["assistant_masks"] if self._has_marks and not self._all else np.ones(len(ids)), bool)
        if self._all or (self._has_marks and not self._only_last and not prompt):
            return Tokens(np.array(ids, np.int32), marks)
        trained = np.zeros(len(ids), bool)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        for i in answers[-1:] if self._only_last else answers:
            if i >= prompt:
                trained[self._part(messages, i, ids, tools)] = True
        return Tokens(np.array(ids, np.int32), trained & marks)

    def _part(self, messages: Sequence[Any], i: int, ids: list[int], tools: Any) -> slice:
        """The tokens of message i, from the tokens of the messages before it, and of the messages up to it."""
        before = self._apply(messages[:i], tools=tools, add_generation_prompt=True)["input_ids"]
        after = self._apply(messages[: i + 1], tools=tools)["input_ids"]
        start = len(before)
        length = _length(ids[start:], after[start:]) if ids[:start] == before == after[:start] else None
        if length is None:
            raise BadRowError(
                f"the tokens of message {i + 1} are unknown: in this chat template the messages up to it do not begin "
                "those of all messages. Mark them in it by {% generation %}, or set data.train_on=last or all"
            )
        return slice(start, start + length)

    def _apply(self, messages: Sequence[Any], **options: Any) -> Any:
        from jinja2 import TemplateError  # pyright: ignore[reportMissingImports]

        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
        except (TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise BadRowError(f"the chat template cannot render it: {first_line(error)}") from error


def _length(ids: list[int], last: list[int]) -> int | None:
    """How many tokens at the beginning of `ids` belong to a message whose tokens are `last` as the last message.

    A template may add a beginning to the last message, such as thoughts, or an end, which ends all messages. None
    if it is neither, or not certain.
    """
    same = next((n for n, (a, b) in enumerate(zip(ids, last, strict=False)) if a != b), min(len(ids), len(last)))
    if last and (same == len(last) or (same and ids[same - len(last) :] == last[same:])):
        return same
    ends = [n for n in range(1, len(last)) if ids[n - 1 : n] == last[-1:] and ids[:n] == last[-n:]]
    return ends[0] if len(ends) == 1 else None
