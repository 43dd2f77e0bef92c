"""Rows of text or messages as token ids of a Hugging Face tokenizer, and which of them are trained."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np

from flax_mesh.data.rows.kinds import BadRowError, LeftOut, Message, Row
from flax_mesh.errors import ConfigError
from flax_mesh.text import at_most, count_text, first_line, listed

Result = TypeVar("Result")
Line = bytes | Message
FORMATS = (("messages",), ("prompt", "completion"), ("text",))
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Tokens(NamedTuple):
    """Token ids of a row, and whether each of them is trained, (n,)."""

    ids: np.ndarray
    trained: np.ndarray


class Encoder:
    """Rows in the format of the first one, as tokens. `names` are its keys."""

    def __init__(self, tokenizer: Any, train_on: str, *, add_bos: bool = True):
        self.names: tuple[str, ...] = ()
        self._marks: dict[bool, bool] = {}
        self._left_out, self._add_bos, self._with_bos = LeftOut(), add_bos, 0
        self.tokenizer, self._all, self._only_last = tokenizer, train_on == "all", train_on == "last"

    def __call__(self, line: Line) -> Tokens:
        row = self.read(line, FORMATS)
        return self.encode({name: row[name] for name in self.names}, row.get("tools"))

    def read(self, line: Line, formats: Sequence[tuple[str, ...]]) -> Message:
        """The object of a row, of JSON or read already, which has the keys of the first row's format."""
        try:
            row = json.loads(line) if isinstance(line, bytes) else line
        except (ValueError, RecursionError) as error:
            raise BadRowError(f"is no JSON: {first_line(error)}") from error
        if not isinstance(row, Mapping):
            raise BadRowError(f"must be a JSON object, got {type(row).__name__}")
        self.names = self.names or _format_of(row, formats)
        if missing := [name for name in self.names if name not in row]:
            raise BadRowError(f"has no {' and no '.join(map(repr, missing))}, which the first row has")
        return row

    def encode(self, named: Message, tools: object) -> Tokens:
        """The tokens of values under their keys: messages, a text, or a prompt and its completion of either kind."""
        if (*named,) == FORMATS[0] or (len(named) > 1 and all(isinstance(x, list) for x in named.values())):
            return self._chat(named, tools)
        return self._texts(named)

    def notes(self) -> list[str]:
        """Lines about the rows: what their chat template leaves out, and texts that begin with a special token."""
        text = "texts that begin with the token for the beginning, which the tokenizer adds, have it once"
        lines = [f"{text} (data.add_bos): {count_text(self._with_bos, 'row')}"] if self._with_bos else []
        return [*self._left_out.notes(), *lines]

    def prompt(self, messages: Sequence[Message]) -> np.ndarray:
        """The tokens of messages and of the beginning of an answer, (n,)."""
        return np.array(self._apply(messages, add_generation_prompt=True)["input_ids"], np.int32)

    def question(self, prompt: object, tools: object) -> np.ndarray:
        """The tokens before an answer, (n,): of a text, or of messages and the beginning of the answer."""
        if isinstance(prompt, str):
            return np.array(self._ids(prompt)[0], np.int32)
        if not isinstance(prompt, list) or not prompt or not all(isinstance(message, dict) for message in prompt):
            raise BadRowError("'prompt' must be text, or a list of objects with a message")
        for i, message in enumerate(prompt, 1):
            _check_message(message, i)
        self._has_marks(tools)  # raises an error without a template

        def render(messages: Sequence[Message], tools: object) -> list[int]:
            return self._apply(messages, tools=tools, add_generation_prompt=True)["input_ids"]

        ids = render(prompt, tools)
        self._left_out.look(Row(prompt, tools, ids, render))
        return np.array(ids, np.int32)

    def _has_marks(self, tools: object) -> bool:
        """Whether the template, of which a tokenizer may have another one for tools, marks the assistant's tokens."""
        if not self.tokenizer.chat_template:
            raise ConfigError("checkpoint.start_from: its tokenizer has no chat_template, which messages require")
        if (key := bool(tools)) not in self._marks:
            template = _valid("the chat template is unknown", self.tokenizer.get_chat_template, tools=tools or None)
            self._marks[key] = MARKS.search(template) is not None
        return self._marks[key]

    def _texts(self, named: Mapping[str, str]) -> Tokens:
        """One text, or a prompt and its completion."""
        *_, last = named
        texts = [*named.values()]
        if not all(isinstance(x, str) for x in texts) or not texts[-1]:
            kinds = "text, or lists of messages" if texts[1:] else "text"
            raise BadRowError(f"{_keys(named)} must be {kinds}, and {last!r} not empty")
        ids, has_two = self._ids("".join(texts))
        prompt = self._ids(texts[0])[0] if texts[1:] else []
        self._with_bos += has_two
        if ids[: len(prompt)] != prompt:
            raise BadRowError(
                f"the tokens of 'prompt' do not begin those of both texts; move white space between them to {last!r}"
            )
        end = self.tokenizer.eos_token_id
        ids = ids if end is None else [*ids, end]
        return Tokens(np.array(ids, np.int32), np.arange(len(ids)) >= (0 if self._all else len(prompt)))

    def _ids(self, text: str) -> tuple[list[int], bool]:
        """With one token for the beginning if the tokenizer adds it, and without any for the end.

        Also whether the text has one for the beginning too.
        """
        ids = self._encoded(text)
        begin, end = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        has_two = ids[:2] == [begin, begin] and self._adds_bos
        while has_two and ids[:2] == [begin, begin]:
            ids = ids[1:]
        while ids and ids[-1] == end:
            ids = ids[:-1]
        return ids, has_two

    def _encoded(self, text: str) -> list[int]:
        return _valid("cannot be encoded", self.tokenizer, text, add_special_tokens=self._add_bos)["input_ids"]

    @cached_property
    def _adds_bos(self) -> bool:
        begin, ids = self.tokenizer.bos_token_id, self._encoded("")
        return begin is not None and ids[:1] == [begin]

    def _chat(self, named: Message, tools: object) -> Tokens:
        """Messages, or the messages of a prompt and of its completion, which alone is trained."""
        values = [*named.values()]
        if not all(isinstance(x, list) and all(isinstance(message, dict) for message in x) for x in values):
            raise BadRowError(f"{_keys(named)} must be a list of objects")
        messages = [message for part in values for message in part]
        if not messages:
            raise BadRowError(f"{_keys(named)} must have a message")
        for i, message in enumerate(messages, 1):
            _check_message(message, i)
        has_marks = self._has_marks(tools)
        rendered = self._apply(messages, tools=tools, return_assistant_tokens_mask=has_marks)
        ids, prompt = rendered["input_ids"], len(messages) - len(values[-1])
        marks = np.array(rendered["assistant_masks"] if has_marks and not self._all else np.ones(len(ids)), bool)
        row = Row(messages, tools, ids, lambda *others: self._apply(others[0], tools=others[1])["input_ids"])
        self._left_out.look(row)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        answers = [i for i in (answers[-1:] if self._only_last else answers) if i >= prompt]
        for i in answers:
            self._left_out.check_answer(row, i)
        if self._all or (has_marks and not self._only_last and not prompt):
            return Tokens(np.array(ids, np.int32), marks)
        trained = np.zeros(len(ids), bool)
        for i in answers:
            trained[self._part(messages, i, ids, tools)] = True
        return Tokens(np.array(ids, np.int32), trained & marks)

    def _part(self, messages: Sequence[Message], i: int, ids: list[int], tools: object) -> slice:
        """The tokens of message i, from the tokens of the messages before it, and of the messages up to it."""
        after = self._apply(messages[: i + 1], tools=tools)["input_ids"]
        if i:
            before = self._apply(messages[:i], tools=tools, add_generation_prompt=True)["input_ids"]
        else:
            before = _beginning(after, self._apply(messages[:1], tools=tools, add_generation_prompt=True)["input_ids"])
        start = len(before)
        length = _length(ids[start:], after[start:]) if ids[:start] == before == after[:start] else None
        if length is None:
            raise BadRowError(
                f"the tokens of message {i + 1} are unknown: in this chat template the messages up to it do not begin "
                "those of all messages. Mark them in it by {% generation %}, or set data.train_on=last or all"
            )
        return slice(start, start + length)

    def _apply(self, messages: Sequence[Message], **options: object) -> dict[str, list[int]]:
        return _valid("the chat template cannot render it", self.tokenizer.apply_chat_template, messages, **options)


def _format_of(row: Mapping[str, object], formats: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    names_of = next((names for names in formats if all(name in row for name in names)), None)
    if names_of is None:
        wanted = " or ".join(" and ".join(map(repr, names)) for names in formats)
        raise BadRowError(f"must have {wanted}, got {listed(map(repr, [*row][:8])) or 'no key'}")
    return names_of


def _keys(named: Mapping[str, object]) -> str:
    return " and ".join(map(repr, named))


def _valid(problem: str, method: Callable[..., Result], *arguments: object, **options: object) -> Result:
    """The result of a method of a tokenizer. A ValueError becomes a BadRowError."""
    try:
        return method(*arguments, **options)
    except ConfigError:
        raise
    except ValueError as error:
        raise BadRowError(f"{problem}: {first_line(error)}") from error


def _check_message(message: Message, number: int) -> None:
    content = message.get("content")
    if isinstance(content, list):
        kinds = [part.get("type") if isinstance(part, dict) else type(part).__name__ for part in content]
        if others := [kind for kind in kinds if kind != "text"]:
            problem = f"'content' of message {number} has parts of type {listed(at_most([*map(repr, others)], 4))}"
            raise BadRowError(f"{problem}; all parts must be texts")
        texts = [message.get("role"), *(part.get("text") for part in content)]
    else:
        texts = [message.get("role"), "" if message.get("tool_calls") and content is None else content]
    if not all(isinstance(x, str) for x in texts):
        raise BadRowError(f"'role' and 'content' of message {number} must be text")


def num_equal(a: Sequence[object], b: Sequence[object]) -> int:
    """How many items at the beginning of two sequences are equal."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _beginning(ids: list[int], asked: list[int]) -> list[int]:
    """The tokens before the answer in a conversation that begins with it: up to its generation prompt.

    `asked` are the same tokens with another generation prompt at their end. If the conversation has none at its
    beginning, `asked` is returned, with which it does not begin.
    """
    same = num_equal(ids, asked)
    prompt = asked[same:]
    ends = [n for n in range(len(prompt), len(ids) + 1) if ids[n - len(prompt) : n] == prompt]
    return ids[: ends[0]] if ends else asked


def _length(ids: list[int], last: list[int]) -> int | None:
    """How many tokens at the beginning of `ids` belong to a message whose tokens are `last` as the last message.

    A template may add a beginning to the last message, such as thoughts, or an end, which ends all messages. None
    if it is neither, or not certain.
    """
    same = num_equal(ids, last)
    if last and (same == len(last) or (same and ids[same - len(last) :] == last[same:])):
        return same
    ends = [n for n in range(1, len(last)) if ids[n - 1 : n] == last[-1:] and ids[:n] == last[-n:]]
    return ends[0] if len(ends) == 1 else None
