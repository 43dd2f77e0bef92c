"""`flax-mesh generate`: its output, its files, and the mistakes that it reports before anything compiles."""

import itertools
import json
import shutil
import sys
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen

import numpy as np
import pytest

from flax_mesh.cli.common import BAD_INPUT, DONE, INTERRUPTED
from flax_mesh.cli.text.generated import Printer, json_of, printable
from flax_mesh.inference.prompts import Prompt
from flax_mesh.inference.tokenizer import JsonTokenizer
from flax_mesh.models import Generated
from flax_mesh.models.generation import memory
from tests.inference.small_run import TOKENS, save_run, write_byte_tokenizer, write_tokenizer

pytestmark = pytest.mark.usefixtures("quick_compilation")
HF = Path(__file__).parents[1] / "checkpoint" / "hf" / "data"
MESH = "mesh.shape=fsdp:1"


@pytest.fixture
def command(call):
    return partial(call, "generate")


def rows(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_streamed_text_equals_the_json_and_ends_before_a_stop_token(run, command, tmp_path):
    out = tmp_path / "out.jsonl"
    options = (MESH, "--temperature", 1, "--seed", 4, "--max-tokens", 12)
    code, text, errors = command(run, "--prompt", "é and", *options, "--out", out, "--report")
    assert code == DONE
    (row,) = rows(out.read_text())
    assert text == printable(row["text"]) + "\n"
    assert bytes(row["tokens"]).decode(errors="replace") == row["text"] and not row["stopped"]
    assert row["prompt"] == "é and" and bytes(row["prompt_tokens"]) == "é and".encode()
    assert len(row["tokens"]) == len(row["log_probs"]) == 12 and max(row["log_probs"]) < 0
    assert f"model: {run}/checkpoints/3, step 3" in errors and "tokenizer: bytes" in errors
    assert "note: 18 tokens of a prompt and its text are more than the 16 of the sequences of the trai" in errors
    assert "1 prompt, 12 tokens: first token after " in errors and "with compilation; then " in errors
    assert "steps: 12 steps of 1 row with 28 slots, 3 dispatches, 0.250 per step" in errors and "\nmeasured: " in errors
    assert "floor: the bandwidth of the memory is not known; " in errors
    token = row["tokens"][4]
    stopped_at = row["tokens"].index(token)
    (stopped,) = rows(command(run, "--prompt", "é and", *options, "--json", "--stop", token)[1])
    assert stopped["stopped"] and stopped["tokens"] == row["tokens"][: stopped_at + 1]
    assert stopped["text"] == bytes(stopped["tokens"][:-1]).decode(errors="replace")  # without the stop token


def test_lines_of_json_are_written_after_each_batch(run, command, tmp_path, monkeypatch):
    """A run that is interrupted in its second batch has written the first one."""
    out, count = tmp_path / "out.jsonl", itertools.count()

    def interrupt(self, prompt: int, token: int) -> None:
        if prompt == 2 and next(count) == 3:
            raise KeyboardInterrupt

    out.write_text("of a run before\n")
    options = ("--max-tokens", 12, "--batch-size", 2, MESH, "--json", *("--prompt", "a", "--prompt", "b") * 2)
    monkeypatch.setattr(Printer, "token", interrupt)
    code, text, _ = command(run, *options, "--out", out)
    assert code == INTERRUPTED and text == out.read_text()
    assert [(row["prompt"], len(row["tokens"])) for row in rows(text)] == [("a", 12), ("b", 12)]


@pytest.mark.slow
@pytest.mark.parametrize("has_out", [False, True])
def test_the_end_of_the_reader_ends_the_command_except_with_out(run, tmp_path, has_out):
    out = ["--out", str(tmp_path / "out.jsonl")] if has_out else []
    command = [sys.executable, "-m", "flax_mesh.cli", "generate", str(run), "--prompt", "a", MESH, *out]
    with Popen([*command, "--max-tokens", "900"], stdout=PIPE, stderr=PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == DONE and "Traceback" not in errors
    assert ("1 prompt, 900 tokens" in errors) == has_out
    if has_out:
        assert len(rows((tmp_path / "out.jsonl").read_text())[0]["tokens"]) == 900


def test_a_hugging_face_folder_with_a_tokenizer(command, tmp_path):
    folder = Path(shutil.copytree(HF / "llama", tmp_path / "hf"))
    write_tokenizer(folder, eos_token_id=[2, 5])
    code, text, errors = command(folder, "--prompt", "hello world", MESH, "--max-tokens", 1, "--json")
    (row,) = rows(text)
    assert code == DONE and row["prompt_tokens"][0] == 1 and isinstance(row["text"], str)
    assert f"tokenizer: {folder}/tokenizer.json" in errors and "llama" in errors
    (folder / "tokenizer.json").write_text("{}")
    code, _, errors = command(folder, "--prompt", "hello", MESH)
    assert (code, errors.count("\n")) == (BAD_INPUT, 1) and "is not a tokenizer" in errors


def test_the_text_begins_with_the_space_after_its_prompt_which_is_printed_escaped(tmp_path, capsys):
    tokenizer = JsonTokenizer(write_byte_tokenizer(tmp_path))
    row, ids = (tokenizer.encode(text).tokens for text in ("hello", "world hello"))
    assert tokenizer.decode(ids.tolist()) == "world hello"
    for num_prompts, expected in ((1, " world hello\n"), (2, "[2] hello\\x1b[2J\n world hello\n\n")):
        prompts = [Prompt("--prompt", "hello\x1b[2J")] * num_prompts
        printer = Printer(prompts, [row] * num_prompts, tokenizer, frozenset([2]), max_tokens=99, quiet=False)
        for token in [*ids.tolist(), 2]:
            printer.token(num_prompts - 1, token)
        assert capsys.readouterr().out == expected
    one = Generated(np.array([*ids, 2]), np.zeros(len(ids) + 1), stopped=True)
    assert json_of(prompts[0], row, one, tokenizer)["text"] == " world hello"


def test_a_model_without_a_tokenizer_takes_and_prints_ids(command, tmp_path):
    save_run(tmp_path / "run", description=TOKENS)
    (tmp_path / "ids.jsonl").write_text('{"tokens": [1, 2, 3]}\n')
    options = (tmp_path / "run", "--prompts", tmp_path / "ids.jsonl", MESH, "--max-tokens", 12)
    code, text, errors = command(*options)
    (row,) = rows(command(*options, "--json")[1])
    assert code == DONE and row["text"] is None and row["prompt"] is None and row["prompt_tokens"] == [1, 2, 3]
    assert text.split() == [*map(str, row["tokens"])] and "tokenizer: none" in errors
    code, _, errors = command(tmp_path / "run", "--prompt", "abc")
    assert code == BAD_INPUT and "--prompt is text, but the model has no tokenizer" in errors


def test_all_mistakes_are_reported_together_before_anything_compiles(run, command, tmp_path, compilations):
    (tmp_path / "p.jsonl").write_text('{"tokens": [256]}\n{"tokens": []}\n')
    options = ("--max-tokens", 0, "--temperature", -1, "--top-k", -1, "--top-p", 2, "--seed", -1, "--batch-size", 0)
    code, text, errors = command(
        *(run, "--prompt", "", "--prompts", tmp_path / "p.jsonl", *options, "--stop", "ab", "--stop", 300),
        *("--out", "/nowhere/out.jsonl", "run.steps=1", "mesh.shape=pp:2"),
    )
    lines = errors.splitlines()
    assert code == BAD_INPUT and not text and not compilations
    for part in (
        *("--max-tokens must be", "--temperature must be", "--top-k must be", "--top-p must be", "--seed must be"),
        *("--batch-size must be", "--out /nowhere/out.jsonl cannot be written", "run.steps has no effect here"),
        *("no pipeline; leave out pp", "--stop 'ab' must be one token", "--stop 300 is no token", "--prompt is empty"),
        *("p.jsonl, line 1 has the token 256", "p.jsonl, line 2 is empty"),
    ):
        assert sum(part in line for line in lines) == 1, part
    assert len(lines) == 14


def test_a_prompt_longer_than_the_cache_is_one_line(run, command, monkeypatch):
    code, _, errors = command(run, "--prompt", "abcdef", "--max-tokens", 5, "--cache-length", 8)
    assert code == BAD_INPUT
    expected = "--prompt has 6 tokens and needs a --cache-length of 11 with --max-tokens 5, got 8"
    assert errors == f"flax-mesh: {expected}\n"
    code, _, errors = command(run, "--prompt", "a", "--max-tokens", 2**31 - 1, MESH)
    assert code == BAD_INPUT and "the cache needs 2,147,483,663 slots" in errors.splitlines()[-1]
    monkeypatch.setattr(memory, "_device_bytes", lambda mesh: 1000)
    code, _, errors = command(run, "--prompt", "a", "--max-tokens", 50, MESH)
    # 2 layers, keys and values, 16 + 50 slots, 2 heads of 8 float32 numbers
    assert code == BAD_INPUT and f"needs {2 * 2 * 66 * 2 * 8 * 4 / 1024:.1f} KiB per device" in errors
    assert "lower --max-tokens, --cache-length or --batch-size" in errors
    code, _, errors = command(run, "--prompt", "a", "--max-tokens", 50, "mesh.shape=tp:4")  # one of 4 copies of a head
    assert code == BAD_INPUT and f"needs {2 * 2 * 66 * 8 * 4 / 1024:.2f} KiB per device" in errors
