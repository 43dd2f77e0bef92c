"""Formatting helpers of messages and reports."""

import jax
import ml_dtypes
import numpy as np
import pytest

from flax_mesh.text import array_text, axes_text, count_text, mesh_text, processes_text


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
