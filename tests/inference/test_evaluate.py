"""Perplexity: the loss of plain forward passes over the same windows, on every mesh; bytes of texts."""

import math
import random

import jax
import numpy as np
import pytest

from flax_mesh.data.corpus import load_documents
from flax_mesh.errors import ConfigError
from flax_mesh.inference import evaluate as module
from flax_mesh.inference.evaluate import (
    Evaluation,
    TextSet,
    evaluate,
    set_problems,
    text_set,
    window_batch,
    window_length,
)
from flax_mesh.inference.open import open_trained
from flax_mesh.inference.tokenizer import Bytes, JsonTokenizer
from flax_mesh.inference.trained import TrainedModel
from flax_mesh.models import DecoderConfig
from tests.inference.small_run import plain_log_probs, save_run, write_byte_tokenizer, write_tokenizer

pytestmark = pytest.mark.usefixtures("quick_compilation")
LENGTH = 16
TOKENS = np.random.default_rng(1).integers(0, 256, 103)


def plain_loss(trained: TrainedModel, tokens: np.ndarray) -> float:
    """Mean loss of windows one by one, in float64. Attention is causal: tokens that follow a token do not affect it."""
    total = 0.0
    for start in range(0, len(tokens) - 1, LENGTH):
        window = tokens[start : start + LENGTH + 1]
        log_probs = plain_log_probs(trained.model, window, LENGTH)
        total -= log_probs[np.arange(len(window) - 1), window[1:]].sum()
    return total / (len(tokens) - 1)


def loss_of(trained: TrainedModel, *sets, batch_size: int = 3, sequence_length: int = LENGTH) -> list[float]:
    named = {str(n): TextSet(tokens, None) for n, tokens in enumerate(sets)}
    found = evaluate(trained.model, trained.mesh, named, sequence_length=sequence_length, batch_size=batch_size)
    return [one.loss for (_, one), tokens in zip(found, sets, strict=True) if one.num_tokens == len(tokens) - 1]


@pytest.mark.slow
def test_the_loss_equals_plain_forward_passes_on_every_mesh(run):
    one = open_trained(run, ["mesh.shape=fsdp:1"])
    sets = TOKENS, TOKENS[:2], TOKENS[: 2 * LENGTH + 1]
    expected = [plain_loss(one, tokens) for tokens in sets]
    assert expected[0] > 5 and len({*map(str, expected)}) == 3
    for settings in (["fsdp:1"], ["dp:2,tp:2"], ["sp:2,fsdp:2"], ["fsdp:4,tp:2", "model.loss_chunk=8"]):
        trained = open_trained(run, [f"mesh.shape={settings[0]}", *settings[1:]])
        np.testing.assert_allclose(loss_of(trained, *sets), expected, rtol=1e-5)
    longer = loss_of(one, TOKENS[:9], sequence_length=2**31 - 1)  # than the text
    np.testing.assert_allclose(longer, [plain_loss(one, TOKENS[:9])], rtol=1e-5)


@pytest.mark.slow
def test_losses_of_routers_do_not_count(tmp_path):
    save_run(tmp_path, "model.num_experts=4", "mesh.shape=fsdp:2", "run.platform=auto")
    trained = open_trained(tmp_path, ["mesh.shape=fsdp:2", "model.load_balance_loss=100.0"])
    one = open_trained(tmp_path, ["mesh.shape=fsdp:1"])
    np.testing.assert_allclose(loss_of(trained, TOKENS), [plain_loss(one, TOKENS)], rtol=1e-5)


def test_every_token_but_the_first_is_a_target_once():
    batch = window_batch(TOKENS, 0, 8, LENGTH)
    targets = batch["targets"]
    assert targets[targets >= 0].tolist() == TOKENS[1:].tolist()
    for row in range(8):
        size = (targets[row] >= 0).sum()
        assert batch["inputs"][row, :size].tolist() == TOKENS[row * LENGTH : row * LENGTH + size].tolist()
    assert (targets[7] == -1).all()


def test_a_shorter_window_fits_the_mesh_and_the_kernel():
    for attention, axis, size, most, expected in (
        ("xla", "fsdp", 1, 100, 100),
        ("xla", "sp", 8, 100, 104),
        ("splash", "fsdp", 1, 100, 128),
        ("splash", "sp", 2, 100, 256),
        ("splash", "fsdp", 1, 1000, 384),
    ):
        mesh = jax.make_mesh((size,), (axis,), devices=jax.devices()[:size])
        assert window_length(DecoderConfig(attention=attention), mesh, 384, most) == expected


def test_bits_and_perplexity_follow_from_the_loss():
    one = Evaluation(10, 10, 2.0)
    assert one.bits_per_byte == 2 / math.log(2) and one.perplexity == math.exp(2)
    assert Evaluation(10, 40, 2.0).bits_per_byte == 0.5 / math.log(2)
    assert Evaluation(10, None, 2.0).bits_per_byte is None
    assert Evaluation(10, 10, 1e6).perplexity == Evaluation(10, 10, math.inf).perplexity == math.inf
    nothing = Evaluation(1, 1, math.nan)
    assert math.isnan(nothing.loss) and math.isnan(nothing.perplexity) and math.isnan(nothing.bits_per_byte or 0)


def test_bytes_of_texts_count_the_predicted_tokens(tmp_path):
    for name, text in {"a.txt": "hello wörld", "b.txt": "low held"}.items():
        (tmp_path / name).write_text(text)
    documents = load_documents(str(tmp_path), "uint16")
    found = text_set(documents, Bytes(), None)
    assert bytes(found.tokens[:]) == "hello wörld\0low held".encode() and found.num_bytes == len(found.tokens) - 1
    assert text_set(documents, Bytes(), 4).num_bytes == 3
    assert bytes(text_set(documents, Bytes(), 15).tokens[:]) == "hello wörld\0lo".encode()
    tokenizer = JsonTokenizer(write_tokenizer(tmp_path / "hidden.d"))
    found = text_set(load_documents(str(tmp_path / "[ab].txt"), "uint16"), tokenizer, None)
    assert found.num_bytes == len("hello wörldlow held".encode())  # both begin with "<s>"
    first = text_set(load_documents(str(tmp_path / "a.txt"), "uint16"), tokenizer, None)
    assert first.num_bytes == len("hello wörld".encode()) and first.tokens[:1] == [1]
    part = text_set(load_documents(str(tmp_path / "[ab].txt"), "uint16"), tokenizer, len(first.tokens))
    assert part.num_bytes == first.num_bytes and part.tokens[:].tolist() == first.tokens[:].tolist()


@pytest.mark.parametrize("write", [write_tokenizer, write_byte_tokenizer])
@pytest.mark.parametrize("first_bytes", [1, 8])  # per token: few, so that the beginning grows, and as it is
@pytest.mark.parametrize("separator", [" ", "\n", "中"])
def test_the_first_tokens_of_a_long_text_are_encoded_without_its_rest(
    tmp_path, monkeypatch, write, first_bytes, separator
):
    monkeypatch.setattr(module, "BYTES_PER_TOKEN", first_bytes)
    words = random.Random(0).choices(["hello", "world", "wörld", "held", "low", "中中"], k=8000)
    (tmp_path / "a.txt").write_text(separator.join(words), encoding="utf-8")
    (tmp_path / "b.txt").write_bytes(b"low\xff" * 2000)  # no UTF-8, but not needed
    tokenizer, sizes = JsonTokenizer(write(tmp_path / "tokenizer.d")), []
    whole = tokenizer.encode(separator.join(words))
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text: sizes.append(len(text)) or encode(text))
    for most in (2, 300):
        found = text_set(load_documents(str(tmp_path / "*.txt"), "uint16"), tokenizer, most)
        assert found.tokens[:].tolist() == whole.tokens[:most].tolist()
        assert found.num_bytes == whole.ends[most - 1] - whole.ends[0]
    assert max(sizes) < 6000 < len(separator.join(words)) / 5
    assert len(sizes) > 2 or first_bytes == 8 or write is write_byte_tokenizer  # which has a token for every byte


def test_token_files_have_no_bytes_and_texts_need_a_tokenizer(tmp_path):
    np.save(tmp_path / "a.npy", TOKENS)
    found = text_set(load_documents(str(tmp_path / "a.npy"), "uint16"), None, 5)
    assert found.num_bytes is None and found.tokens[:].tolist() == TOKENS[:5].tolist()
    (tmp_path / "a.txt").write_bytes(b"abc\xff")
    documents = load_documents(str(tmp_path / "a.txt"), "uint16")
    with pytest.raises(ConfigError, match=r"^text, but the model has no tokenizer.*\.npy or \.bin$"):
        text_set(documents, None, None)
    with pytest.raises(ConfigError, match=r"a.txt is not UTF-8 text"):
        text_set(documents, JsonTokenizer(write_tokenizer(tmp_path / "tokenizer")), None)


def test_sets_that_cannot_be_evaluated_are_one_line():
    assert set_problems(TOKENS, 256) == []
    (problem,) = set_problems(TOKENS[:1], 256)
    assert problem == "it has 1 token, of which the first is not predicted; at least 2 are required"
    assert set_problems(np.array([1, 256]), 256) == ["it has the token 256; the ids of this model are 0 to 255"]
    assert set_problems(np.array([1, -3]), 256) == ["it has the token -3; the ids of this model are 0 to 255"]


def test_one_program_is_compiled_and_its_loss_equals_plain_forward_passes(run, compilations):
    trained = open_trained(run, ["mesh.shape=fsdp:1"])
    loss_of(trained, TOKENS)
    compilations.clear()
    found = loss_of(trained, TOKENS, TOKENS[:50])
    assert len(compilations) <= 1
    compilations.clear()
    assert loss_of(trained, TOKENS, TOKENS[:50]) == found and not compilations, "a second call compiles nothing"
    np.testing.assert_allclose(found, [plain_loss(trained, TOKENS), plain_loss(trained, TOKENS[:50])], rtol=1e-5)
