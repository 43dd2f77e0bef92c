"""Formatting helpers of messages and reports."""

import jax
import ml_dtypes
import numpy as np
import pytest

from flax_mesh.text import (
    MOST_LINES,
    array_text,
    axes_text,
    count_text,
    folded,
    group_lines,
    mesh_text,
    path_lines,
    paths_text,
    processes_text,
    shortened,
    table_text,
)


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [(1, "file", "1 file"), (0, "array", "0 arrays"), (1024, "process", "1,024 processes"), (2, "batch", "2 batches")],
)
def test_nouns_agree_with_their_count(count, noun, text):
    assert count_text(count, noun) == text


def test_processes_are_listed_once_and_in_order():
    assert processes_text([3]) == "process 3"
    assert processes_text([3, 0, 3]) == "processes 0, 3"


def test_meshes_are_formatted_as_in_the_setting():
    assert mesh_text({"pp": 2, "dp": 1, "fsdp": -1}) == "pp:2,fsdp:-1"
    assert mesh_text({"dp": 1}) == "one device"
    assert axes_text({"dp": 1, "fsdp": 2, "tp": 4}, ("tp", "dp")) == "tp=4, dp=1"


@pytest.mark.parametrize(
    "dtype", [np.float32, ml_dtypes.bfloat16, np.uint8, np.bool_, np.complex64, ml_dtypes.float8_e4m3fn]
)
def test_arrays_are_formatted_as_jax_prints_their_types(dtype):
    array = jax.ShapeDtypeStruct((2, 3), dtype)
    assert array_text(array) == jax.make_jaxpr(lambda x: x)(array).in_avals[0].str_short(short_dtypes=True)


# --- lists of paths ---


def test_lines_that_differ_only_in_the_numbers_of_their_paths_are_one():
    lines = ["layers/0/q: missing", "layers/1/q: missing", "layers/1/k: missing", "  h.0.w (4,)", "  h.1.w (4,)"]
    assert group_lines(lines) == ["layers/{0..1}/q: missing", "layers/1/k: missing", "  h.{0..1}.w (4,)"]
    assert group_lines(["layers/0/q: f32[4]", "layers/1/q: f32[5]"]) == ["layers/0/q: f32[4]", "layers/1/q: f32[5]"]
    assert group_lines([]) == [] and group_lines(["", "x"]) == ["", "x"]


def test_paths_with_brackets_are_grouped():
    assert paths_text([f"params['layers'][{i}]['q']" for i in range(4)]) == "params['layers'][{0..3}]['q']"


def test_only_whole_decimal_numbers_are_grouped():
    paths = ["layers/0" + "9" * 5000, "layers/01", "layers/02", "block_1/q", "block_2/q"]
    assert group_lines(paths) == paths


def test_a_list_that_is_longer_than_a_screen_is_cut_and_counted():
    lines = path_lines(f"{name}: missing" for name in map(chr, range(0x100, 0x100 + 1500)))
    assert len(lines) == MOST_LINES + 1 and lines[-1] == f"and {1500 - MOST_LINES:,} more"
    cut = shortened("x" * 5000)
    assert len(cut) == 200 and cut.endswith("xx... (5,000 characters)") and shortened("x" * 200) == "x" * 200


# --- tables ---

ROWS = [["layers/{0..125}/attention/q/kernel", "f32[128,4,32]", "1,234,567 B"], ["  norm/scale", "f32[8]", "32 B"]]
HEADS = ("path", "array", "bytes")


def test_a_table_that_fits_has_one_line_per_row():
    assert table_text(HEADS, ROWS, right={"bytes"}) == (
        "path                                array                bytes\n"
        "layers/{0..125}/attention/q/kernel  f32[128,4,32]  1,234,567 B\n"
        "  norm/scale                        f32[8]                32 B"
    )


def test_a_table_that_is_too_wide_continues_paths_after_a_slash():
    text = table_text(HEADS, ROWS, 50, right={"bytes"}, wrap={"path"})
    assert text.splitlines()[1:3] == ["layers/{0..125}/        f32[128,4,32]  1,234,567 B", "attention/q/kernel"]


@pytest.mark.parametrize("width", range(1, 70))
@pytest.mark.parametrize("wrap", [(), ("path",)])
def test_no_number_and_no_name_is_cut_at_any_width(width, wrap):
    text = table_text(HEADS, ROWS, width, right={"bytes"}, wrap=wrap)
    for part in ("f32[128,4,32]", "1,234,567", "{0..125}/", "attention/", "kernel", "norm/", "scale"):
        assert part in text
    assert max(map(len, text.splitlines())) <= max(width, 41)


def test_text_is_folded_between_words_only():
    text = folded("total  " + "x" * 50 + " in 3 files", 30, indent="       ")
    assert text.splitlines() == ["total", "       " + "x" * 50, "       in 3 files"]
