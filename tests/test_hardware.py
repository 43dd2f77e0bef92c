import pytest

from flax_mesh.hardware import CHIPS, peak_flops


@pytest.mark.parametrize(
    ("kind", "flops"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("TPU v5p", 459e12),
        ("TPU v5 lite", 197e12),
        ("cpu", None),
    ],
)
def test_peak_flops_of_known_and_unknown_devices(kind, flops):
    assert peak_flops(kind) == flops


def test_no_chip_is_shadowed_by_an_earlier_one():
    for index, chip in enumerate(CHIPS):
        assert not [other.kind for other in CHIPS[:index] if other.kind in chip.kind and other[1:] != chip[1:]]
