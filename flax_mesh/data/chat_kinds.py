"""The kinds of data in messages that a chat template leaves out: a role, tools, and keys such as tool_calls."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from flax_mesh.text import at_most, count_text, shown

Message = Mapping[str, Any]
Render = Callable[..., list[int]]
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


class LeftOut:
    """Compares, for the first row that has a kind, the tokens of the row with those of the row without it."""

    def __init__(self) -> None:
        self._is_left_out: dict[Kind, bool] = {}
        self._rows: Counter[Kind] = Counter()

    def look(self, messages: Sequence[Message], tools: Any, ids: list[int], render: Render) -> None:
        """`render(messages, tools)` returns tokens, or raises a BadRowError."""
        for kind in _kinds(messages, tools):
            self._rows[kind] += self._compare(kind, messages, tools, ids, render)
        in_parts = [m["role"] for m in messages if isinstance(m.get("content"), list) and text_of(m)]
        is_rendered = not all(self._is_left_out[Kind("role", role)] for role in in_parts)
        if is_rendered and self._compare(PARTS, messages, tools, ids, render):
            raise BadRowError("the chat template renders parts of 'content' as a list, not as text; join the parts")

    def _compare(self, kind: Kind, messages: Sequence[Message], tools: Any, ids: list[int], render: Render) -> bool:
        """Whether the kind is left out, by the first row that has it."""
        if kind not in self._is_left_out:
            try:
                others = [_without(kind, message) for message in messages]
                self._is_left_out[kind] = render(others, None if kind.of == "row" else tools) == ids
            except BadRowError:
                self._is_left_out[kind] = False
        return self._is_left_out[kind]

    def check_answer(self, message: Message, number: int) -> None:
        """Raise a BadRowError if nothing of a message that is trained is rendered."""
        keys = [kind for kind in _kinds([message], None) if kind.of == "key"]
        if keys and not text_of(message) and all(self._is_left_out.get(kind) for kind in keys):
            raise BadRowError(f"message {number} has only {_listed(keys)}, which the chat template does not render")

    def notes(self) -> list[str]:
        """A line for every kind that is left out."""
        lines = [f"the chat template renders no {kind}: {count_text(n, 'row')}" for kind, n in self._rows.items() if n]
        return at_most(lines, SHOWN)


PARTS = Kind("parts", "content")


def text_of(message: Message) -> str:
    """The text of a message, also of its parts."""
    content = message.get("content")
    return "".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _kinds(messages: Sequence[Message], tools: Any) -> dict[Kind, None]:
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
