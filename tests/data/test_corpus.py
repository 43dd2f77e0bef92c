"""Corpora: which files are read, how they are divided, and the errors."""

import dataclasses
import io
import os
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from flax_mesh.data import corpus as data
from flax_mesh.data import files as files_module
from flax_mesh.data.batches import batch_rows, held_out_rows
from flax_mesh.data.config import DataConfig
from flax_mesh.data.corpus import Corpus, TokenFiles, decode, load_corpus
from flax_mesh.errors import ConfigError
from tests.hash_seed import printed_with_another_hash_seed

TINY = DataConfig(sequence_length=4, batch_size=2, held_out=0.25)


def load(source: Path | str, **changes) -> Corpus:
    return load_corpus(dataclasses.replace(TINY, source=str(source), **changes))


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def documents(tokens: data.Tokens) -> Counter[bytes]:
    return Counter(tokens[:].tobytes().split(b"\0"))


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


# Forty documents, each of which contains its number, so that the files of a part of the corpus can be identified.
DOCUMENTS = {f"part{i % 4}/file{i}.txt": f"document {i:02}".encode() for i in range(40)}


@pytest.fixture
def folder(tmp_path) -> Path:
    return write(tmp_path, DOCUMENTS)


@pytest.fixture
def mapped(tmp_path) -> Path:
    for i in range(8):
        np.save(tmp_path / f"shard{i}.npy", np.arange(50, dtype=np.uint16) + 100 * i)
    return tmp_path


# --- sources ---


def test_stdlib_is_split_by_file_and_leaves_out_tests_and_installed_packages():
    corpus = load_corpus(DataConfig())
    files = files_module.stdlib_files()
    assert {"pydoc_data/topics.py", "json/decoder.py", "argparse.py"} <= set(files)
    assert list(files) == sorted(files)
    for excluded in ("site-packages", "test", "tests", "idle_test", "__pycache__"):
        assert not [name for name in files if excluded in name.split("/")[:-1]]
    contents = Counter(path.read_bytes() for path in files.values() if path.stat().st_size)
    train, held_out = documents(corpus.train), documents(corpus.held_out)
    assert train + held_out == contents  # every file is in exactly one part
    assert 0.02 < held_out.total() / contents.total() < 0.10
    assert (corpus.vocab_size, corpus.bytes_per_token, corpus.train.dtype) == (256, 1.0, np.uint8)
    assert re.fullmatch(
        r"standard library of Python 3\.\d+\.\d+\S*: [\d,]+ files, [\d,]+ bytes; "
        r"trains on [\d,]+ files \([\d,]+\), holds out \d+ files \([\d,]+\), by a hash of their paths",
        corpus.description,
    )


def test_a_text_file_of_any_suffix_holds_out_its_end(tmp_path):
    path = write(tmp_path, {"poem.poem": b"0123456789" * 10}) / "poem.poem"
    corpus = load(path)
    assert corpus.train[:].tobytes() == (b"0123456789" * 10)[:75]
    assert corpus.held_out[:].tobytes() == (b"0123456789" * 10)[75:]
    assert corpus.description == f"{path}: 1 file, 100 bytes; trains on the first 75, holds out the last 25"


def test_a_folder_includes_text_suffixes_and_utf8_files_without_suffix(tmp_path):
    taken = {f"a/b/{suffix}{suffix}": f"taken {suffix}".encode() for suffix in (*files_module.TEXT_SUFFIXES, ".TXT")}
    taken |= {"LICENSE": "free as in frei für alle".encode(), "latin.txt": b"caf\xe9 noir"}
    taken["cut"] = b"x" + "é".encode() * files_module.TEXT_PROBE_BYTES  # in the middle of a character
    taken = {name.replace("/.", "/x."): content for name, content in taken.items()}
    left = {"image.png": b"\x89PNG", "program": b"\x7fELF\xff\xfe", "empty.txt": b"", ".git/HEAD": b"x", ".env": b"K"}
    corpus = load(write(tmp_path, taken | left))
    assert documents(corpus.train) + documents(corpus.held_out) == Counter(taken.values())


def test_the_files_of_a_folder_are_divided_and_joined_in_path_order_by_zero_bytes(folder):
    corpus = load(folder)
    train, held_out = documents(corpus.train), documents(corpus.held_out)
    assert not train & held_out and train + held_out == Counter(DOCUMENTS.values())
    assert 4 <= len(held_out) <= 16 and len(train) > 20
    in_order = [DOCUMENTS[name] for name in sorted(DOCUMENTS)]
    assert corpus.train[:].tobytes() == b"\0".join(text for text in in_order if text in train)
    part = load(f"{folder}/part[01]/*.txt")
    found = documents(part.train) + documents(part.held_out)
    assert found == Counter(DOCUMENTS[name] for name in DOCUMENTS if name.startswith(("part0", "part1")))
    assert re.fullmatch(r"[0-9a-f]{64}", corpus.content_hash)
    assert load(f"{folder}/**/*.txt").content_hash == load(folder).content_hash == corpus.content_hash
    path = folder / "part3/file7.txt"
    path.write_bytes(path.read_bytes().replace(b"7", b"8"))
    assert load(folder).content_hash != corpus.content_hash
    (folder / "aaa.txt").symlink_to(folder / "part0/file0.txt")  # a link is not a second file
    linked = load(folder)
    assert len(linked.train) + len(linked.held_out) == len(corpus.train) + len(corpus.held_out)


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "i8", "<u2 bin", "<u4 bin"])
def test_token_files_are_memory_mapped_and_hold_out_their_end(tmp_path, dtype):
    dtype, _, is_bin = dtype.partition(" ")
    tokens = np.arange(100).astype(dtype) + 70_000 * (dtype == "<u4")
    path = tmp_path / ("tokens.bin" if is_bin else "tokens.npy")
    path.write_bytes(tokens.tobytes() if is_bin else npy(tokens))
    kind = "uint32" if dtype == "<u4" else "uint16"
    corpus = load(path, bin_dtype=kind)
    assert isinstance(corpus.train, np.memmap) and isinstance(corpus.held_out, np.memmap)
    assert corpus.train.dtype == tokens.dtype and (not is_bin or corpus.bin_dtype == kind)
    np.testing.assert_array_equal(corpus.train, tokens[:75])
    np.testing.assert_array_equal(corpus.held_out, tokens[75:])
    assert (corpus.vocab_size, corpus.bytes_per_token) == (None, None)
    assert corpus.description == f"{path}: 1 file, 100 tokens; trains on the first 75, holds out the last 25"


def test_several_token_files_are_split_by_file_and_stay_mapped(mapped):
    corpus = load(mapped / "*.npy")
    pieces = [piece for part in (corpus.train, corpus.held_out) for piece in getattr(part, "pieces", ())]
    assert all(isinstance(piece, np.memmap) for piece in pieces)
    assert sorted(int(piece[0]) for piece in pieces) == [100 * i for i in range(8)]


def test_a_slice_of_token_files_equals_the_slice_of_their_concatenation():
    pieces = tuple(np.arange(n, dtype=np.uint16) + 10 * i for i, n in enumerate((3, 1, 7, 5)))
    array, files = np.concatenate(pieces), TokenFiles(pieces)
    assert len(files) == 16
    for start in range(17):
        for stop in range(start, 18):
            np.testing.assert_array_equal(files[start:stop], array[start:stop])


@pytest.mark.slow
def test_large_files_are_mapped_not_read_and_hashed_by_their_ends_and_size(tmp_path):
    for name in ("text.txt", "tokens.bin"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(2**38)  # sparse: 256 GiB cannot be read into memory
        corpus = load(tmp_path / name)
        assert isinstance(corpus.train, np.memmap) and isinstance(corpus.held_out, np.memmap)
        assert (len(corpus.train) + len(corpus.held_out)) * corpus.train.dtype.itemsize == 2**38
    hashes = []
    for size, at in ((2**31, None), (2**31, 0), (2**31, 2**31 - 2), (2**31 + 2, None)):
        with (tmp_path / "tokens.bin").open("wb") as file:
            file.truncate(size)
            if at is not None:
                file.seek(at)
                file.write(b"\1")
        hashes.append(load(tmp_path / "tokens.bin").content_hash)
    assert len(set(hashes)) == 4


# --- division and hash ---


def test_parts_and_hash_do_not_depend_on_the_location_or_the_process(folder, tmp_path_factory):
    corpus = load(folder)
    elsewhere = folder.rename(tmp_path_factory.mktemp("elsewhere") / "moved")
    imports = "from flax_mesh.data.corpus import DataConfig, load_corpus"
    config = f"DataConfig({str(elsewhere)!r}, sequence_length=4, held_out=0.25)"
    printed = printed_with_another_hash_seed(f"{imports}; print(load_corpus({config}).content_hash)")
    assert printed == corpus.content_hash


def test_a_file_stays_in_its_part_when_others_are_added_or_removed():
    names = [f"file{i}" for i in range(200)]
    before = data._held_out_names(names, 0.1)
    after = data._held_out_names([*names[:150], *(f"new{i}" for i in range(100))], 0.1)
    assert before & set(names[:150]) == after & set(names[:150]) != set()
    for share in (1e-9, 0.999999):
        assert 1 <= len(data._held_out_names(["a", "b", "c"], share)) <= 2, "both parts have a file"


# --- files that change under a run ---


def overwrite(path: Path, at: int, content: bytes) -> None:
    """Write into a file, and wait for a clock tick, so that its time differs."""
    before = path.stat().st_mtime_ns
    while path.stat().st_mtime_ns == before:
        with path.open("r+b") as file:
            file.seek(at)
            file.write(content)


@pytest.mark.parametrize("shards", [(0,), (0, 1, 2, 3)])
def test_mapped_files_that_were_rewritten_are_named(mapped, shards):
    corpus = load(mapped / "*.npy")
    corpus.check_unchanged()
    for i in shards:
        overwrite(mapped / f"shard{i}.npy", -2 + (mapped / f"shard{i}.npy").stat().st_size, b"\7\7")
    for _ in range(2):
        with pytest.raises(ConfigError, match="its tokens must not change under a run") as error:
            corpus.check_unchanged()
        assert [line.split()[1:4] for line in error.value.problems] == [
            [str(mapped / f"shard{i}.npy"), "was", "rewritten"] for i in shards
        ]


def test_files_are_hashed_again_only_if_their_stamp_changes(mapped, monkeypatch):
    corpus, hash_tokens, hashed = load(mapped / "*.npy"), data._hash_tokens, []
    monkeypatch.setattr(data, "_hash_tokens", lambda parts: hashed.append(1) or hash_tokens(parts))
    before = corpus.train[:].tolist(), corpus.held_out[:].tolist()
    changes = [
        lambda: overwrite(mapped / "shard0.npy", 0, (mapped / "shard0.npy").read_bytes()),  # the same bytes
        lambda: overwrite(mapped / "shard1.npy", (mapped / "shard1.npy").stat().st_size, b"more"),
        lambda: (np.save(mapped / "new.npy", np.arange(9)), os.replace(mapped / "new.npy", mapped / "shard2.npy")),
        lambda: (mapped / "shard3.npy").unlink(),
    ]
    for number, change in enumerate(changes, 1):
        corpus.check_unchanged()
        assert len(hashed) == number - 1
        change()
        corpus.check_unchanged()
        assert len(hashed) == number
    assert (corpus.train[:].tolist(), corpus.held_out[:].tolist()) == before


def test_text_that_is_in_memory_may_change(folder):
    corpus = load(folder)
    assert not corpus.stamps
    overwrite(folder / "part0" / "file0.txt", 0, b"other")
    corpus.check_unchanged()


@pytest.mark.parametrize("source", ["*.npy", "shard1.npy"])
def test_reading_a_file_that_has_shrunk_is_an_error(mapped, source):
    corpus = load(mapped / source)
    os.truncate(mapped / "shard1.npy", 100)
    message = "shard1.npy was shortened from 228 to 100 bytes while the run read it"
    pieces = [x for part in (corpus.train, corpus.held_out) for x in getattr(part, "pieces", [part])]
    part = TokenFiles(tuple(pieces)) if source == "*.npy" else corpus.train
    for call in (lambda: batch_rows(part, 0, TINY, 0), lambda: held_out_rows(part, TINY, 0), corpus.check_unchanged):
        with pytest.raises(ConfigError, match=message):
            call()


# --- bytes and text ---


def test_decode_inverts_utf8_and_replaces_what_is_no_text():
    text = "naïve café — 文字 🙂 a\0b"
    tokens = np.frombuffer(text.encode(), np.uint8)
    assert decode(tokens) == decode(tokens.astype(np.int32)) == text and decode(tokens[:0]) == ""
    assert decode(np.array([97, 0xE6, 98, 300, -1, 99])) == "a\ufffdb\ufffd\ufffdc"


# --- errors ---


def test_wrong_settings_are_refused_before_the_files_are_read():
    with pytest.raises(ConfigError, match=r"^data.batch_size must be an integer, got True$"):
        load_corpus(DataConfig("/nowhere", batch_size=True))


NEAREST = "the nearest folder that does is {folder}"
GZ = b"\x1f\x8b\xff"
HEADERS = ["\0", "(" * 300, "{'descr': '<u4', 'fortran_order': False, 'shape': (True,)}", f"({'9' * 5000},)"]
HEADERS += [f"{{'descr': '<u4', 'fortran_order': False, 'shape': ({size},)}}" for size in (10**20, -5, 1.5)]
HEADERS += ["{'descr': '<u4', b'x': False, 'shape': (1,)}"]


def headed(header: str) -> bytes:
    """A .npy file with this text as its header."""
    return b"\x93NUMPY\x01\x00" + (len(header) + 1).to_bytes(2, "little") + header.encode() + b"\n" + bytes(400)


HUNDRED = npy(np.arange(100))
# Files, the source among them, and the error; {folder} is the folder of the files.
REFUSED: list[tuple[dict[str, bytes], str, str]] = [
    (DOCUMENTS, "part0/fil0.txt", "fil0.txt does not exist; the nearest .* {folder}/part0; did you mean .*file0.txt"),
    (DOCUMENTS, "pat0/deep/x.txt", f"x.txt does not exist; {NEAREST}; did you mean part0"),
    (DOCUMENTS, "zzz", rf"zzz does not exist; {NEAREST}\.$"),
    (DOCUMENTS, "part0/*.md", r"no file in {folder}/part0 matches .*part0/\*.md"),
    (
        {"a/tokens.bin": b"1234", "image.png": b"\x89PNG"},
        "",
        r"contains no text files .* among its 2 files\. For its token files, use .*/\*\*/\*\.bin\.",
    ),
    ({"none.txt": b""}, "none.txt", "none.txt is empty: 1 file without content"),
    ({"x.gz": GZ}, "x.gz", "x.gz is not UTF-8 text. Convert it, or use token files"),
    ({"x.npy": npy(np.zeros((4, 25), np.uint16))}, "x.npy", r"must contain .* integers, got shape \(4, 25\) of uint16"),
    ({"x.npy": npy(np.zeros(100, np.float32))}, "x.npy", r"1-D array of integers, got shape \(100,\) of float32"),
    ({"x.npy": npy(np.array(["a"] * 100, object))}, "x.npy", "is not a readable .npy file: .*[Pp]ython objects"),
    ({"cut.npy": HUNDRED[:-80]}, "cut.npy", "cut.npy is not a readable .npy file: .*greater than file size"),
    ({"no.npy": b"hello"}, "no.npy", "no.npy is not a readable .npy file"),
    *(({"n.npy": headed(text)}, "n.npy", "n.npy is not a readable .npy file: .*; write it again") for text in HEADERS),
    ({"odd.bin": b"12345"}, "odd.bin", "has 5 bytes; uint16 tokens .data.bin_dtype. require a multiple of 2"),
    ({"a.bin": b"12", "b.txt": b"x"}, "*", r"matches 1 token files \(.npy, .bin\) and 1 others. Use a pattern that"),
    (
        {f"{i}.npy": npy(np.arange(100, dtype=("u2", "i8")[i % 2])) for i in range(6)},
        "*.npy",
        "the token files must have the same integer dtype, found int64, uint16",
    ),
    ({"a.txt": b"x" * 16}, "a.txt", "the held-out part of .* has 4 tokens, but one window requires 5. Use more text, "),
]


@pytest.mark.parametrize(("files", "source", "message"), REFUSED, ids=range(len(REFUSED)))
def test_a_source_that_cannot_be_read_is_one_line(files, source, message, tmp_path):
    write(tmp_path, files)
    with pytest.raises(ConfigError, match=message.replace("{folder}", re.escape(str(tmp_path)))) as caught:
        load(tmp_path / source)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that even root cannot read")
def test_unreadable_file(folder):
    (folder / "memory.txt").symlink_to("/proc/self/mem")
    with pytest.raises(ConfigError, match=r"memory.txt cannot be read: Input/output error\.$"):
        load(folder)


@pytest.mark.parametrize("written, read", [("<u4", "uint16"), ("<i8", "uint16"), ("<i8", "uint32")])
def test_a_bin_file_of_wider_integers_is_refused(tmp_path, written, read):
    """Every second token would be 0, or 1 for ids above 65,535."""
    ids = np.random.default_rng(0).integers(0, 100_000, 1000)
    path = tmp_path / "tokens.bin"
    ids.astype(written).tofile(path)
    with pytest.raises(ConfigError, match=rf"every second token of .*tokens.bin is below 16 .* integers than {read}"):
        load(path, bin_dtype=read)
    ids = np.random.default_rng(0).integers(0, 16, 1000)  # small ids are no halves
    ids.astype(written).tofile(path)
    assert len(load(path, bin_dtype=read).train)


def test_both_parts_must_contain_a_window_and_bin_files_whole_numbers(tmp_path):
    write(tmp_path, {"a.txt": b"x" * 40, "odd.bin": b"12345"})
    assert len(load(tmp_path / "a.txt", sequence_length=9).held_out) == 10
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "a.txt", sequence_length=100)
    assert [re.findall("the (.*) part", problem) for problem in caught.value.problems] == [["training"], ["held-out"]]
    with pytest.raises(ConfigError, match=r"odd.bin has 5 bytes; uint32 tokens .* a multiple of 4"):
        load(tmp_path / "odd.bin", bin_dtype="uint32")
