"""A conversation with a trained decoder, as messages of the chat template of its tokenizer."""

from collections.abc import Iterable

import numpy as np

from flax_mesh.data.rows.tokens import BadRowError, Encoder
from flax_mesh.data.tokenizers.chat import open_tokenizer
from flax_mesh.errors import ConfigError
from flax_mesh.inference.source import Source
from flax_mesh.inference.tokenizer import Tokenizer, text_of
from flax_mesh.models import Generated


class Conversation:
    """The messages so far. Raises a ConfigError for a folder without a tokenizer or without a chat template."""

    def __init__(self, source: Source, system: str = ""):
        tokenizer = open_tokenizer(str(source.files), source.model.vocab_size)
        if not tokenizer.chat_template:
            raise ConfigError(f"--chat requires a chat template, but the tokenizer of {source.files} has none")
        self.stop_tokens = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self._encoder = Encoder(tokenizer, "assistant")
        self._messages: list[dict[str, str]] = []
        asked: list[np.ndarray] = []
        # A template that refuses the message of the system, or leaves it out, is known before the first question.
        for text in (f"{system}x", system) if system else ():
            self._messages = [{"role": "system", "content": text}]
            asked.append(self.ask("a"))
            self._messages.pop()
        if asked and np.array_equal(asked[0], asked[1]):
            raise ConfigError("--system: the chat template renders no messages of 'system'; put it in a question")

    def ask(self, text: str) -> np.ndarray:
        """The tokens (P,) of all messages with this one of the user, up to the answer."""
        self._messages.append({"role": "user", "content": text})
        try:
            return self._encoder.prompt(self._messages)
        except BadRowError as error:
            raise ConfigError(f"--chat: {error}") from error

    def answer(self, row: np.ndarray, result: Generated, tokenizer: Tokenizer, stops: Iterable[int]) -> str:
        """The text that was generated after `row`, which becomes a message of the assistant."""
        text = text_of(result.tokens.tolist(), frozenset(stops), tokenizer, row.tolist())
        self._messages.append({"role": "assistant", "content": text})
        return text
