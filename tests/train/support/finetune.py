"""A tiny Llama as transformers writes it, with a tokenizer and a file of chats to train it on."""

import json
from pathlib import Path
from typing import Any

from tests.data.chat_tokenizers import CHATML, VOCABULARY, write_tokenizer

SETTINGS = (
    "data.sequence_length=63",
    "data.batch_size=8",
    "data.held_out=0.1",
    "model.dtype=float32",
    "optimizer.warmup_steps=0",
    "optimizer.learning_rate=0.02",
    "pipeline.num_microbatches=2",
)


def write_llama(folder: Path) -> None:
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    count = len(VOCABULARY) // 4 * 4 + 4  # tp:4 divides it
    sizes: dict[str, Any] = {"vocab_size": count, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(bos_token_id=0, eos_token_id=1, **sizes, **heads)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder, CHATML)


def write_chats(path: Path) -> None:
    rows = [[{"role": "user", "content": f"{i} + 1"}, {"role": "assistant", "content": f"{i + 1}."}] for i in range(80)]
    path.write_text("\n".join(json.dumps({"messages": messages}) for messages in rows))
