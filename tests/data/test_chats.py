"""Rows of messages and texts: their tokens, which of them are trained, and chat templates that cannot be used."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flax_mesh.cli.text import chat
from flax_mesh.data import chats
from flax_mesh.data.rows.kinds import BadRowError
from flax_mesh.data.rows.tokens import Encoder
from flax_mesh.data.tokenizers import process as tokenizer_process
from flax_mesh.data.tokenizers.chat import open_tokenizer
from flax_mesh.errors import ConfigError
from tests.data import chat_templates
from tests.data.chat_files import config_of, read
from tests.data.chat_templates import MISTRAL, PHI_3, QWEN_25
from tests.data.chat_tokenizers import (
    CHATML,
    HEADERS,
    LAST_ONLY,
    MARKED,
    STRICT,
    VOCABULARY,
    StandIn,
    ids_of,
    shown,
    write_stand_in,
    write_tokenizer,
)

pytest.importorskip("jinja2", reason="of the extra finetune")
pytest.importorskip("grain", reason="of the extra finetune")

USER, REPLY = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}
CHAT = [{"role": "system", "content": "S"}, USER, REPLY, {"role": "user", "content": "?"}, REPLY]
MASKED = {
    "chatml": (
        CHATML,
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Yo<|im_end|>\n]"
        "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n[Yo<|im_end|>\n]",
    ),
    "marked": (
        MARKED,
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Yo<|im_end|>]\n"
        "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n[Yo<|im_end|>]\n",
    ),
    "headers": (
        HEADERS,
        "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi"
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n[Yo<|eot_id|>]"
        "<|start_header_id|>user<|end_header_id|>\n\n?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[Yo<|eot_id|>]",
    ),
}
MASKED_CHATS = {name: (template, CHAT, text) for name, (template, text) in MASKED.items()} | chat_templates.CASES
TEXTS = [
    ({"text": "ab"}, "[<s>ab</s>]"),
    ({"text": "<s>ab</s></s>"}, "[<s>ab</s>]"),
    ({"prompt": "a ", "completion": "b"}, "<s>a [b</s>]"),
    ({"prompt": "<s>a", "completion": "b</s>"}, "<s>a[b</s>]"),
    ({"prompt": "", "completion": "b"}, "<s>[b</s>]"),
]


def masked(tokenizer: Any, row: dict[str, Any], train_on: str = "assistant") -> str:
    return shown(*Encoder(tokenizer, train_on)(json.dumps(row).encode()))


@pytest.mark.parametrize("name", MASKED_CHATS)
def test_the_tokens_of_the_assistant_are_trained(name):
    template, chat, expected = MASKED_CHATS[name]
    assert masked(StandIn(template), {"messages": chat}) == expected
    ids = [i for i in ids_of(expected) if i not in ids_of("[]")]
    everything = Encoder(StandIn(template), "all")(json.dumps({"messages": chat}).encode())
    assert everything.ids.tolist() == ids and everything.trained.all()
    first, last = expected.replace("[", "").replace("]", ""), expected.rpartition("[")[2]
    only_last = f"{first.removesuffix(last.replace(']', ''))}[{last}"
    assert masked(StandIn(template), {"messages": chat}, "last") == only_last


@pytest.mark.parametrize("template", ["chatml", "marked"])
def test_only_the_messages_of_the_assistant_in_a_completion_are_trained(template):
    template, expected = MASKED[template]
    row = {"prompt": CHAT[:-1], "completion": CHAT[-1:]}
    first, _, last = expected.rpartition("[")
    assert masked(StandIn(template), row) == f"{first.replace('[', '').replace(']', '')}[{last}"
    row = {"prompt": CHAT[:2], "completion": CHAT[2:]}
    assert masked(StandIn(template), row) == masked(StandIn(template), {"messages": CHAT}) == expected
    assert masked(StandIn(template), row, "last").count("[") == 1


def test_only_the_last_message_is_trained_where_earlier_ones_are_unknown():
    chat = [*chat_templates.SYSTEM, *chat_templates.TURNS]
    expected = "<s><INST> Hi</INST> Yo</s><INST> S\n\n?</INST>[ Ok</s>]"
    assert masked(StandIn(chat_templates.MISTRAL_LAST), {"messages": chat}, "last") == expected


BEGUN = [USER | {"role": "assistant"}, *CHAT[-2:]]
REST = "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n[Yo<|im_end|>\n]"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, f"<|im_start|>assistant\n[Hi<|im_end|>\n]{REST}"),
        (QWEN_25, f"<|im_start|>system\nBe good.<|im_end|>\n<|im_start|>assistant\n[Hi<|im_end|>\n]{REST}"),
        (PHI_3, "<|assistant|>\n[Hi<|end|>\n]<|user|>\n?<|end|>\n<|assistant|>\n[Yo<|end|>\n<|endoftext|>]"),
        (MISTRAL, "[<s> Hi</s>]<INST> ?</INST>[ Yo</s>]"),
    ],
)  # fmt: skip
def test_the_first_message_of_a_conversation_may_be_an_answer(template, expected):
    assert masked(StandIn(template), {"messages": BEGUN}) == expected


def test_an_answer_without_a_known_beginning_is_one_line():
    template = CHATML.replace("<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>{% endif")
    with pytest.raises(ValueError, match=r"^the tokens of message 1 are unknown: "):
        masked(StandIn(template), {"messages": BEGUN})


AS_TEXT = "(m.content if m.content is string else m.content | join(attribute='text'))"
PARTS = CHATML.replace("m.content", AS_TEXT)


def test_content_in_parts_is_rendered_by_the_template():
    parts = [message | {"content": [{"type": "text", "text": x} for x in message["content"]]} for message in CHAT]
    assert masked(StandIn(PARTS), {"messages": parts}) == MASKED["chatml"][1]


CALLS = {"role": "assistant", "content": None, "tool_calls": [{"function": chat_templates.CALL}]}
NO_SYSTEM = CHATML.replace("for m in messages", "for m in messages if m.role != 'system'")


def test_data_that_the_template_leaves_out_is_named_with_the_number_of_rows():
    encoder = Encoder(StandIn(NO_SYSTEM), "assistant")
    rows = [CHAT, CHAT[1:], [*CHAT[:-1], CALLS | {"content": "a", "weight": 1, "name": ""}]]
    for row in rows:
        encoder(json.dumps({"messages": row, "tools": [{"name": "f"}]}).encode())
    notes = {"'tools'": "3 rows", "messages of 'system'": "2 rows", "'tool_calls'": "1 row", "'weight'": "1 row"}
    assert encoder.notes() == [f"the chat template renders no {kind}: {count}" for kind, count in notes.items()]
    with pytest.raises(ValueError, match=r"^message 2 has only 'tool_calls', which the chat template does not render$"):
        encoder(json.dumps({"messages": [USER, CALLS, *CHAT]}).encode())
    with_tools = CHATML.replace("{{ m.content }}", "{{ m.content }}{% if tools %}{{ m.tool_calls }}{% endif %}")
    encoder = Encoder(StandIn(with_tools), "assistant")
    encoder(json.dumps({"messages": [USER, CALLS | {"content": "a"}]}).encode())
    encoder(json.dumps({"messages": [USER, CALLS], "tools": [{"name": "f"}]}).encode())  # here they are rendered
    encoder = Encoder(StandIn(NO_SYSTEM), "assistant")
    system = {"role": "system", "content": [{"type": "text", "text": "s"}], "k" * 999: 1}
    encoder(json.dumps({"messages": [system, *CHAT[1:]]}).encode())
    role, key = encoder.notes()
    assert role == "the chat template renders no messages of 'system': 1 row" and len(key) < 250
    for template, messages, _ in chat_templates.CASES.values():
        encoder = Encoder(StandIn(template), "assistant")
        encoder(json.dumps({"messages": messages}).encode())
        assert encoder.notes() == []


def test_texts_that_begin_with_the_token_that_the_tokenizer_adds_are_counted():
    encoder = Encoder(StandIn(), "assistant")
    found = [shown(*encoder(json.dumps({"text": text}).encode())) for text in ("a", "<s>a", "<s><s>a")]
    assert found == ["[<s>a</s>]"] * 3
    text = "texts that begin with the token for the beginning, which the tokenizer adds, have it once (data.add_bos)"
    assert encoder.notes() == [f"{text}: 2 rows"]
    encoder = Encoder(StandIn(), "assistant", add_bos=False)
    found = [shown(*encoder(json.dumps({"text": text}).encode())) for text in ("a", "<s>a")]
    assert found == ["[a</s>]", "[<s>a</s>]"] and encoder.notes() == []


def test_a_tokenizer_that_cannot_encode_the_empty_text_is_no_traceback():
    class Strict(StandIn):
        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            if not text:
                raise ValueError("a text must have a character")
            return super().__call__(text, add_special_tokens)

    assert masked(Strict(), {"text": "a"}) == "[<s>a</s>]"
    with pytest.raises(BadRowError, match=r"^cannot be encoded: a text must have a character$"):
        masked(Strict(), {"text": "<s>a"})


@pytest.mark.parametrize(("row", "expected"), TEXTS)
def test_a_text_has_one_token_for_its_beginning_and_one_for_its_end(row, expected):
    assert masked(StandIn(), row) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKED_CHATS)
def test_tokens_and_masks_of_transformers_are_the_same(name, tmp_path, capsys):
    pytest.importorskip("transformers", reason="comes with the extra finetune")
    template, chat, expected = MASKED_CHATS[name]
    write_tokenizer(tmp_path, template)
    tokenizer = open_tokenizer(str(tmp_path), len(VOCABULARY))
    assert masked(tokenizer, {"messages": chat}) == expected
    for row, text in TEXTS:
        assert masked(tokenizer, row) == text
    assert capsys.readouterr().err == ""


WITHOUT_TORCH = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.startswith("torch") else find(name, package)
"""


@pytest.mark.slow
def test_transformers_encodes_without_torch_and_without_a_warning(tmp_path, monkeypatch, capfd):
    pytest.importorskip("transformers", reason="comes with the extra finetune")
    write_tokenizer(tmp_path, CHATML)
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert masked(open_tokenizer(str(tmp_path), 1000), {"messages": CHAT}).count("[") == 2
    assert capfd.readouterr() == ("", "")


# --- templates that cannot be used ---


@pytest.mark.parametrize(
    ("template", "row", "problem"),
    [
        (LAST_ONLY, {"messages": CHAT}, "row 1: the tokens of message 3 are unknown: "),
        (chat_templates.MISTRAL_LAST, {"messages": CHAT}, "row 1: the tokens of message 3 are unknown: "),
        (chat_templates.MIDDLE, {"messages": CHAT}, "row 1: the tokens of message 3 are unknown: "),
        (chat_templates.GEMMA_2, {"messages": CHAT}, "row 1: the chat template cannot render it: no system message"),
        (STRICT, {"messages": CHAT}, "row 1: the chat template cannot render it: the first role must be user"),
        (None, {"messages": CHAT}, "checkpoint.start_from: its tokenizer has no chat_template"),
    ],
)
def test_a_template_that_cannot_be_used_is_one_line(template, row, problem, tmp_path, monkeypatch):
    monkeypatch.setattr(chats, "open_tokenizer", lambda folder, vocab_size: StandIn(template))
    with pytest.raises(ConfigError) as caught:
        read(config_of(tmp_path / "a.jsonl", [row], sequence_length=200))
    (line,) = caught.value.problems
    assert problem in line


HOSTILE = {
    "a long range": ("{% for i in range(10**8) %}{% endfor %}", "row 1: the chat template cannot render it: Range too"),
    "a long text": ("{{ 'x' * 10**13 }}", "the package transformers needs more memory: its process has at most "),
    "a wide text": ("{{ '%999999999999999d' % 1 }}", "the package transformers needs more memory: its process has "),
    "no end": ("{{ 10 ** (10 ** 10) }}", "the package transformers did not end in 1 s; replace these files by "),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "cannot render it: maximum recursion depth exc"),
    "deep nesting": ("{{ " + "(" * 10**5 + " }}", ""),
    "no template": ("{% for %}{{", "row 1: the chat template cannot render it: Expected an expression, got 'end of"),
    "an unknown name": ("{{ a.b }}", "row 1: the chat template cannot render it: 'a' is undefined"),
    "a private name": ("{{ ''.__class__.__mro__ }}", "row 1: the chat template cannot render it: access to attribute"),
}


DEFAULT = ("a long text", "no end", "deep nesting")


@pytest.mark.parametrize("case", DEFAULT)
def test_a_hostile_template_is_one_line(case, tmp_path, monkeypatch, capfd):
    template, problem = HOSTILE[case]
    write_stand_in(tmp_path, monkeypatch)
    check_hostile_template(template, problem, tmp_path, monkeypatch)
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in HOSTILE if case not in DEFAULT])
def test_a_hostile_template_of_transformers_is_one_line(case, tmp_path, monkeypatch, capfd):
    pytest.importorskip("transformers", reason="comes with the extra finetune")
    template, problem = HOSTILE[case]
    write_tokenizer(tmp_path, template)
    check_hostile_template(template, problem, tmp_path, monkeypatch)
    assert capfd.readouterr() == ("", "")


def check_hostile_template(template: str, problem: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer.json").touch()  # of the stand-in
    config = config_of(folder / "a.jsonl", [{"messages": CHAT}])
    source: Any = SimpleNamespace(files=folder, model=SimpleNamespace(vocab_size=len(VOCABULARY)))
    calls = (lambda: read(config), lambda: chat.Conversation(source).ask("a"))
    for call in calls[: 1 if "did not end" in problem else 2]:  # that one computes for a second
        monkeypatch.setattr(tokenizer_process, "SECONDS", 60)
        tokenizer = open_tokenizer(str(folder), len(VOCABULARY))
        for module in (chats, chat):
            monkeypatch.setattr(module, "open_tokenizer", lambda folder, vocab_size, found=tokenizer: found)
        monkeypatch.setattr(tokenizer_process, "SECONDS", 1 if "did not end" in problem else 60)
        with pytest.raises(ConfigError) as caught:
            call()
        (line,) = caught.value.problems
        assert (
            line.startswith("the tokenizer and the chat") if "package" in problem else ("row 1" in line or "--" in line)
        )
        assert problem.removeprefix("row 1: ") in line and "\n" not in line and len(line) < 600
