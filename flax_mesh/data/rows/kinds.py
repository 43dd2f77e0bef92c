"""The kinds of data in messages that a chat template leaves out: a role, tools, and keys such as tool_calls."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from flax_mesh.text import at_most, count_text, shown

Message = Mapping[str, Any]
SHOWN = 8
EMPTY = (None, "", [], {})


class BadRowError(ValueError):
    """Why a row has no tokens to train on."""


class Kind(NamedTuple):
    """`of` is "role", "key" (of messages), "row" (a key of the row) or "parts" (of the content)."""

    of: str
    name: str

    def __str__(self) -> str:
        return f"messages of {shown(self.name)}" if self.of == "role" else shown(self.name)


class Row(NamedTuple):
    """A row as the template renders it. `render(messages, tools)` returns tokens, or raises a BadRowError."""

    messages: Sequence[Message]
    tools: object
    ids: list[int]
    render: Callable[..., list[int]]

    def is_equal(self, messages: Sequence[Message], tools: object) -> bool:
        """Whether the tokens of other messages are the same."""
        try:
            return self.render(messages, tools) == self.ids
        except BadRowError:
            return False


class LeftOut:
    """Compares, for the first row that has a kind, the tokens of the row with those of the row without it."""

    def __init__(self) -> None:
        self._is_left_out: dict[Kind, bool] = {}
        self._rows: Counter[Kind] = Counter()

    def look(self, row: Row) -> None:
        """Raise a BadRowError if the template renders the parts of a content as a list."""
        for kind in _kinds(row.messages, row.tools):
            self._rows[kind] += self._compare(kind, row)
        in_parts = [m["role"] for m in row.messages if isinstance(m.get("content"), list) and text_of(m)]
        is_rendered = not all(self._is_left_out[Kind("role", role)] for role in in_parts)
        if is_rendered and self._compare(PARTS, row):
            raise BadRowError("the chat template renders parts of 'content' as a list, not as text; join the parts")

    def _compare(self, kind: Kind, row: Row) -> bool:
        """Whether the kind is left out, by the first row that has it."""
        if kind not in self._is_left_out:
            others = [_without(kind, message) for message in row.messages]
            self._is_left_out[kind] = row.is_equal(others, None if kind.of == "row" else row.tools)
        return self._is_left_out[kind]

    def check_answer(self, row: Row, i: int) -> None:
        """Raise a BadRowError if nothing of message i, which is trained, is rendered."""
        message = row.messages[i]
        keys = [kind for kind in _kinds([message], None) if kind.of == "key"]
        if keys and not text_of(message) and all(self._is_left_out.get(kind) for kind in keys):
            empty = {name: value for name, value in message.items() if Kind("key", name) not in keys}
            if row.is_equal([*row.messages[:i], empty, *row.messages[i + 1 :]], row.tools):
                raise BadRowError(f"message {i + 1} has only {_listed(keys)}, which the chat template does not render")

    def notes(self) -> list[str]:
        """A line for every kind that is left out."""
        lines = [f"the chat template renders no {kind}: {count_text(n, 'row')}" for kind, n in self._rows.items() if n]
        return at_most(lines, SHOWN)


PARTS = Kind("parts", "content")


def text_of(message: Message) -> str:
    """The text of a message, also of its parts."""
    content = message.get("content")
    return "".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _kinds(messages: Sequence[Message], tools: object) -> dict[Kind, None]:
    kinds = [Kind("row", "tools")] if tools not in EMPTY else []
    for message in messages:
        kinds += [Kind("role", message["role"])] if text_of(message) else []
        others = [name for name, value in message.items() if name not in ("role", "content") and value not in EMPTY]
        kinds += [Kind("key", name) for name in others]
    return dict.fromkeys(kinds)


def _without(kind: Kind, message: Message) -> Message:
    """Without a key; with another text for a role, and with the code of a list for parts."""
    content: Any = message.get("content")
    if kind.of == "key":
        return {name: value for name, value in message.items() if name != kind.name}
    if kind == PARTS and isinstance(content, list):
        return {**message, "content": str(content)}
    if kind.of == "role" and message["role"] == kind.name and text_of(message):
        addition = {"type": "text", "text": "x"}
        return {**message, "content": [*content, addition] if isinstance(content, list) else f"{content}x"}
    return message


def _listed(kinds: Sequence[Kind]) -> str:
    return ", ".join(at_most([str(kind) for kind in kinds], SHOWN))
