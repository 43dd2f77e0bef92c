"""`flax-mesh evaluate`: its table and its JSON, and the held-out loss of the run."""

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from flax_mesh.cli import evaluate as cli
from flax_mesh.cli.common import BAD_INPUT, DONE
from flax_mesh.data.corpus import load_corpus
from flax_mesh.inference.evaluate import Evaluation
from flax_mesh.inference.tokenizer import Bytes
from flax_mesh.train import apply_overrides, train
from tests.inference.small_run import recipe
from tests.train.bigram import write_text

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def trained(run, tmp_path_factory) -> tuple[Path, Path]:
    """A run, and a text."""
    return run, write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture
def command(call):
    return partial(call, "evaluate")


def test_several_sets_are_a_table(trained, command, tmp_path):
    run, held_out = trained
    np.save(tmp_path / "tokens.npy", np.frombuffer(held_out.read_bytes(), np.uint8))
    data = ("--data", f"text={held_out}", "--data", tmp_path / "tokens.npy", "--max-tokens", 101)
    code, text, _ = command(run, *data, "mesh.shape=fsdp:1", "--batch-size", 50)
    head, first, second = text.splitlines()
    assert code == DONE and head.split() == ["set", "tokens", "bytes", "loss", "bits/byte", "perplexity"]
    name, tokens, size, loss, bits, perplexity = first.split()
    assert (name, tokens, size) == ("text", "100", "100")
    assert float(bits) == pytest.approx(float(loss) / math.log(2), abs=2e-4)
    assert second.split() == [str(tmp_path / "tokens.npy"), "100", "-", loss, "-", perplexity]


def test_a_loss_that_is_not_finite_is_a_warning(trained, command, monkeypatch):
    losses = {"a": math.nan, "b": 2.0, "c": math.inf}
    monkeypatch.setattr(
        cli, "evaluate", lambda *_, **__: ((name, Evaluation(5, 5, loss)) for name, loss in losses.items())
    )
    data = [word for name in losses for word in ("--data", f"{name}={trained[1]}")]
    code, text, errors = command(trained[0], *data, "mesh.shape=fsdp:1")
    rows = [line.split() for line in text.splitlines()[1:]]
    assert code == DONE and [row[-1] for row in rows] == ["nan", f"{math.exp(2):.4g}", "inf"]
    warnings = [line for line in errors.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 2 and "the loss of a is nan" in warnings[0] and "the loss of c is inf" in warnings[1]
    found = json.loads(command(trained[0], *data, "mesh.shape=fsdp:1", "--json")[1])["sets"]
    assert found["a"]["perplexity"] is found["c"]["loss"] is None and found["b"]["loss"] == 2.0


def test_the_tokenizer_is_opened_once_and_only_for_text(trained, command, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(cli, "open_tokenizer", lambda source: opened.append(source) or Bytes())
    np.save(tmp_path / "tokens.npy", np.array([1, 2]))
    for num_texts in (0, 2):
        data = [f"--data={name}={trained[1]}" for name in "ab"[:num_texts]]
        code, _, errors = command(trained[0], f"--data={tmp_path}/tokens.npy", *data, "--batch-size", 0)
        assert code == BAD_INPUT and errors.count("\n") == 1  # the batch size: nothing is computed
        assert len(opened) == (num_texts > 0)


def test_all_mistakes_are_reported_together(trained, command, tmp_path, compilations):
    run = trained[0]
    np.save(tmp_path / "large.npy", np.array([1, 256]))
    (tmp_path / "empty.txt").write_text("")
    options = ("--sequence-length", 0, "--batch-size", -1, "--max-tokens", 0, "mesh.shape=pp:2", "data.seed=1")
    data = [f"a={tmp_path / 'nothing'}", f"b={tmp_path / 'empty.txt'}", tmp_path / "large.npy"]
    code, text, errors = command(run, *options, *(word for one in data for word in ("--data", one)))
    lines = errors.splitlines()
    assert code == BAD_INPUT and not text and not compilations
    for part in (
        *("--sequence-length must be", "--batch-size must be", "--max-tokens must be", "leave out pp"),
        *("data.seed has no effect here", f"--data a={tmp_path}/nothing: {tmp_path}/nothing does not exist"),
        f"--data b={tmp_path}/empty.txt: {tmp_path}/empty.txt is empty: 1 file without content",
        f"--data {tmp_path}/large.npy: it has the token 256; the ids of this model are 0 to 255",
    ):
        assert sum(part in line for line in lines) == 1, (part, lines)
    assert len(lines) == 8


def test_wrong_sources_and_lengths_are_one_line(trained, command, tmp_path):
    run, held_out = trained
    (tmp_path / "odd.bin").write_bytes(b"abc")
    odd = (tmp_path / "odd.bin").rename(tmp_path / "data.source: data.bin_dtype.bin")  # only settings are renamed
    for arguments, text in (
        ([], "--data is missing; pass --data SOURCE"),
        (["--data", "a=x", "--data", "a=y"], "two sets have the name a"),
        (["--data", ""], "--data '': this text is empty"),
        (["--data", odd], f"--data {odd}: {odd} has 3 bytes; uint16 tokens (--bin-dtype)"),
        (
            ["--data", held_out, "--sequence-length", 15, "mesh.shape=sp:2"],
            "--sequence-length 15 is not divisible by the 2",
        ),
        (["--data", held_out, "model.attention=splash", "mesh.shape=fsdp:1"], "multiple of 128, got 16"),
    ):
        code, _, errors = command(run, *arguments)
        assert code == BAD_INPUT and text in errors and "model: " not in errors  # the parameters are not loaded
    assert "such a sequence length" in errors
    (tmp_path / "a=b.txt").write_text("some text")  # an existing path is not NAME=SOURCE
    code, _, errors = command(run, "--data", tmp_path / "a=b.txt", "--batch-size", 0)
    assert code == BAD_INPUT and errors.startswith("flax-mesh: --batch-size must be") and errors.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp:4,tp:2", "pp:2,fsdp:2,tp:2"])
def test_a_run_is_evaluated_on_another_mesh(tmp_path, command, mesh):
    run, held = tmp_path / "run", tmp_path / "held.txt"
    settings = "run.steps=2 run.eval_every=2 data.eval_batches=3 optimizer.learning_rate=0.1 optimizer.warmup_steps=0"
    own = [f"data.source={write_text(tmp_path)}", f"run.folder={run}", f"mesh.shape={mesh}", "optimizer.ema=0.5"]
    config = apply_overrides(recipe(), [*settings.split(), *own, "pipeline.num_microbatches=2"])
    result = train(config, say=lambda text: None)
    held.write_bytes(load_corpus(config.data).held_out[: 16 * 8 * 3 + 1].tobytes())
    for other in ("fsdp:1", "dp:2,tp:2", "fsdp:2,sp:2"):
        code, text, errors = command(run, "--data", f"held={held}", f"mesh.shape={other}", "--json")
        found = json.loads(text)
        assert code == DONE and found["mesh"] == {"fsdp:1": "one device"}.get(other, other)
        assert found["sequence_length"] == 16
        one = found["sets"]["held"]
        assert one["loss"] == pytest.approx(result.last_row["eval_loss"], rel=1e-5)
        assert one["bits_per_byte"] == pytest.approx(result.last_row["bits_per_byte"], rel=1e-5)
        assert one["perplexity"] == pytest.approx(math.exp(one["loss"])) and one["tokens"] == one["bytes"] == 384
        assert "moving average of the parameters" in errors and "windows: 16 tokens" in errors
    _, text, _ = command(run, "--data", f"held={held}", "mesh.shape=fsdp:1", "--json", "--no-average")
    assert abs(json.loads(text)["sets"]["held"]["loss"] - result.last_row["eval_loss"]) > 1e-3
