"""The safetensors format: bitwise round trips, slices that read only their pages, invalid files that are refused."""

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_mesh.checkpoint.hf.safetensors import DTYPES, INDEX, SINGLE_FILE, open_safetensors, write_safetensors
from flax_mesh.errors import CheckpointCorruptedError, ConfigError

GOOD = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


def with_b(**change):
    return GOOD | {"b": GOOD["b"] | change}


def bits(shape, dtype, seed=0):
    """Random bits as an array, NaNs included."""
    dtype = jnp.dtype(dtype)
    high = 2 if dtype.kind == "b" else 256
    data = np.random.default_rng(seed).integers(0, high, int(np.prod(shape)) * dtype.itemsize).astype(np.uint8)
    return data.view(dtype).reshape(shape)


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def write(folder, arrays, **kinds):
    write_safetensors(folder, arrays, arrays.items(), **kinds)


def raw(path: Path, header: Any, data: int | bytes = 32) -> Path:
    """A file with this header, as JSON or as bytes, and this data, or so many zeros."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + (bytes(data) if isinstance(data, int) else data))
    return path


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
contents = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=8),
    st.tuples(shapes, st.sampled_from(sorted(DTYPES.values()))),
    max_size=8,
)


@settings(max_examples=15, deadline=None)
@given(contents, st.integers(1, 300))
def test_round_trips_are_bitwise_for_any_number_of_files(kinds, max_file_bytes):
    arrays = {name: bits(*kind, seed=seed) for seed, (name, kind) in enumerate(kinds.items())}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "out"
        write(folder, arrays, max_file_bytes=max_file_bytes)
        found = open_safetensors(folder)
        assert found.keys() == arrays.keys()
        for name, array in arrays.items():
            assert same_bits(found[name], array) and not found[name].flags.writeable, name
            assert found[name].flags.aligned, name
        files = list(folder.glob("*.safetensors"))
        for file in files:
            sizes = [array.nbytes for array in open_safetensors(file).values()]
            assert sum(sizes) <= max_file_bytes or len([size for size in sizes if size]) == 1
        assert (folder / INDEX).exists() == (len(files) > 1)


def test_the_safetensors_package_reads_and_writes_the_same_files(tmp_path):
    package = pytest.importorskip("safetensors", reason="the reference implementation; comes with the extra hf")
    from safetensors.numpy import save_file  # pyright: ignore[reportMissingImports]

    arrays = {f"layer.{i}.{kind}": bits((3, 5), kind, i) for i in range(3) for kind in ("float32", "bfloat16", "bool")}
    write(tmp_path / "ours", arrays, max_file_bytes=200)
    files = sorted((tmp_path / "ours").glob("*.safetensors"))
    assert len(files) > 1
    theirs = {}
    for file in files:
        with package.safe_open(file, "numpy") as opened:
            theirs |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
    assert theirs.keys() == arrays.keys() and all(same_bits(theirs[name], arrays[name]) for name in arrays)
    save_file(arrays, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    ours = open_safetensors(tmp_path / "theirs.safetensors")
    assert ours.keys() == arrays.keys() and all(same_bits(ours[name], arrays[name]) for name in arrays)


@pytest.mark.skipif(sys.platform != "linux", reason="pages in memory are read from /proc")
def test_a_slice_reads_only_its_own_pages(tmp_path):
    rows, width = 1024, 1 << 17  # 512 MiB of float32, a sparse file
    size = rows * width * 4
    header = {"x": {"dtype": "F32", "shape": [rows, width], "data_offsets": [0, size]}}
    file = raw(tmp_path / "big.safetensors", header, 0)
    with file.open("r+b") as out:
        out.truncate(file.stat().st_size + size)
    array = open_safetensors(file)["x"]
    assert pages_in_memory(file) < 1 << 20
    assert array[512:528].sum() == 0
    assert 16 * width * 4 <= pages_in_memory(file) <= 16 * width * 4 + (4 << 20)
    assert array.shape == (rows, width)


def pages_in_memory(file):
    """Bytes of the mapped file that are resident in this process."""
    text = Path("/proc/self/smaps").read_text()
    entry = text[text.index(str(file)) :]
    found = re.search(r"Rss:\s+(\d+) kB", entry)
    assert found
    return int(found[1]) * 1024


def test_arrays_are_in_natural_order_with_wide_dtypes_first(tmp_path):
    names = ["l.10.w", "l.9.w", "l.1.w", "l.1.b"]
    write(tmp_path / "out", {name: bits((2,), "float32") for name in names} | {"a": bits((3,), "bfloat16")})
    assert list(open_safetensors(tmp_path / "out")) == ["l.1.b", "l.1.w", "l.9.w", "l.10.w", "a"]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([], "header must be a JSON object"),
        (b"{", "not valid JSON"),
        (b'{"a": \xff}', "not valid JSON"),
        (b'{"a": ' + b"[" * 100_000, "not valid JSON"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "not valid JSON"),
        (b'{"a": {}, "a": {}}', "duplicate keys: a"),
        (GOOD | {"__metadata__": {"format": 1}}, "__metadata__ must map strings to strings"),
        (GOOD | {"b": {}}, "'b': must have dtype, shape and data_offsets, got {}"),
        (with_b(more=1), "'b': must have dtype, shape and data_offsets"),
        (with_b(dtype="F4"), "'b': dtype must be one of .*, got 'F4'"),
        (with_b(dtype=[]), r"'b': dtype must be one of .*, got \[\]"),
        (with_b(shape=[-4]), r"'b': shape must be .* non-negative integers .*, got \[-4\]"),
        (with_b(shape=[True]), r"'b': shape must be .* non-negative integers .*, got \[True\]"),
        (with_b(shape=[4.0]), "'b': shape must be .* non-negative integers"),
        (with_b(shape=[1] * 33), "'b': shape must be at most 32"),
        (with_b(shape=[0, 2**40, 2**40]), "'b': shape must be .* elements"),
        (with_b(shape=[5]), r"'b': BF16 \[5\] needs 10 bytes, but data_offsets are \[24, 32\]"),
        (with_b(data_offsets=[32, 24]), "'b': data_offsets must be two ascending non-negative integers"),
        (with_b(data_offsets=[24]), "'b': data_offsets must be two ascending non-negative integers"),
        (with_b(data_offsets=[-8, 0]), "'b': data_offsets must be two ascending non-negative integers"),
        (with_b(data_offsets=[16, 24]), "'b': begins at byte 16, which overlaps 'a'"),
        (with_b(data_offsets=[32, 40]), "'b': ends at byte 40 of the data, which has 32"),
        (with_b(shape=[3], data_offsets=[26, 32]), "'b': begins at byte 26, which leaves a gap"),
        (with_b(shape=[3], data_offsets=[24, 30]), "2 bytes after 'b' belong to no array"),
        (
            {"a": GOOD["a"] | {"dtype": "F7"}, "b": GOOD["b"] | {"shape": [9]}},
            r"'a': dtype must.*'b': BF16 \[9\] needs 18 bytes",  # one error lists all
        ),
        (GOOD | {"": GOOD["b"]}, "'': a name must be printable text"),
        (GOOD | {"\x00": GOOD["b"]}, r"'\\x00': a name must be printable text"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_invalid_headers_are_refused(header, message, tmp_path):
    assert open_safetensors(raw(tmp_path / "good.safetensors", GOOD)).keys() == GOOD.keys()
    with pytest.raises(CheckpointCorruptedError, match=f"(?s)is damaged, or not in the expected format.*{message}"):
        open_safetensors(raw(tmp_path / "bad.safetensors", header))


@pytest.mark.parametrize(
    "content", [b"", b"1234567", b"\xff" * 8, b"\x09" + bytes(7) + b"{}", (10**9).to_bytes(8, "little")]
)
def test_a_header_longer_than_the_file_is_refused(content, tmp_path):
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises(CheckpointCorruptedError, match=r"its header should have \d+ bytes, but the file has \d+"):
        open_safetensors(tmp_path / "bad.safetensors")


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 150), st.integers(1, 255))
def test_a_changed_byte_is_refused_or_reads_inside_the_file(at, change):
    with tempfile.TemporaryDirectory() as temporary:
        file = raw(Path(temporary) / "x.safetensors", GOOD)
        content = bytearray(file.read_bytes())
        assert len(content) > 150
        content[at] ^= change
        file.write_bytes(content)
        try:
            found = open_safetensors(file)
        except ConfigError:
            return
        assert sum(array.nbytes for array in found.values()) == 32
        assert all(array.tobytes() is not None for array in found.values())


def sharded(folder):
    """Writes a folder of three files, and returns its index."""
    write(folder, {f"w{i}": bits((4,), "float32", i) for i in range(3)}, max_file_bytes=20)
    return json.loads((folder / INDEX).read_text())


OUTSIDE = ("/etc/x.safetensors", "../x.safetensors", "..", "a/b.safetensors", "x\\y", ".x.safetensors")
NO_NAMES = ("x.bin", "", 3, None)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        *((text, "not valid JSON|must be an object with a") for text in ("[]", "{}", "{")),
        *(({"weight_map": value}, "must be an object with a") for value in ({}, [], 1)),
        *(({"weight_map": {"w0": x}}, f"{re.escape(repr(x))} must be the name of a .saf") for x in OUTSIDE + NO_NAMES),
    ],
)
def test_an_index_that_is_invalid_or_names_files_outside_its_folder_is_refused(index, message, tmp_path):
    sharded(tmp_path / "in")
    raw(tmp_path / "x.safetensors", GOOD)
    (tmp_path / "in" / INDEX).write_text(index if isinstance(index, str) else json.dumps(index))
    with pytest.raises(ConfigError, match=f"(?s)not in the expected format.*({message})"):
        open_safetensors(tmp_path / "in")


def test_an_index_and_its_files_must_agree(tmp_path):
    index = sharded(tmp_path / "in")
    index["weight_map"]["w7"] = index["weight_map"]["w0"]
    index["weight_map"]["w8"] = "gone.safetensors"
    del index["weight_map"]["w1"], index["weight_map"]["w2"]
    index["weight_map"]["w3"] = "model-00002-of-00003.safetensors"
    (tmp_path / "in" / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointCorruptedError) as error:
        open_safetensors(tmp_path / "in")
    text = str(error.value)
    assert "w7: listed in the index, but not in model-00001-of-00003.safetensors" in text
    assert "gone.safetensors: no such file" in text
    assert "w1: in model-00002-of-00003.safetensors, but not listed in the index" in text
    assert "w3: listed in the index, but not in model-00002-of-00003.safetensors" in text


def test_a_folder_has_either_one_file_or_an_index(tmp_path):
    has_none = f"has no parameters: it contains no safetensors files, and neither {SINGLE_FILE} nor {INDEX}. Add the"
    with pytest.raises(ConfigError, match=has_none):
        open_safetensors(tmp_path)
    with pytest.raises(ConfigError, match="no such file"):
        open_safetensors(tmp_path / "gone")
    sharded(tmp_path / "in")
    raw(tmp_path / "in" / SINGLE_FILE, GOOD)
    with pytest.raises(ConfigError, match=f"(?s)not both; it contains model-00001-of-00003.*{SINGLE_FILE}"):
        open_safetensors(tmp_path / "in")


def test_a_folder_is_written_completely_or_not_at_all(tmp_path):
    arrays = {"a": bits((4,), "float32"), "b": bits((4,), "float32")}

    def pieces():
        yield "a", arrays["a"]
        assert not (tmp_path / "deep" / "out").exists()
        raise OSError("no space left on device")

    out = tmp_path / "deep" / "out"
    with pytest.raises(OSError, match="no space left"):
        write_safetensors(out, arrays, pieces())
    assert not list(out.parent.iterdir())
    for wrong, message in [
        ([("a", arrays["a"])], "in `arrays`, but not in `values`: b"),
        ([("a", arrays["a"]), ("a", arrays["a"])], "a: in `values` twice, or not in `arrays`"),
        ([("a", arrays["a"][:2]), ("b", arrays["b"])], r"a: float32\(4,\) in `arrays`, float32\(2,\) in `values`"),
        ([("a", arrays["a"].view(np.int32)), ("b", arrays["b"])], "a: float32.* in `arrays`, int32"),
    ]:
        with pytest.raises(ValueError, match=message):
            write_safetensors(out, arrays, wrong)
    with pytest.raises(ConfigError, match="the safetensors format cannot store:\n  a: complex64"):
        write(out, {"a": np.zeros(2, np.complex64)})
    with pytest.raises(ConfigError, match="max_file_bytes must be at least 1, got 0"):
        write(out, arrays, max_file_bytes=0)
    assert not list(out.parent.iterdir())
    write(out, arrays, json_files={"config.json": {"ä": 1}})
    assert sorted(file.name for file in out.iterdir()) == ["config.json", SINGLE_FILE]
    assert json.loads((out / "config.json").read_text(encoding="utf-8")) == {"ä": 1}
    with pytest.raises(ConfigError, match="exists; nothing was overwritten"):
        write(out, arrays)
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", arrays)
    assert open_safetensors(tmp_path / "empty").keys() == arrays.keys()
