"""Files of rows for the tokenizer of chat_tokenizers.py, whose child processes must not import this module."""

import gzip
import json
from pathlib import Path
from typing import Any

from flax_mesh.data.chats import Chats, read_chats
from flax_mesh.train import ChatConfig
from tests.data.chat_tokenizers import VOCABULARY


def write_rows(path: Path, rows: list[Any]) -> str:
    lines = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return str(path)


def config_of(path: Path, rows: list[Any], **settings: Any) -> ChatConfig:
    return ChatConfig(**{"source": write_rows(path, rows), "sequence_length": 31, "batch_size": 4} | settings)


def read(config: ChatConfig) -> Chats:
    return read_chats(config, "folder", len(VOCABULARY))
