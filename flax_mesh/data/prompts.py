"""Prompts of a JSONL file, of which a model makes completions."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from flax_mesh.data.chats import Row, read_rows
from flax_mesh.data.config import ChatConfig
from flax_mesh.data.rows.tokens import BadRowError, Encoder, Tokens
from flax_mesh.data.user_batches import RowHashes, hash_rows
from flax_mesh.errors import ConfigError, Problem
from flax_mesh.fields import check_types
from flax_mesh.text import count_text


class Prompts(NamedTuple):
    """The prompts of a file, as `read_prompts` returns them.

    Attributes:
        rows: The JSON object of each row; its "prompt" is a text or messages.
        tokens: The tokens of each prompt, (n,) int32.
        end_token: The id that ends a completion: the end token of the tokenizer; None if it has none.
        decode: The text of tokens, without special ones.
        description: A line about the file.
    """

    rows: Sequence[Mapping[str, Any]]
    tokens: Sequence[np.ndarray]
    end_token: int | None
    decode: Callable[[Sequence[int]], str]
    description: str

    def hashes(self) -> RowHashes:
        """Of tokens and of the other keys, for `Rollouts`."""
        texts = (np.frombuffer(json.dumps(row, sort_keys=True).encode(), np.uint8) for row in self.rows)
        return hash_rows(zip(self.tokens, texts, strict=True))


@check_types
def read_prompts(config: ChatConfig, folder: str, vocab_size: int, *, max_tokens: int) -> Prompts:
    """Read the prompts of `data.source`, a .jsonl or .jsonl.gz file, with the tokenizer of a Hugging Face folder.

    A row has the key "prompt", a text or a list of messages, and may have "tools" and others. Messages end with the
    beginning of an answer, as the chat template renders it. A prompt and its completion of `max_tokens` must fit in
    data.sequence_length + 1 tokens. Raises a ConfigError with a line for every row with a mistake or a longer prompt.
    """
    most, rows = config.sequence_length + 1 - max_tokens, []
    encoders: list[Encoder] = []  # one, for all rows
    if most < 1:
        text = f"must be at most data.sequence_length={config.sequence_length}, for prompts of a token"
        raise ConfigError(Problem("data.max_tokens", text, value=max_tokens))

    def encode(encoder: Encoder, line: bytes) -> Row:
        row = encoder.read(line, (("prompt",),))
        ids = encoder.question(row["prompt"], row.get("tools"))
        if not 0 < len(ids) <= most:
            limits = f"a prompt must have 1 to {most}, so that data.max_tokens={max_tokens} fit after it"
            raise BadRowError(f"has {count_text(len(ids), 'token')}; {limits} (data.sequence_length)")
        rows.append(row)
        encoders[:] = [encoder]
        return (Tokens(ids, np.ones(len(ids), bool)),)

    tokens, description = read_rows(config, folder, vocab_size, encode, fit=lambda row, length: row)
    tokenizer = encoders[0].tokenizer
    return Prompts(rows, [ids for ((ids, _),) in tokens], tokenizer.eos_token_id, tokenizer.decode, description)
