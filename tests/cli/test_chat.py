"""Conversations: every message is rendered by the chat template, and answers become messages."""

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flax_mesh.cli.generate as command
from flax_mesh.cli.main import main
from flax_mesh.cli.text import chat
from flax_mesh.errors import ConfigError
from flax_mesh.models import Generated
from tests.data.chat_tokenizers import CHATML, HEADERS, LAST_ONLY, STRICT, VOCABULARY, StandIn, ids_of, write_tokenizer

SOURCE: Any = SimpleNamespace(files="folder", model=SimpleNamespace(vocab_size=len(VOCABULARY)))
END = VOCABULARY["<|im_end|>"]


def decode(tokens: Any) -> str:
    names = {i: token for token, i in VOCABULARY.items()}
    return "".join(names[int(i)] for i in tokens)


DECODER: Any = SimpleNamespace(decode=decode)


def conversation(monkeypatch, template, system=""):
    monkeypatch.setattr(chat, "open_tokenizer", lambda folder, vocab_size: StandIn(template))
    return chat.Conversation(SOURCE, system)


@pytest.mark.parametrize("system", ["", "be short"])
def test_answers_and_questions_are_rendered_by_the_chat_template(monkeypatch, system):
    found = conversation(monkeypatch, CHATML, system)
    first = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    first += "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    row = found.ask("hi")
    assert row.tolist() == ids_of(first)
    tokens = np.array([*ids_of("hello"), END])
    one = Generated(tokens, np.zeros(len(tokens), np.float32), stopped=True)
    assert found.answer(row, one, DECODER, [END]) == "hello"
    second = "hello<|im_end|>\n<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    assert found.ask("why?").tolist() == ids_of(first + second)


def test_templates_that_cannot_render_a_conversation_are_one_line(monkeypatch):
    with pytest.raises(ConfigError, match="--chat requires a chat template, but the tokenizer of folder has none"):
        conversation(monkeypatch, None)
    with pytest.raises(ConfigError, match="--chat: the chat template cannot render it: the first role must be user"):
        conversation(monkeypatch, STRICT, "be short")
    without = CHATML.replace("for m in messages", "for m in messages if m.role != 'system'")
    with pytest.raises(ConfigError, match="--system: the chat template renders no messages of 'system'"):
        conversation(monkeypatch, without, "be short")


@pytest.mark.slow
@pytest.mark.parametrize("template", [CHATML, HEADERS, LAST_ONLY])
def test_the_tokens_of_a_chat_equal_transformers(template, tmp_path, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers", reason="comes with the extra finetune")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=len(VOCABULARY), num_key_value_heads=2, eos_token_id=END, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    write_tokenizer(Path(tmp_path), template)
    rows, answers, generate = [], [], command.generate

    def recorded(model, prompts, **options):
        rows.append(prompts[0].tolist())
        return generate(model, prompts, **options)

    monkeypatch.setattr(command, "generate", recorded)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hi\n\nwhy?\n")))
    answer = chat.Conversation.answer
    monkeypatch.setattr(chat.Conversation, "answer", lambda *args: answers.append(answer(*args)) or answers[-1])
    options = ["--chat", "--max-tokens", "5", "--temperature", "1", "run.platform=auto"]
    assert main(["generate", str(tmp_path), *options]) == 0
    messages = [("user", "hi"), ("assistant", answers[0]), ("user", "why?")]
    messages = [{"role": role, "content": content} for role, content in messages]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for row, upto in zip(rows, (1, 3), strict=True):
        wanted = tokenizer.apply_chat_template(messages[:upto], add_generation_prompt=True, return_dict=True)
        assert row == wanted["input_ids"]
    assert len(capsys.readouterr().out.splitlines()) >= 2
