"""The table of chips: every kind has one chip; and chips from a file."""

import dataclasses
import re

import pytest

from flax_mesh import hardware
from flax_mesh.errors import ConfigError
from flax_mesh.hardware import CHIPS, GIB, chip_of, load_chip, peak_flops
from flax_mesh.mesh.torus.torus import wraps_around

NAMED = {chip.name: chip for chip in CHIPS}
each_chip = pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)


@pytest.mark.parametrize(
    ("kind", "name", "flops"),
    [
        ("NVIDIA H100 PCIe", "H100-PCIe", 756e12),
        ("NVIDIA H100 80GB HBM3", "H100", 989e12),
        ("NVIDIA H200", "H200", 989e12),
        ("NVIDIA B200", "B200", 2250e12),
        ("TPU v5", "v5p", 459e12),
        ("TPU v5p", "v5p", 459e12),
        ("TPU v5 lite", "v5e", 197e12),
        ("TPU v6 lite", "v6e", 918e12),
        ("TPU7x", "v7x", 2307e12 / 2),
        ("cpu", "cpu", None),
        ("TPU v4 lite", None, None),
        ("NVIDIA GeForce RTX 4090", None, None),
    ],
)
def test_chip_and_peak_of_a_device_kind(kind, name, flops):
    chip = chip_of(kind)
    assert (chip and chip.name) == name
    assert peak_flops(kind) == flops


def test_peaks_by_dtype():
    assert peak_flops("TPU v5 lite", "int8") == 393e12
    assert peak_flops("TPU7x", "float8") == peak_flops("TPU7x", "float8_e4m3fn") == 4614e12 / 2
    assert peak_flops("TPU v5 lite", "float32") == peak_flops("TPU v5 lite") == 197e12


@each_chip
def test_figures_are_plausible(chip):
    assert 0 < chip.link_fraction <= 1 and 0 < chip.matmul_fraction <= 1 and 0 <= chip.overlap_fraction <= 1
    assert chip.network_bandwidth < chip.reachable_link < chip.memory_bandwidth
    assert all(peak >= chip.peak("bfloat16") for peak in chip.peak_flops.values())
    assert chip.torus == {"v5e": 2, "v6e": 2, "v3": 2, "v4": 3, "v5p": 3, "v7x": 3}.get(chip.name, 0)
    assert hash(chip) == hash(dataclasses.replace(chip))


def test_kinds_and_names_are_unique():
    kinds = [kind for chip in CHIPS for kind in chip.kinds]
    assert len(kinds) == len(set(kinds)) and len(NAMED) == len(CHIPS)
    assert all(chip_of(kind) is chip for chip in CHIPS for kind in chip.kinds)


def test_bandwidths_of_the_cost_model():
    """The figures that docs/mesh.md lists: 90 of the vendor's 100 GB/s are reachable."""
    kinds = {"TPU v3": 100, "TPU v4": 45, "TPU v5 lite": 45, "TPU v5": 90, "TPU v6 lite": 90, "TPU7x": 90, "TPU v2": 45}
    assert {kind: hardware.link_bandwidth(kind) / 1e9 for kind in kinds} == pytest.approx(kinds)
    dcn = {"TPU v4": 6.25, "TPU v5 lite": 3.125, "TPU v5p": 6.25, "TPU v6e": 12.5, "TPU7x": 12.5, "TPU v2": 6.25}
    assert {kind: hardware.network_bandwidth(kind) / 1e9 for kind in dcn} == dcn


def test_memory_links_and_rings_of_a_device():
    assert [NAMED[name].links for name in ("v5p", "v5e", "H100")] == [6, 4, 1]
    assert NAMED["v7x"].devices_per_chip == 2 and NAMED["v7x"].memory == 96 * GIB  # half of a chip
    assert NAMED["v5p"].memory == 95 * GIB and NAMED["v5e"].memory == 16e9  # GiB and GB as the vendor states them
    assert NAMED["v5p"].wraps((4, 4, 8)) == (True, True, True)
    assert NAMED["v5p"].wraps((2, 4, 4)) == (False, False, False)
    assert NAMED["v5e"].wraps((8, 16)) == (False, True)
    assert (*NAMED["v7x"].wraps((4, 4, 4)), False) == wraps_around("TPU7x", (4, 4, 4, 2))


def loaded(path, text):
    path.write_text(text)
    return load_chip(path)


def test_a_chip_from_a_file_replaces_fields_of_its_base(tmp_path):
    path, base = tmp_path / "chip.toml", NAMED["v5p"]
    chip = loaded(path, 'base = "V5P"\nname = "mine"\nmemory = 90e9\n[peak_flops]\nfloat8 = 600e12\n')
    assert (chip.name, chip.memory, chip.pod) == ("mine", 90e9, base.pod)
    assert chip.peak_flops == {**base.peak_flops, "float8": 600e12}


FULL = """name = "npu-1"
platform = "gpu"
memory = 64e9
memory_bandwidth = 1e12
link_bandwidth = 1e11
network_bandwidth = 1e10
domain = 16
peak_flops = {bfloat16 = 1e14}
"""


def test_a_chip_from_a_file_without_a_base(tmp_path):
    chip = loaded(tmp_path / "chip.toml", FULL)
    assert (chip.name, chip.domain, chip.peak("float32"), chip.link_fraction) == ("npu-1", 16, 1e14, 1.0)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", [r"name, platform, peak_flops, memory, .* must be set, or base = \"v5p\""]),
        ("memory = [", ["is not a TOML file: "]),
        ('base = "v9"', [r"base must be one of v3, v4, .*, got 'v9'"]),
        ("base = 3", [r"base must be one of .*, got 3"]),
        (
            'base = "v5e"\ncolor = 1\nmemory = -1\nhop_latency = "x"\nlink_fraction = 2\npod = [0, 1]\n'
            "memory_bandwidth = nan",
            [
                r"color is not a field of a chip; the fields are name, platform, ",
                r"memory must be a positive number, got '-1'",
                r"memory_bandwidth must be a positive number, got 'nan'",
                r"link_fraction must be a number above 0 and at most 1, got '2'",
                r"hop_latency must be a positive number, got 'x'",
                r"pod must be a list of 2 or 3 integers from 1 to 65536, got '\[0, 1\]'",
            ],
        ),
        ('base="v5e"\nname="a:b"\npeak_flops={}\nwrap=["pod"]\nmemory=true', ["name", "peak", "memory", "wrap"]),
        ('base = "h100"\npod = [4, 4]', [r"pod, .* must be set for tpu only; platform is gpu"]),
        ('base = "v5e"\npod = [65536, 65536]', [r"pod must have at most 1,048,576 chips"]),
        (FULL.replace("bfloat16", "int8"), ["peak_flops must contain bfloat16"]),
    ],
)
def test_all_mistakes_of_a_file_are_reported(tmp_path, text, lines):
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path / "chip.toml", text)
    for problem, line in zip(caught.value.problems, lines, strict=True):
        assert problem.startswith(str(tmp_path)) and re.search(line, problem)


def test_files_that_cannot_be_read_are_reported(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "digits").write_text("memory = 0x" + "f" * 9000)
    (tmp_path / "deep").write_text("memory = " + "[" * 100_000)
    for path, line in [
        (tmp_path / "nothing", "no such file"),
        (tmp_path, "cannot be read: it must be a file, but is a folder"),
        *((tmp_path / name, "is not a TOML file") for name in ("bytes", "digits", "deep")),
        ("/dev/zero", "cannot be read: it must be a regular file, but is a pipe or a device"),
        ("x" * 300, "contains a name of 300 bytes"),
    ]:
        with pytest.raises(ConfigError, match=line):
            load_chip(path)
