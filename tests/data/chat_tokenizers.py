"""Tokenizers of single characters and special tokens, with chat templates: a stand-in, and a class of transformers."""

import re
from pathlib import Path
from typing import Any

BEGIN, END = "<s>", "</s>"
SPECIAL = [BEGIN, END, "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CHARACTERS = ["\n", *map(chr, range(32, 127))]
OTHERS = ["<start_of_turn>", "<end_of_turn>", "<INST>", "</INST>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
OTHERS += ["<|endoftext|>", "<|im_sep|>", "<think>", "</think>"]
VOCABULARY = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS, *OTHERS])}
TOKEN = re.compile(rf"{'|'.join(map(re.escape, SPECIAL + OTHERS))}|[\s\S]")

PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT
)  # as Qwen's
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}" + PROMPT
)
HEADERS = (  # as Llama 3's
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LAST_ONLY = "{% for m in messages %}<|im_start|>{{ m.role if loop.last else '' }}\n{{ m.content }}{% endfor %}"
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('the first role must be user') }}{% endif %}" + CHATML


class StandIn:
    """The methods of a tokenizer of transformers that the data needs."""

    bos_token_id, eos_token_id = VOCABULARY[BEGIN], VOCABULARY[END]

    def __init__(self, chat_template: str | None = CHATML, path: Path = Path("hf")):
        self.chat_template, self.path = chat_template, path

    def get_chat_template(self, tools: Any = None) -> str | None:
        return self.chat_template

    def get_vocab(self) -> dict[str, int]:
        return VOCABULARY

    def decode(self, ids: list[int], **options: Any) -> str:
        names = [*VOCABULARY]
        return "".join(names[i] for i in ids if i < len(names) and names[i] in CHARACTERS)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [self.bos_token_id] * add_special_tokens + ids_of(text)}

    def apply_chat_template(self, messages: Any, **options: Any) -> dict[str, list[int]]:
        import jinja2.sandbox  # pyright: ignore[reportMissingImports]

        def refuse(text: str) -> None:
            raise ValueError(text)

        if not messages:
            raise ValueError("the conversation is empty")
        assert self.chat_template is not None
        template = self.chat_template.replace("{% generation %}", "\1").replace("{% endgeneration %}", "\1")
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        prompt = options.get("add_generation_prompt", False)
        names = {
            "bos_token": BEGIN,
            "eos_token": END,
            "tools": options.get("tools"),
            "add_generation_prompt": prompt,
            "raise_exception": refuse,
        }
        parts = environment.from_string(template).render(messages=messages, **names).split("\1")
        marked = [(i, j % 2) for j, part in enumerate(parts) for i in ids_of(part)]
        return {"input_ids": [i for i, _ in marked], "assistant_masks": [mask for _, mask in marked]}


STAND_IN_PACKAGE = """
from pathlib import Path
from tests.data.chat_tokenizers import StandIn

class AutoTokenizer:
    @staticmethod
    def from_pretrained(folder, **options):
        return StandIn(Path(folder, "chat_template.jinja").read_text())
"""


def write_stand_in(folder: Path, monkeypatch: Any) -> None:
    """A package transformers, whose tokenizers are stand-ins with the template of a folder, for processes too."""
    (folder / "transformers.py").write_text(STAND_IN_PACKAGE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{Path(__file__).parents[2]}")


def ids_of(text: str) -> list[int]:
    return [VOCABULARY[token] for token in TOKEN.findall(text)]


def shown(ids: Any, trained: Any) -> str:
    """The text of tokens, with those that are trained in brackets."""
    names = {i: token for token, i in VOCABULARY.items()}
    text = "".join(f"[{names[int(i)]}]" if on else names[int(i)] for i, on in zip(ids, trained, strict=True))
    return text.replace("][", "")


def write_tokenizer(folder: Path, chat_template: str | None) -> None:
    """The same tokenizer, written by transformers."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast  # pyright: ignore[reportMissingImports]

    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.add_special_tokens(SPECIAL + OTHERS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, VOCABULARY[BEGIN])]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=END)
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
