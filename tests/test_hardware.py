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
def test_the_peak_of_a_device(kind, flops):
    assert peak_flops(kind) == flops


def test_no_chip_is_hidden_by_one_before_it():
    for number, chip in enumerate(CHIPS):
        assert not [before.kind for before in CHIPS[:number] if before.kind in chip.kind and before[1:] != chip[1:]]
