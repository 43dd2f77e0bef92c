"""Files of rows: packed batches, the state of their stream, runs on them, and files that cannot be used."""

import itertools
import json
import re
import shlex
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
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
from flax_mesh.data.rows.tokens import Tokens
from flax_mesh.data.run_data import user_data
from flax_mesh.data.tokenizers.chat import open_tokenizer
from flax_mesh.data.user_batches import UserBatches
from flax_mesh.errors import ConfigError
from flax_mesh.models import Decoder, DecoderConfig, load_decoder, make_decoder, next_token_loss
from flax_mesh.recipe.overrides import to_texts
from flax_mesh.train import ChatConfig, TrainConfig, apply_overrides, load_recipe, mean_metrics, read_chats
from flax_mesh.train.metadata import check_resume
from tests.data.chat_files import config_of, read, write_rows
from tests.data.chat_tokenizers import CHATML, VOCABULARY, StandIn, ids_of, write_tokenizer
from tests.train.support.runs import rows_of, run

pytest.importorskip("jinja2", reason="of the extra finetune")
pytest.importorskip("grain", reason="of the extra finetune")

USER, REPLY = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(chats, "open_tokenizer", lambda folder, vocab_size: StandIn())
    monkeypatch.setattr(chats, "OPEN_ROWS", 8)  # grain needs a millisecond for a document of so small a file


def texts(count: int) -> list[dict[str, str]]:
    draw = np.random.default_rng(0)
    return [{"text": "".join(map(chr, draw.integers(97, 123, draw.integers(3, 20))))} for _ in range(count)]


def documents_of(batch: dict[str, np.ndarray]) -> list[tuple[int, np.ndarray]]:
    """(row, columns) of every document of a batch."""
    ids = batch["segment_ids"]
    return [(row, np.flatnonzero(ids[row] == i)) for row in range(len(ids)) for i in range(1, ids[row].max() + 1)]


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("packing", [True, False])
def test_documents_are_drawn_equally_often_and_none_continues_in_another(packing, tmp_path):
    rows = texts(12)
    iterator = read(config_of(tmp_path / "a.jsonl", rows, packing=packing, held_out=0.01)).batches(0)
    found, most = [], 0
    for batch in itertools.islice(iterator, 16):
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
    config = config_of(tmp_path / "a.jsonl", texts(24), packing=packing)
    first = read(config).batches(3)
    for _ in range(7):  # into the second epoch
        next(first)
    state = json.loads(json.dumps(first.get_state()))
    second = read(config).batches(3)
    second.set_state(state)
    for _ in range(8):
        one, other = next(first), next(second)
        assert all(one[name].tobytes() == other[name].tobytes() for name in one)
    assert (next(read(config).batches(4))["inputs"] != next(read(config).batches(3))["inputs"]).any()


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

RECIPE = Path(__file__).parents[2] / "recipes" / "finetune.py"
CHATS = [{"messages": [{"role": "user", "content": x["text"]}, REPLY]} for x in texts(40)]


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
def test_a_run_of_the_recipe_learns_and_resumes_bit_for_bit(tmp_path):
    sizes: Any = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "mlp_size": 24}
    small = DecoderConfig(vocab_size=len(VOCABULARY), rope_theta=5000.0, **sizes)
    parameters, hf = nnx.state(make_decoder(small, nnx.Rngs(0))), huggingface_config(vars(small))
    save_safetensors(tmp_path / "hf", parameters, DECODER_NAMES["llama"], config=hf, max_file_bytes=4000)
    settings = [f"data.source={write_rows(tmp_path / 'chats.jsonl', CHATS)}", "data.sequence_length=127"]
    settings += ["data.batch_size=8", "run.steps=6", "run.eval_every=3", "checkpoint.every=2", "model.dtype=float32"]
    settings += ["mesh.shape=dp:2,fsdp:4", "run.platform=auto", "optimizer.warmup_steps=0"]
    settings += ["optimizer.learning_rate=0.05", "lora.rank=2"]

    def config(name: str, start: str = "hf") -> TrainConfig:
        overrides = [*settings, f"checkpoint.start_from={tmp_path / start}", f"run.folder={tmp_path / name}"]
        return apply_overrides(load_recipe(str(RECIPE)), overrides)

    assert config("a").model == replace(small, remat="full", scan=True, loss_chunk=2048)
    ran = run(config("whole"))
    assert any("chats.jsonl: 40 rows of messages, 2 of them held out; " in line for line in ran.lines)
    run(config("killed"), kill_at=5)
    run(config("killed"))
    expected, found = (rows_of(tmp_path / name) for name in ("whole", "killed"))
    assert [row["loss"] for row in found] == [row["loss"] for row in expected]
    assert found[-1]["held_out/loss"] == expected[-1]["held_out/loss"] < found[2]["held_out/loss"]
    assert config("next", start="whole").model == config("whole").model


@pytest.mark.slow
def test_loss_and_gradients_of_a_packed_batch_equal_transformers(tmp_path):
    """The documents of a batch one by one in PyTorch."""
    torch = pytest.importorskip("torch", reason="comes with the extra hf")
    transformers = pytest.importorskip("transformers", reason="comes with the extra finetune")
    folder = tmp_path / "llama"
    torch.manual_seed(0)
    sizes: Any = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}
    sizes |= {"vocab_size": len(VOCABULARY), "hidden_size": 16, "bos_token_id": 0, "eos_token_id": 1}
    config = transformers.LlamaConfig(**sizes)
    theirs = transformers.LlamaForCausalLM(config)
    theirs.save_pretrained(folder, max_shard_size="8KB")
    write_tokenizer(folder, CHATML)
    assert len(list(folder.glob("*.safetensors"))) > 1
    path = write_rows(tmp_path / "chats.jsonl", CHATS)
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
    page = (RECIPE.parents[1] / "docs" / "finetune.md").read_text()
    example = page.partition("## An example")[2].partition("\n## ")[0]
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


def messages(question: Any, *answers: Any) -> dict[str, Any]:
    return {"messages": [USER | {"content": question}, *(REPLY | {"content": x} for x in answers)]}


GOOD, TEXT_PART = {"text": "good"}, {"type": "text", "text": "b"}
BAD_ROWS = [
    ([GOOD, "{"], "row 2: is no JSON: "),
    ([GOOD, "[1]"], "row 2: must be a JSON object, got list"),
    ([{"other": 1}], "row 1: must have 'messages' or 'prompt' and 'completion' or 'text', got 'other'"),
    ([GOOD, {"prompt": "a", "completion": "b"}], "row 2: has no 'text', which the first row has"),
    ([GOOD, {"text": 3}], "row 2: 'text' must be text, and 'text' not empty"),
    ([{"prompt": "a", "completion": ""}], "row 1: 'prompt' and 'completion' must be text, or lists of messages, and "),
    ([{"prompt": [USER], "completion": "b"}], "row 1: 'prompt' and 'completion' must be text, or lists of messages"),
    ([{"prompt": [USER], "completion": ["b"]}], "row 1: 'prompt' and 'completion' must be a list of objects"),
    ([{"prompt": [USER], "completion": []}], "row 1: has no token to train on"),
    ([GOOD, {"text": "x" * 31}], "row 2: has 33 tokens, but at most 32 fit; raise data.sequence_length, or set data."),
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
        ("a.txt", b"", "must be a .jsonl, .jsonl.gz or .parquet file, a folder with a dataset, or an id of the hub"),
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
    problem = "^data.held_out=0.05 of 3 rows is no row; raise it, or set run.eval_every=0$"
    with pytest.raises(ConfigError, match=problem):
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
    documents = [(Tokens(np.arange(3), np.ones(3, bool)),)]
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


def losses(model: nnx.Module, inputs: Any, targets: Any, **packed: Any) -> np.ndarray:
    logits = np.asarray(nnx.jit(lambda model, inputs, packed: model(inputs, **packed))(model, inputs, packed))
    chosen = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    return np.log(np.exp(logits).sum(-1)) - chosen


@pytest.mark.usefixtures("stand_in")
def test_losses_of_packed_documents_equal_separate_documents(tmp_path):
    iterator = read(config_of(tmp_path / "a.jsonl", texts(30), batch_size=1)).batches(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "mlp_size": 16,
        "num_layers": 2,
    }
    model = make_decoder(DecoderConfig(vocab_size=len(VOCABULARY), **sizes), nnx.Rngs(0))
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
