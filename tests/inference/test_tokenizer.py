"""Tokenizers: bytes and tokenizer.json, texts that arrive token by token, and files that cannot be read."""

import base64
import gc
import importlib.util
import json
import random
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from flax_mesh.data.tokenizers import process as tokenizer_process
from flax_mesh.errors import ConfigError
from flax_mesh.inference.prompts import Prompt, encode_prompts, stop_ids
from flax_mesh.inference.source import Source
from flax_mesh.inference.tokenizer import Bytes, JsonTokenizer, TextStream, open_tokenizer, stop_tokens, text_after
from flax_mesh.models import DecoderConfig
from tests.inference.small_run import write_byte_tokenizer, write_tokenizer

IDS = st.lists(st.integers(0, 300), max_size=40)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> JsonTokenizer:
    return JsonTokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def source(folder: Path, **options) -> Source:
    return Source(folder, DecoderConfig(**options), folder)


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory) -> JsonTokenizer:
    return JsonTokenizer(write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def ids_of(tokenizer, *words: str) -> list[int]:
    """Ids of words of the vocabulary; one that it does not have is the ids of its bytes."""
    vocabulary = json.loads(Path(tokenizer.name).read_text())["model"]["vocab"]
    bytes_of = lambda word: [vocabulary[f"<0x{byte:02X}>"] for byte in word.encode()]  # noqa: E731
    return [token for word in words for token in ([vocabulary[word]] if word in vocabulary else bytes_of(word))]


def streamed(tokenizer, ids, prompt=()) -> str:
    stream = TextStream(tokenizer, prompt)
    return "".join([*map(stream.add, ids), stream.end()])


@given(st.text(max_size=30), IDS)
def test_bytes_are_the_utf8_of_a_text_also_token_by_token(text, ids):
    encoded = Bytes().encode(text)
    assert bytes(encoded.tokens.tolist()) == text.encode()
    assert Bytes().decode(encoded.tokens.tolist()) == text
    assert encoded.ends.tolist() == list(range(1, len(text.encode()) + 1))
    assert streamed(Bytes(), ids) == Bytes().decode(ids)


def test_a_character_is_streamed_when_its_bytes_are_complete(tokenizer):
    stream, ids = TextStream(Bytes()), [*"é中".encode()]
    assert [stream.add(token) for token in ids] == ["", "é", "", "", "中"]
    assert stream.add(0xE4) == "" and stream.end() == "\ufffd"
    draw = random.Random(0)
    for _ in range(100):
        ids = [draw.randrange(60) for _ in range(draw.randrange(30))]  # with special tokens, and ids it does not have
        assert streamed(tokenizer, ids) == tokenizer.decode(ids)


def test_a_wrong_byte_does_not_end_the_stream(byte_tokenizer):
    ids = ids_of(byte_tokenizer, "a", "中", "<0xE5>", "b", "▁world", "▁hello")
    assert byte_tokenizer.decode(ids) == "a\ufffd\ufffd\ufffd\ufffdb world hello"  # the whole run of bytes
    stream = TextStream(byte_tokenizer)
    assert [stream.add(token) for token in ids] == ["a", "", "", "中", "", "\ufffdb", " world", " hello"]
    assert stream.end() == ""
    text = "hello 中文 b\u1019\u103c a"  # no wrong bytes: the text of all of them
    assert streamed(byte_tokenizer, byte_tokenizer.encode(text).tokens.tolist()) == text


def test_the_stream_decodes_a_few_tokens_at_a_time(byte_tokenizer, monkeypatch):
    sizes, decode = [], byte_tokenizer.decode
    monkeypatch.setattr(byte_tokenizer, "decode", lambda ids: sizes.append(len(ids)) or decode(ids))
    ids = ids_of(byte_tokenizer, *["a", "▁world", "中"] * 50, *["<0xE5>"] * 200, *["</s>"] * 200, "▁world", "b")
    text = streamed(byte_tokenizer, ids, [4] * 1000)
    assert text.startswith("a world中a world中") and text.endswith("\ufffd worldb") and max(sizes) < 150
    assert text.count("中") == 50 and text.count("\ufffd") == 200


@pytest.mark.parametrize("words", [["▁hello"], ["▁hello", "中"], ["▁hello", *["</s>"] * 9], ["<s>"], [], ["ဗမာ" * 9]])
def test_a_generated_text_continues_its_prompt(byte_tokenizer, words):
    prompt = ids_of(byte_tokenizer, *words)
    for more in (["▁world", "a"], ["中", "▁world"], ["▁", "▁world", "</s>", "▁hello"], []):
        ids = ids_of(byte_tokenizer, *more)
        whole = byte_tokenizer.decode(prompt + ids)
        assert byte_tokenizer.decode(prompt) + text_after(byte_tokenizer, prompt, ids) == whole
        assert byte_tokenizer.decode(prompt) + streamed(byte_tokenizer, ids, prompt) == whole


@pytest.mark.parametrize("text", ["hello world", "", "wörld 中 héllo", "  low  held", "x?\n"])
def test_tokens_of_a_tokenizer_cover_the_bytes_of_the_text(tokenizer, text):
    encoded = tokenizer.encode(text)
    assert encoded.tokens[0] == 1 and encoded.ends[0] == 0  # "<s>", which has no text
    assert encoded.ends[-1] == len(text.encode()) or not text.strip("x?\n ") or text.endswith(" ")
    assert (encoded.ends[1:] >= encoded.ends[:-1]).all()
    assert tokenizer.encode(text, special=False).tokens.tolist() == encoded.tokens.tolist()[1:]
    if text == "hello world":
        assert tokenizer.decode(encoded.tokens.tolist()) == text


def test_the_truncation_and_padding_of_the_file_are_not_applied(tokenizer, tmp_path):
    path = write_tokenizer(tmp_path)
    stored = Tokenizer.from_file(str(path))
    stored.enable_truncation(max_length=2)
    stored.enable_padding(length=20, pad_id=2, pad_token="</s>")
    stored.save(str(path))
    expected = tokenizer.encode("hello world").tokens.tolist()
    assert 2 < len(expected) < 20 and JsonTokenizer(path).encode("hello world").tokens.tolist() == expected


def test_text_runs_use_bytes_and_other_sources_the_tokenizer_and_stop_tokens_of_their_folder(tmp_path):
    write_tokenizer(tmp_path, eos_token_id=2)
    text = Source(tmp_path, DecoderConfig(), tmp_path, is_text=True)
    found = open_tokenizer(text)
    assert found is not None and found.is_bytes and stop_tokens(text) == ()
    found = open_tokenizer(source(tmp_path))
    assert found is not None and found.name == str(tmp_path / "tokenizer.json")
    assert open_tokenizer(source(tmp_path / "nothing")) is None and stop_tokens(source(tmp_path / "nothing")) == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    for value, expected in (("null", (7,)), ("[1, 2]", (1, 2)), ("2", (2,))):
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {value}}}')
        assert stop_tokens(source(tmp_path)) == expected
    (tmp_path / "generation_config.json").unlink()
    assert stop_tokens(source(tmp_path)) == (7,)


WRONG_STOPS = ["[1]", '{"eos_token_id": "a"}', '{"eos_token_id": [1, 256]}', '{"eos_token_id": true}']
DAMAGED = [b"", b"{", b"[]", b"{}", b"\xff", b'{"model": 3}', b"[" * 5000, b'{"model": null}']


def test_wrong_stop_tokens_damaged_files_and_a_missing_package_are_one_line(tmp_path, monkeypatch):
    line = r"^\S+generation_config.json.* (must be a JSON object|ids from 0 to 255)"
    for text in WRONG_STOPS:
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(ConfigError, match=line):
            stop_tokens(source(tmp_path))
    for data in DAMAGED:
        (tmp_path / "tokenizer.json").write_bytes(data)
        with pytest.raises(ConfigError, match=r"tokenizer.json") as caught:
            open_tokenizer(source(tmp_path))
        assert len(caught.value.problems) == 1 and "\n" not in str(caught.value)
    assert json.loads(write_tokenizer(tmp_path).read_text())["model"]["type"] == "BPE"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'requires the package tokenizers.*: pip install "flax-mesh\[generate\]"$'):
        open_tokenizer(source(tmp_path))


def test_mutated_tokenizers_are_read_or_refused(tmp_path):
    path, draw = write_tokenizer(tmp_path), random.Random(0)
    text, refused = path.read_text(), 0
    for _ in range(120):
        at, size = draw.randrange(len(text)), draw.randrange(1, 20)
        path.write_text(text[:at] + draw.choice(["", "0", "null", "{}", '"x"', "-1"]) + text[at + size :])
        try:
            found = open_tokenizer(source(tmp_path))
            assert found is not None and isinstance(found.decode([1, 5, 40]), str)
        except ConfigError as error:
            refused += len(error.problems) == 1
    assert 5 < refused < 120


def write(folder: Path, **parts) -> Path:
    """A tokenizer.json with one token "a", which stands for every word, and other parts."""
    none = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    made = {"version": "1.0", "added_tokens": [], "model": model, **none}
    (folder / "tokenizer.json").write_text(json.dumps(made | parts))
    return folder / "tokenizer.json"


CHARSMAP = base64.b64encode(b"\x04\0\0\0\xff\xff\xff\xff").decode()
DOUBLED = [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 60
PREFIX = {"continuing_subword_prefix": "##", "max_input_chars_per_word": 9}
STRANGE = {
    "no unknown token": ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}}, "Missing .UNK. token"),
    "no unknown piece": ({"model": {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "?", **PREFIX}}, "Missing"),
    "no unk_id": ({"model": {"type": "Unigram", "vocab": [["b", 0.0]], "unk_id": None}}, "`unk_id` is missing"),
    "a panic": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}}, "index out of bounds"),
    "no end": ({"normalizer": {"type": "Sequence", "normalizers": DOUBLED}}, "did not end in 1 s|ended its process"),
}


@pytest.mark.parametrize("case", STRANGE)
def test_a_tokenizer_that_fails_at_a_text_is_one_line(tmp_path, monkeypatch, capfd, case):
    parts, reason = STRANGE[case]
    if case == "no end":  # only this one reaches the limit, within which a loaded machine must start the process
        monkeypatch.setattr(tokenizer_process, "SECONDS", 1)
    tokenizer = JsonTokenizer(write(tmp_path, **parts))
    with pytest.raises(ConfigError, match=f"must encode every text, .*({reason}).*; replace it") as one:
        tokenizer.encode("a b")
    assert "\n" not in str(one.value) and len(str(one.value)) < 600
    assert capfd.readouterr() == ("", "") and tokenizer.decode([]) == ""  # a process that has ended is started again


def test_ids_that_fail_and_a_process_that_is_killed_are_one_line(tmp_path):
    strip = {"type": "Strip", "content": "a", "start": 5, "stop": 9}
    with pytest.raises(ConfigError, match=r"tokenizer.json must decode all ids, .*index out of bounds"):
        JsonTokenizer(write(tmp_path, decoder=strip)).decode([0])
    tokenizer = JsonTokenizer(write(tmp_path))
    child = tokenizer._child
    assert child is not None and tokenizer.decode([0]) == "a"
    child.send_signal(signal.SIGABRT)
    child.wait()
    with pytest.raises(ConfigError, match="the package tokenizers ended its process by SIGABRT"):
        tokenizer.decode([0])
    assert tokenizer.decode([0]) == "a"


def test_a_limit_on_the_memory_of_the_shell_is_kept_and_named(tmp_path, monkeypatch):
    path, python = write(tmp_path), tmp_path / "python"
    python.write_text(f'#!/bin/sh\nulimit -v $((4000 * 1024))\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(tokenizer_process.sys, "executable", str(python))
    assert JsonTokenizer(path).decode([0]) == "a"
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r" reads: .*, with at most 3.91 GiB of memory \(ulimit -v\); replace it by"):
        JsonTokenizer(path)


def test_the_process_ends_with_the_tokenizer(tmp_path):
    tokenizer = JsonTokenizer(write(tmp_path))
    child = tokenizer._child
    assert child is not None
    first_to_end = Path(f"/proc/{child.pid}/oom_score_adj")
    assert not first_to_end.exists() or first_to_end.read_text() == "1000\n"  # exists on Linux only
    del tokenizer
    gc.collect()
    assert child.returncode == 0


@pytest.mark.parametrize("number", [2**31, 2**32 - 1])
def test_ids_above_int32_are_no_ids_of_the_model(tmp_path, number):
    model = {"type": "WordLevel", "vocab": {"a": number}, "unk_token": "a"}
    tokenizer = JsonTokenizer(write(tmp_path, model=model))
    assert tokenizer.encode("a").tokens.tolist() == [number]
    for call in (lambda: encode_prompts([Prompt("p", "a")], tokenizer, 256), lambda: stop_ids(["a"], tokenizer, 256)):
        with pytest.raises(ConfigError, match=r"\b0 to 255"):
            call()
