"""Corpora: which files are read, how they are divided, and the errors."""

import dataclasses
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from flax_mesh.errors import ConfigError
from flax_mesh.train.data import data
from flax_mesh.train.data.batches import batch_rows, held_out_rows
from flax_mesh.train.data.data import (
    Corpus,
    DataConfig,
    TokenFiles,
    check_data_config,
    decode,
    load_corpus,
)

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


@pytest.fixture
def folder(tmp_path) -> Path:
    """Forty documents that contain their own names, so that the files of a part of the corpus can be identified."""
    return write(tmp_path, {f"part{i % 4}/file{i}.txt": f"document {i:02}".encode() for i in range(40)})


# --- sources ---


def test_stdlib_is_split_by_file_and_leaves_out_tests_and_installed_packages():
    corpus = load_corpus(DataConfig())
    files = data._stdlib_files()
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
    taken = {f"a/b/{suffix}{suffix}": f"taken {suffix}".encode() for suffix in (*data.TEXT_SUFFIXES, ".TXT")}
    taken |= {"LICENSE": "free as in frei für alle".encode(), "latin.txt": b"caf\xe9 noir"}
    taken = {name.replace("/.", "/x."): content for name, content in taken.items()}
    left = {
        "image.png": b"\x89PNG",
        "program": b"\x7fELF\xff\xfe",
        "empty.txt": b"",
        ".git/HEAD": b"ref: x",
        ".env": b"KEY",
    }
    corpus = load(write(tmp_path, taken | left))
    assert documents(corpus.train) + documents(corpus.held_out) == Counter(taken.values())


def test_files_of_a_folder_are_joined_in_path_order_by_zero_bytes(folder):
    train = load(folder).train[:].tobytes()
    by_name = {f"part{i % 4}/file{i}.txt": f"document {i:02}".encode() for i in range(40)}
    kept = set(train.split(b"\0"))
    assert len(kept) > 20
    assert train == b"\0".join(by_name[name] for name in sorted(by_name) if by_name[name] in kept)


def test_a_glob_includes_all_matching_files(folder):
    corpus = load(f"{folder}/part[01]/*.txt")
    found = documents(corpus.train) + documents(corpus.held_out)
    assert found == Counter(f"document {i:02}".encode() for i in range(40) if i % 4 in (0, 1))
    recursive = load(f"{folder}/**/*.txt")
    assert recursive.content_hash == load(folder).content_hash


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.int64])
def test_npy_is_memory_mapped_and_holds_out_its_end(tmp_path, dtype):
    np.save(tmp_path / "tokens.npy", np.arange(100, dtype=dtype))
    corpus = load(tmp_path / "tokens.npy")
    assert isinstance(corpus.train, np.memmap) and isinstance(corpus.held_out, np.memmap)
    assert corpus.train.dtype == dtype
    np.testing.assert_array_equal(corpus.train, np.arange(75))
    np.testing.assert_array_equal(corpus.held_out, np.arange(75, 100))
    assert (corpus.vocab_size, corpus.bytes_per_token) == (None, None)
    assert corpus.description.endswith("tokens.npy: 1 file, 100 tokens; trains on the first 75, holds out the last 25")


def test_bin_is_memory_mapped_little_endian_uint16(tmp_path):
    (tmp_path / "tokens.bin").write_bytes(b"".join(int(i * 300).to_bytes(2, "little") for i in range(100)))
    corpus = load(tmp_path / "tokens.bin")
    assert isinstance(corpus.train, np.memmap) and isinstance(corpus.held_out, np.memmap)
    np.testing.assert_array_equal(np.concatenate([corpus.train, corpus.held_out]), np.arange(100) * 300)


def test_several_token_files_are_split_by_file_and_stay_mapped(tmp_path):
    for i in range(8):
        np.save(tmp_path / f"shard{i}.npy", np.arange(50, dtype=np.uint16) + 100 * i)
    corpus = load(tmp_path / "*.npy")
    assert isinstance(corpus.train, TokenFiles) and isinstance(corpus.held_out, TokenFiles)
    pieces = (*corpus.train.pieces, *corpus.held_out.pieces)
    assert all(isinstance(piece, np.memmap) for piece in pieces)
    assert sorted(int(piece[0]) for piece in pieces) == [100 * i for i in range(8)]
    assert 1 <= len(corpus.held_out.pieces) <= 7


def test_a_slice_of_token_files_equals_the_slice_of_their_concatenation():
    pieces = tuple(np.arange(n, dtype=np.uint16) + 10 * i for i, n in enumerate((3, 1, 7, 5)))
    array, files = np.concatenate(pieces), TokenFiles(pieces)
    assert len(files) == 16
    for start in range(17):
        for stop in range(start, 18):
            np.testing.assert_array_equal(files[start:stop], array[start:stop])


@pytest.mark.slow
def test_large_files_are_mapped_not_read(tmp_path):
    for name in ("text.txt", "tokens.bin"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(2**38)  # sparse: 256 GiB cannot be read into memory
        corpus = load(tmp_path / name)
        assert isinstance(corpus.train, np.memmap) and isinstance(corpus.held_out, np.memmap)
        assert (len(corpus.train) + len(corpus.held_out)) * corpus.train.dtype.itemsize == 2**38


# --- division and hash ---


def test_the_parts_are_disjoint_complete_and_of_about_the_share(folder):
    corpus = load(folder)
    train, held_out = documents(corpus.train), documents(corpus.held_out)
    assert not train & held_out
    assert train + held_out == Counter(f"document {i:02}".encode() for i in range(40))
    assert 4 <= len(held_out) <= 16


def test_parts_and_hash_do_not_depend_on_the_location_or_the_process(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "moved"
    corpus = load(folder)
    folder.rename(elsewhere)
    script = (
        "import sys; from flax_mesh.train.data.data import DataConfig, load_corpus;"
        "print(load_corpus(DataConfig(sys.argv[1], sequence_length=4, held_out=0.25)).content_hash)"
    )
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", script, str(elsewhere)]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    assert printed == corpus.content_hash


def test_a_file_stays_in_its_part_when_others_are_added_or_removed():
    names = [f"file{i}" for i in range(200)]
    before = data._held_out_names(names, 0.1)
    after = data._held_out_names([*names[:150], *(f"new{i}" for i in range(100))], 0.1)
    assert before & set(names[:150]) == after & set(names[:150]) != set()


@pytest.mark.parametrize("share", [1e-9, 0.999999])
def test_both_parts_have_a_file_for_every_share(share):
    assert 1 <= len(data._held_out_names(["a", "b", "c"], share)) <= 2


def test_a_link_to_a_file_is_not_a_second_file(folder):
    corpus = load(folder)
    (folder / "aaa.txt").symlink_to(folder / "part0/file0.txt")
    linked = load(folder)
    assert len(linked.train) + len(linked.held_out) == len(corpus.train) + len(corpus.held_out)


def test_content_hash_changes_with_one_byte_and_not_otherwise(folder):
    before = load(folder).content_hash
    assert re.fullmatch(r"[0-9a-f]{64}", before)
    assert load(folder).content_hash == before
    path = folder / "part3/file7.txt"
    path.write_bytes(path.read_bytes().replace(b"7", b"8"))
    assert load(folder).content_hash != before


@pytest.mark.slow
def test_content_hash_of_a_huge_file_samples_its_ends_and_its_size(tmp_path):
    path = tmp_path / "tokens.bin"
    hashes = []
    for size, at in ((2**31, None), (2**31, 0), (2**31, 2**31 - 2), (2**31 + 2, None)):
        path.write_bytes(b"")
        with path.open("r+b") as file:
            file.truncate(size)
            if at is not None:
                file.seek(at)
                file.write(b"\1")
        hashes.append(load(path).content_hash)
    assert len(set(hashes)) == 4


# --- files that change under a run ---


@pytest.fixture
def mapped(tmp_path) -> Path:
    for i in range(4):
        np.save(tmp_path / f"shard{i}.npy", np.arange(50, dtype=np.uint16) + 100 * i)
    return tmp_path


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


@pytest.mark.parametrize("text", ["", "plain", "naïve café — 文字 🙂", "a\0b"])
def test_decode_inverts_utf8(text):
    tokens = np.frombuffer(text.encode(), np.uint8)
    assert decode(tokens) == text
    assert decode(tokens.astype(np.int32)) == text


def test_invalid_utf8_becomes_a_replacement_character():
    assert decode(np.array([97, 0xE6, 98, 300, -1, 99])) == "a\ufffdb\ufffd\ufffdc"


# --- errors ---


def test_all_mistakes_are_reported_together():
    wrong = DataConfig(sequence_length=0, batch_size=0, held_out=2, seed=-1, eval_batches=0)
    assert check_data_config(DataConfig()) == []
    assert len(check_data_config(wrong)) == 5
    with pytest.raises(ConfigError) as caught:
        load_corpus(wrong)
    assert caught.value.problems == check_data_config(wrong)


def refuse(source: Path | str, message: str, **changes) -> None:
    """Loading raises one ConfigError of one line that matches."""
    with pytest.raises(ConfigError, match=message) as caught:
        load(source, **changes)
    assert len(str(caught.value).splitlines()) == 1


def test_missing_file_names_the_nearest_folder_and_similar_names(folder):
    where = re.escape(str(folder))
    refuse(
        folder / "part0/fil0.txt", rf"fil0.txt does not exist; the nearest .* {where}/part0; did you mean .*file0.txt"
    )
    refuse(
        folder / "pat0/deep/x.txt",
        rf"x.txt does not exist; the nearest folder that does is {where}; did you mean part0",
    )
    refuse(folder / "zzz", rf"zzz does not exist; the nearest folder that does is {where}\.$")
    refuse(folder / "pat0/*.txt", rf"pat0 does not exist; the nearest folder that does is {where}; did you mean part0")
    refuse(folder / ("x" * 300), "data.source contains a name of 300 bytes, at most 255 are possible")


def test_a_pattern_without_matches_names_the_searched_folder(folder):
    refuse(folder / "part0/*.md", rf"no file in {re.escape(str(folder))}/part0 matches .*part0/\*.md")


def test_folder_without_text_points_to_its_token_files(tmp_path):
    write(tmp_path, {"a/tokens.bin": b"1234", "image.png": b"\x89PNG"})
    refuse(tmp_path, r"contains no text files .* among its 2 files\. For its token files, use .*/\*\*/\*\.bin\.")


def test_empty_files_and_files_that_are_not_text(tmp_path):
    write(tmp_path, {"none.txt": b"", "none.bin": b"", "x.gz": b"\x1f\x8b\xff", "y.gz": b"\x1f\x8b\xff"})
    refuse(tmp_path / "none.txt", "none.txt is empty: 1 file without content")
    refuse(tmp_path / "none.bin", "none.bin is empty: 1 file without content")
    refuse(tmp_path / "x.gz", "x.gz is not UTF-8 text. Convert it, or use token files")
    refuse(tmp_path / "*.gz", "x.gz is not UTF-8 text")


def test_a_character_truncated_by_the_probe_is_still_text(tmp_path):
    text = "é" * data.TEXT_PROBE_BYTES
    path = write(tmp_path, {"cut.log": b"x" + text.encode()}) / "cut.log"
    assert len(load(path).train) > data.TEXT_PROBE_BYTES


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (
            np.zeros((4, 25), np.uint16),
            r"must contain token ids as a 1-D array of integers, got shape \(4, 25\) of uint16",
        ),
        (np.zeros(100, np.float32), r"1-D array of integers, got shape \(100,\) of float32"),
        (np.zeros(100, bool), r"1-D array of integers, got shape \(100,\) of bool"),
        (np.array(["a"] * 100, object), "is not a readable .npy file: .*[Pp]ython objects"),
    ],
)
def test_npy_of_wrong_type_or_rank(tmp_path, tokens, message):
    np.save(tmp_path / "tokens.npy", tokens)
    refuse(tmp_path / "tokens.npy", message)


def test_bin_files_of_uint32_are_read_by_the_setting(tmp_path):
    np.arange(70_000, 70_100, dtype="<u4").tofile(tmp_path / "tokens.bin")
    corpus = load(tmp_path / "tokens.bin", bin_dtype="uint32")
    found = np.concatenate([np.asarray(corpus.train), np.asarray(corpus.held_out)])
    np.testing.assert_array_equal(found, np.arange(70_000, 70_100))
    assert (corpus.bin_dtype, load(tmp_path / "tokens.bin").bin_dtype) == ("uint32", "uint16")


def test_broken_token_files(tmp_path):
    np.save(tmp_path / "cut.npy", np.arange(100))
    content = (tmp_path / "cut.npy").read_bytes()
    write(tmp_path, {"cut.npy": content[:-80], "no.npy": b"hello", "empty.npy": b"", "odd.bin": b"12345"})
    refuse(tmp_path / "cut.npy", "cut.npy is not a readable .npy file: .*greater than file size")
    refuse(tmp_path / "no.npy", "no.npy is not a readable .npy file")
    refuse(tmp_path / "empty.npy", "empty.npy is not a readable .npy file")
    refuse(tmp_path / "odd.bin", "odd.bin has 5 bytes; uint16 tokens .data.bin_dtype. require a multiple of 2")
    refuse(tmp_path / "odd.bin", "odd.bin has 5 bytes; uint32 tokens .* a multiple of 4", bin_dtype="uint32")


def test_kinds_and_types_are_not_mixed(tmp_path):
    write(tmp_path, {"a.bin": b"1234", "b.txt": b"text"})
    refuse(tmp_path / "*", r"matches 1 token files \(.npy, .bin\) and 1 others. Use a pattern that matches one kind")
    for i in range(6):
        np.save(tmp_path / f"{i}.npy", np.arange(100, dtype=(np.uint16, np.int64)[i % 2]))
    refuse(tmp_path / "*.npy", "the token files must have the same integer dtype, found int64, uint16")


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that even root cannot read")
def test_unreadable_file(folder):
    (folder / "memory.txt").symlink_to("/proc/self/mem")
    refuse(folder, r"memory.txt cannot be read: Input/output error\.")


def test_both_parts_must_contain_a_window(tmp_path):
    path = write(tmp_path, {"a.txt": b"x" * 40}) / "a.txt"
    assert len(load(path, sequence_length=9).held_out) == 10
    refuse(
        path, "the held-out part of .* has 10 tokens, but one window requires 11. Use more text, .*", sequence_length=10
    )
    with pytest.raises(ConfigError) as caught:
        load(path, sequence_length=100)
    assert [re.findall("the (.*) part", problem) for problem in caught.value.problems] == [["training"], ["held-out"]]
