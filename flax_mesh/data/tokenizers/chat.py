"""The tokenizer of a Hugging Face folder with its chat template, which transformers reads in a separate process."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flax_mesh.checkpoint.find import folders_of_files
from flax_mesh.checkpoint.hf.kept import tokenizer_file
from flax_mesh.data.tokenizers.process import Process
from flax_mesh.errors import ConfigError, Problem, labelled
from flax_mesh.store import TOKENIZER, model_folder

EXTRA = 'requires the package {}, which is not installed: pip install "flax-mesh[finetune]"'
PACKAGES = ("jinja2", "transformers")  # the first one renders chat templates


class ChatTokenizer(Process):
    """The methods of a tokenizer of transformers that chats need.

    They raise a ValueError for a text or messages that cannot be encoded, and a ConfigError if the process has ended
    because the files need too much time or memory.
    """

    def __init__(self, folder: Path):
        super().__init__("transformers", folder)
        self.bos_token_id: int | None = self.facts["bos_token_id"]
        self.eos_token_id: int | None = self.facts["eos_token_id"]
        self.chat_template: bool = self.facts["chat_template"]  # whether there is one

    def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
        return self._call("__call__", [text], options)

    def get_chat_template(self, **options: object) -> str:
        return self._call("get_chat_template", [], options)

    def apply_chat_template(self, messages: Sequence[object], **options: object) -> dict[str, list[int]]:
        return self._call("apply_chat_template", [messages], {"tokenize": True, "return_dict": True, **options})

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        return self._call("decode", [ids], {"skip_special_tokens": True})

    def _call(self, method: str, arguments: Sequence[object], options: dict[str, object]) -> Any:
        try:
            value, problem, has_ended = self.ask({"method": method, "arguments": arguments, "options": options})
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        if has_ended:
            what = f"the tokenizer and the chat template of {self.path} must encode every row, and failed"
            raise ConfigError(f"{what}: {problem}; replace these files by those of the model")
        if problem is not None:
            raise ValueError(problem)
        return value


def open_tokenizer(folder: str, vocab_size: int) -> ChatTokenizer:
    """The tokenizer of `checkpoint.start_from`: a Hugging Face folder, a run that started from one, or a step.

    Raises ConfigError without a tokenizer, for one with more ids than the model has, and without transformers.
    """
    with labelled("checkpoint.start_from"):
        path = model_folder(folder, TOKENIZER) if folder else None
    source = next((x for x in (folders_of_files(path) if path else ()) if tokenizer_file(x)), None)
    if source is None:
        text = "must be a folder with a tokenizer (tokenizer.json, ...), which encodes data.source"
        raise ConfigError(Problem("checkpoint.start_from", text, value=folder or "''"))
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"the tokenizer of {source} {EXTRA.format(missing[0])}")
    tokenizer = ChatTokenizer(source)
    if (size := tokenizer.facts["size"]) > vocab_size:
        text = f"must be at least {size}, the number of ids of the tokenizer in {source}"
        raise ConfigError(Problem("model.vocab_size", text, value=vocab_size))
    return tokenizer
