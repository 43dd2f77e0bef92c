"""Rows of .jsonl files: their tokens and masks, packed batches, the state of their stream, and mistakes."""

import gzip
import itertools
import json
import re
import shlex
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from flax_mesh import create_mesh
from flax_mesh.checkpoint import DECODER_NAMES, huggingface_config, save_safetensors
from flax_mesh.checkpoint.hf.safetensors import open_safetensors
from flax_mesh.cli import main
from flax_mesh.cli.train import _progress
from flax_mesh.data import chats
from flax_mesh.data.chat_kinds import BadRowError
from flax_mesh.data.chat_tokens import Encoder, Tokens
from flax_mesh.data.run_data import user_data
from flax_mesh.data.tokenizers import process as tokenizer_process
from flax_mesh.data.tokenizers.chat import open_tokenizer
from flax_mesh.data.user_batches import UserBatches
from flax_mesh.errors import ConfigError
from flax_mesh.inference import chat
from flax_mesh.models import Decoder, DecoderConfig, load_decoder, make_decoder, next_token_loss
from flax_mesh.recipe.overrides import to_texts
from flax_mesh.train import (
    ChatConfig,
    TrainConfig,
    apply_overrides,
    load_recipe,
    mean_metrics,
    read_chats,
)
from flax_mesh.train.metadata import check_resume
from tests.data import chat_templates
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
from tests.train.support.runs import rows_of, run

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


# --- batches ---


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(chats, "open_tokenizer", lambda folder, vocab_size: StandIn())


def write(path: Path, rows: list[Any]) -> str:
    lines = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return str(path)


def texts(count: int) -> list[dict[str, str]]:
    draw = np.random.default_rng(0)
    return [{"text": "".join(map(chr, draw.integers(97, 123, draw.integers(3, 20))))} for _ in range(count)]


def config_of(path: Path, rows: list[Any], **settings: Any) -> ChatConfig:
    return ChatConfig(**{"source": write(path, rows), "sequence_length": 31, "batch_size": 4} | settings)


def read(config: ChatConfig) -> chats.Chats:
    return read_chats(config, "folder", len(VOCABULARY))


def documents_of(batch: dict[str, np.ndarray]) -> list[tuple[int, np.ndarray]]:
    """(row, columns) of every document of a batch."""
    ids = batch["segment_ids"]
    return [(row, np.flatnonzero(ids[row] == i)) for row in range(len(ids)) for i in range(1, ids[row].max() + 1)]


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("packing", [True, False])
def test_documents_are_drawn_equally_often_and_none_continues_in_another(packing, tmp_path):
    rows = texts(24)
    iterator = read(config_of(tmp_path / "a.jsonl", rows, packing=packing, held_out=0.01)).batches(0)
    found, most = [], 0
    for batch in itertools.islice(iterator, 32):
        assert {name: (x.shape, x.dtype) for name, x in batch.items()} == dict.fromkeys(
            ("inputs", "targets", "segment_ids"), ((4, 31), np.int32)
        )
        assert (batch["targets"][batch["segment_ids"] == 0] == -1).all()
        most = max(most, batch["segment_ids"].max())
        for row, columns in documents_of(batch):
            inputs, targets = batch["inputs"][row, columns], batch["targets"][row, columns]
            assert (inputs[1:] == targets[:-1]).all()
            found.append((*map(int, inputs), int(targets[-1])))
    counts, expected = Counter(found), [(0, *ids_of(row["text"]), 1) for row in rows]
    assert sorted(counts) == sorted(expected) and max(counts.values()) - min(counts.values()) <= 1
    assert found[:4] != expected[:4] and packing == (most > 1)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("packing", [True, False])
def test_the_state_of_a_stream_leads_to_the_same_batches_bit_for_bit(packing, tmp_path):
    config = config_of(tmp_path / "a.jsonl", texts(50), packing=packing)
    first = read(config).batches(3)
    for _ in range(7):  # into the second epoch
        next(first)
    state = json.loads(json.dumps(first.get_state()))
    second = read(config).batches(3)
    second.set_state(state)
    for _ in range(20):
        one, other = next(first), next(second)
        assert all(one[name].tobytes() == other[name].tobytes() for name in one)
    assert (next(read(config).batches(4))["inputs"] != next(read(config).batches(3))["inputs"]).any()


def losses(model: nnx.Module, inputs: Any, targets: Any, **packed: Any) -> np.ndarray:
    logits = np.asarray(nnx.jit(lambda model, inputs, packed: model(inputs, **packed))(model, inputs, packed))
    chosen = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    return np.log(np.exp(logits).sum(-1)) - chosen


@pytest.mark.usefixtures("stand_in")
def test_losses_of_packed_documents_equal_separate_documents(tmp_path):
    iterator = read(config_of(tmp_path / "a.jsonl", texts(30), batch_size=1)).batches(0)
    model = make_decoder(DecoderConfig(vocab_size=len(VOCABULARY), **SIZES), nnx.Rngs(0))
    batch = next(x for x in iterator if x["segment_ids"].max() > 2)
    packed = losses(model, batch["inputs"], batch["targets"], segment_ids=batch["segment_ids"])
    alone = {name: np.zeros((batch["segment_ids"].max(), 31), np.int32) for name in ("inputs", "targets")}
    for i, (_, columns) in enumerate(documents_of(batch)):
        for name, x in alone.items():
            x[i, : len(columns)] = batch[name][0, columns]
    expected = losses(model, alone["inputs"], alone["targets"])
    for i, (_, columns) in enumerate(documents_of(batch)):
        np.testing.assert_allclose(packed[0, columns], expected[i, : len(columns)], atol=1e-5)
    total, weight = nnx.jit(next_token_loss)(model, batch)
    counts = batch["targets"] >= 0
    assert weight == counts.sum()
    np.testing.assert_allclose(total, packed[counts].sum(), rtol=1e-5)


@pytest.mark.usefixtures("stand_in")
def test_the_rows_of_a_file_are_described_and_its_end_is_held_out(tmp_path):
    rows = [*texts(8), {"other": 1}, "", {"text": "x" * 60}, {"text": "last"}]
    config = config_of(tmp_path / "a.jsonl.gz", rows, on_bad_row="skip", on_long_row="truncate", held_out=0.2)
    found = read(config)
    description = UserBatches(lambda: found.batches(0), 4).description
    parts = ("a.jsonl.gz: 10 rows of text, 1 row skipped, the first: ", "a.jsonl.gz, row 9: has no 'text'")
    assert all(part in description for part in (*parts, "1 row truncated, 2 of them held out; "))
    assert description.endswith("% of the first batch is filled")
    seen = []

    def evaluate(batch: dict[str, np.ndarray]) -> dict[str, float]:
        seen.append(batch)
        return {"loss": 3.0, "weight": float((batch["targets"] >= 0).sum())}

    assert found.metrics(evaluate) == mean_metrics(evaluate, seen[:1])
    assert seen[0]["inputs"].shape == (4, 31) and len(documents_of(seen[0])) == 2
    assert (seen[0]["targets"] >= 0).sum() == 31 + 5


NEW = {"text": "new"}


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda rows: rows, []),
        (lambda rows: [*rows[:25], NEW, *rows[26:]], ["30 rows, 1 changed, the first difference at row 26"]),
        (lambda rows: [*rows[:3], NEW, *rows[3:]], ["31 rows, 1 added, the first difference at row 4"]),
        (lambda rows: rows[2:], ["28 rows, 2 removed, the first difference at row 1"]),
        (lambda rows: rows[::-1], ["30 rows, in another order, the first difference at row 1"]),
        (
            lambda rows: [NEW, *rows[1:], NEW],
            [f"31 rows, 1 {kind}, the first difference at row 1" for kind in ("changed", "added")],
        ),
    ],
)
def test_rows_that_changed_since_the_checkpoint_are_refused(edit, expected, tmp_path):
    records, rows = [], texts(30)
    for each in (rows, edit(rows)):
        config = config_of(tmp_path / "a.jsonl", each)
        data = user_data(UserBatches(lambda config=config: read(config).batches(0), 4), None, None)  # type: ignore
        records.append({"step": 3, "data": json.loads(json.dumps(data.record(0)))})
    recipe = TrainConfig(make_decoder, next_token_loss, DecoderConfig())
    saved, now = [record | {"config": to_texts(recipe)} for record in records]
    lines = [f"rows of data.source: 30 rows -> {text} (changes the result)" for text in expected]
    assert list(map(str, check_resume(saved, now, recipe, allow_changes=True))) == lines
    with pytest.raises(ConfigError) if expected else nullcontext() as caught:
        check_resume(saved, now, recipe, allow_changes=False)
    assert caught is None or list(map(str, caught.value.problems)) == lines


@pytest.mark.usefixtures("stand_in")
def test_the_command_line_prints_the_progress_of_a_long_file(tmp_path, monkeypatch):
    config, said = config_of(tmp_path / "a.jsonl", texts(3)), []
    monkeypatch.setattr(chats, "SAID_EVERY_S", -1.0)
    with _progress(said.append):
        read(config)
    read(config)
    assert said == [f"data: {n} of {tmp_path / 'a.jsonl'} are encoded" for n in ("0 rows", "1 row", "2 rows")]


# --- runs ---

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "mlp_size": 24,
    "num_layers": 2,
}
RECIPE = Path(__file__).parents[2] / "recipes" / "finetune.py"
CHATS = [{"messages": [{"role": "user", "content": x["text"]}, REPLY]} for x in texts(40)]


def settings_of(folder: Path, chats: str) -> list[str]:
    """For a run of the recipe on 8 devices of CPUs."""
    found = [f"checkpoint.start_from={folder}", f"data.source={chats}", "data.sequence_length=127"]
    found += ["data.batch_size=8", "run.steps=6", "run.eval_every=3", "checkpoint.every=2", "model.dtype=float32"]
    return [*found, "mesh.shape=dp:2,fsdp:4", "run.platform=auto", "optimizer.warmup_steps=0", "lora.rank=2"]


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
def test_a_run_of_the_recipe_learns_and_resumes_bit_for_bit(tmp_path):
    small = DecoderConfig(vocab_size=len(VOCABULARY), rope_theta=5000.0, **SIZES)
    parameters, hf = nnx.state(make_decoder(small, nnx.Rngs(0))), huggingface_config(vars(small))
    save_safetensors(tmp_path / "hf", parameters, DECODER_NAMES["llama"], config=hf, max_file_bytes=4000)
    settings = settings_of(tmp_path / "hf", write(tmp_path / "chats.jsonl", CHATS))

    def config(name: str) -> TrainConfig:
        overrides = [*settings, "optimizer.learning_rate=0.05", f"run.folder={tmp_path / name}"]
        return apply_overrides(load_recipe(str(RECIPE)), overrides)

    assert config("a").model == replace(small, remat="full", scan=True, loss_chunk=2048)
    ran = run(config("whole"))
    assert any("chats.jsonl: 40 rows of messages, 2 of them held out; " in line for line in ran.lines)
    run(config("killed"), kill_at=5)
    run(config("killed"))
    expected, found = (rows_of(tmp_path / name) for name in ("whole", "killed"))
    assert [row["loss"] for row in found] == [row["loss"] for row in expected]
    assert found[-1]["held_out/loss"] == expected[-1]["held_out/loss"] < found[2]["held_out/loss"]
    later = [x for x in settings if not x.startswith(("checkpoint.start_from", "lora"))]
    later += [f"checkpoint.start_from={tmp_path / 'whole'}", "optimizer.learning_rate=0.05"]
    assert apply_overrides(load_recipe(str(RECIPE)), later).model == config("whole").model


@pytest.mark.slow
def test_loss_and_gradients_of_a_packed_batch_equal_transformers(tmp_path):
    """The documents of a batch one by one in PyTorch."""
    torch = pytest.importorskip("torch", reason="comes with the extra hf")
    transformers = pytest.importorskip("transformers", reason="comes with the extra finetune")
    folder = tmp_path / "llama"
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
    }
    config = transformers.LlamaConfig(
        vocab_size=len(VOCABULARY), hidden_size=16, bos_token_id=0, eos_token_id=1, **sizes
    )
    theirs = transformers.LlamaForCausalLM(config)
    theirs.save_pretrained(folder, max_shard_size="8KB")
    write_tokenizer(folder, CHATML)
    assert len(list(folder.glob("*.safetensors"))) > 1
    path = write(tmp_path / "chats.jsonl", CHATS)
    data = ChatConfig(source=path, sequence_length=200, batch_size=4)
    batch = next(read_chats(data, str(folder), config.vocab_size).batches(0))

    total, count = torch.zeros(()), 0
    for row, columns in documents_of(batch):
        inputs, targets = (torch.tensor(batch[name][row, columns]).long() for name in ("inputs", "targets"))
        logits = theirs(inputs[None]).logits[0]
        total = total + torch.nn.functional.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
        count += int((targets >= 0).sum())
    (total / count).backward()

    ours, _ = load_decoder(folder, create_mesh((1, 1, 1, 1, 1), devices=jax.devices()[:1]))

    def loss(model: Decoder) -> Any:
        loss_sum, weight = next_token_loss(model, batch)
        return loss_sum / weight

    value, gradients = nnx.jit(nnx.value_and_grad(loss))(ours)
    np.testing.assert_allclose(value, (total / count).item(), rtol=1e-5)
    save_safetensors(tmp_path / "gradients", gradients, DECODER_NAMES["llama"])
    found = open_safetensors(tmp_path / "gradients")
    expected = {name: x.grad.numpy() for name, x in theirs.named_parameters()}
    assert found.keys() == expected.keys() and len(documents_of(batch)) > 4
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_the_example_of_the_docs_runs_with_transformers_and_learns(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch", reason="comes with the extra hf")
    transformers = pytest.importorskip("transformers", reason="comes with the extra finetune")
    monkeypatch.chdir(tmp_path)
    example = (
        (RECIPE.parents[1] / "docs" / "finetune.md").read_text().partition("## An example")[2].partition("\n## ")[0]
    )
    exec("\n".join(line[4:] for line in example.partition("```")[0].splitlines() if line.startswith("    ")), {})
    train, generate, export = re.findall(r"^flax-mesh (.*)$", example, re.MULTILINE)
    capsys.readouterr()
    assert main(shlex.split(train.replace("recipes/finetune.py", str(RECIPE)))) == 0
    printed = capsys.readouterr()
    assert "chats.jsonl: 200 rows of messages, 10 of them held out; " in printed.out and printed.err == ""
    losses = [row["loss"] for row in rows_of(tmp_path / "runs" / "finetune")]
    assert losses[-1] < losses[0] / 2
    assert main(shlex.split(generate)) == 0 and main(shlex.split(export)) == 0
    tokenizers = [transformers.AutoTokenizer.from_pretrained(name) for name in ("tiny", "tuned")]
    assert tokenizers[0].chat_template == tokenizers[1].chat_template
    transformers.AutoModelForCausalLM.from_pretrained("tuned")


# --- mistakes ---


def messages(*contents: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": role, "content": x} for role, x in zip(("user", "assistant"), contents, strict=False)]
    }


GOOD, TEXT_PART = {"text": "good"}, {"type": "text", "text": "b"}
BAD_ROWS = [
    ([GOOD, "{"], "row 2: is no JSON: "),
    ([GOOD, "[1]"], "row 2: must be a JSON object, got list"),
    ([{"other": 1}], "row 1: must have 'messages' or 'prompt' and 'completion' or 'text', got 'other'"),
    ([GOOD, {"prompt": "a", "completion": "b"}], "row 2: has no 'text', which the first row has"),
    ([GOOD, {"text": 3}], "row 2: 'text' must be text, and 'text' not empty"),
    ([{"prompt": "a", "completion": ""}], "row 1: 'prompt' and 'completion' must be text, or lists of messages, and "),
    (
        [{"prompt": [USER], "completion": "b"}],
        "row 1: 'prompt' and 'completion' must be text, or lists of messages, and ",
    ),
    ([{"prompt": [USER], "completion": ["b"]}], "row 1: 'prompt' and 'completion' must be a list of objects"),
    ([{"prompt": [USER], "completion": []}], "row 1: has no token to train on"),
    (
        [GOOD, {"text": "x" * 31}],
        "row 2: has 33 tokens, but at most 32 fit; raise data.sequence_length, or set data.on",
    ),
    ([messages("a")], "row 1: has no token to train on"),
    ([messages("a", 3)], "row 1: 'role' and 'content' of message 2 must be text"),
    ([{"messages": "a"}], "row 1: 'messages' must be a list of objects"),
    ([{"messages": []}], "row 1: 'messages' must have a message"),
    (
        [messages("a", [{"type": "text", "text": "b"}, {"type": "image"}])],
        "row 1: 'content' of message 2 has parts of type 'image'; all parts must be texts",
    ),
    ([messages("a", [TEXT_PART])], "row 1: the chat template renders parts of 'content' as a list, not as text; join"),
    ([messages("a", [TEXT_PART | {"text": 3}])], "row 1: 'role' and 'content' of message 2 must be text"),
]


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("rows", "problem"), BAD_ROWS)
def test_a_row_that_cannot_be_used_is_one_line_with_its_place(rows, problem, tmp_path):
    config = config_of(tmp_path / "a.jsonl", rows)
    with pytest.raises(ConfigError) as caught:
        read(config)
    (line,) = caught.value.problems
    assert line.startswith(f"{tmp_path / 'a.jsonl'}, {problem}")


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
    "no end": (
        "{{ 10 ** (10 ** 10) }}",
        "the package transformers did not end in 1 s; replace these files by ",
    ),
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
    for call in (lambda: read(config), lambda: chat.Conversation(source).ask("a")):
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


@pytest.mark.usefixtures("stand_in")
def test_all_rows_that_cannot_be_used_are_listed_in_an_error_of_limited_length(tmp_path):
    with pytest.raises(ConfigError) as caught:
        read(config_of(tmp_path / "a.jsonl", [GOOD, *[{"other": 1}] * 99]))
    assert len(caught.value.problems) == 99 and len(str(caught.value)) <= 2000 and "more lines" in str(caught.value)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", b"", "has no row to train on"),
        ("a.jsonl", b"{}\n", "has no row to train on, 1 row skipped, the first: "),
        ("a.txt", b"", "must be a .jsonl or .jsonl.gz file"),
        ("a.jsonl.gz", b"no archive", "cannot be read: Not a gzipped file"),
        ("a.jsonl.gz", b"\x1f\x8b\x08" + bytes(7), "cannot be read: Compressed file ended before the end-of-stream"),
    ],
)
def test_a_file_without_rows_is_one_line(name, content, problem, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read(ChatConfig(source=str(tmp_path / name), on_bad_row="skip"))
    (line,) = caught.value.lines
    assert line.startswith(f"data.source={tmp_path / name} {problem}")


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("settings", [{"batch_size": 0}, {"batch_size": "x"}, {"batch_size": 2**31}, {"held_out": 2}])
def test_settings_are_checked_before_the_file(settings):
    ((name, value),) = settings.items()
    with pytest.raises(ConfigError, match=rf"^data.{name} must be .*, got '?{value}'?$|^data.{name}={value} must be "):
        read_chats(ChatConfig(**settings), "folder", 100)


@pytest.mark.usefixtures("stand_in")
def test_held_out_rows_that_are_none_are_one_line(tmp_path):
    with pytest.raises(
        ConfigError, match=r"^data.held_out=0.05 of 3 rows is no row; raise it, or set run.eval_every=0$"
    ):
        read(config_of(tmp_path / "a.jsonl", [GOOD] * 3)).metrics(lambda batch: pytest.fail("must not be called"))


def test_a_folder_without_a_tokenizer_and_a_missing_package_are_one_line(tmp_path, monkeypatch):
    for folder in ("", str(tmp_path), str(tmp_path / "absent")):
        with pytest.raises(ConfigError, match=r"^checkpoint.start_from=.* must be a folder with a tokenizer") as caught:
            open_tokenizer(folder, 100)
        assert len(caught.value.lines) == 1
    (tmp_path / "tokenizer.json").write_text("{}")
    for package in ("transformers", "jinja2"):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ConfigError, match=rf'requires the package {package}.*"flax-mesh\[finetune\]"$'):
            open_tokenizer(str(tmp_path), 100)
    monkeypatch.setitem(sys.modules, "grain", None)
    documents = [Tokens(np.arange(3), np.ones(3, bool))]
    with pytest.raises(ConfigError, match=r"^packing requires the package grain"):
        chats.Chats(ChatConfig(), documents, "").batches(0)


@pytest.mark.slow
def test_a_tokenizer_of_transformers_with_too_many_ids_or_damage_is_one_line(tmp_path):
    pytest.importorskip("transformers", reason="comes with the extra finetune")
    kept = tmp_path / "checkpoints" / "huggingface"  # of a run
    write_tokenizer(kept, CHATML)
    assert open_tokenizer(str(tmp_path), len(VOCABULARY)).facts["size"] == len(VOCABULARY)
    with pytest.raises(ConfigError, match=rf"^model.vocab_size=50 must be at least {len(VOCABULARY)}, the number"):
        open_tokenizer(str(tmp_path), 50)
    (kept / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"^the tokenizer of .*/huggingface cannot be read: Expecting"):
        open_tokenizer(str(tmp_path), 50)
