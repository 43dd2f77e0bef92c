"""What the vendors' datasheets say of chips."""

from typing import NamedTuple


class Chip(NamedTuple):
    """One kind of device. `kind` is a part of JAX's `device_kind`."""

    kind: str
    peak_flops: float  # dense bf16 FLOP/s of one device


# The first chip whose `kind` is found counts: the longer of two kinds comes first.
CHIPS = (
    Chip("H100 PCIe", 756e12),
    Chip("H100", 989e12),
    Chip("H200", 989e12),
    Chip("GH200", 989e12),
    Chip("B200", 2250e12),
    Chip("A100", 312e12),
    Chip("TPU v6", 918e12),
    Chip("TPU v5p", 459e12),
    Chip("TPU v5 lite", 197e12),
    Chip("TPU v5e", 197e12),
    Chip("TPU v5", 459e12),
    Chip("TPU v4", 275e12),
)


def peak_flops(device_kind: str) -> float | None:
    """Dense bf16 FLOP/s of one device; None where it is not known (a CPU)."""
    return next((chip.peak_flops for chip in CHIPS if chip.kind in device_kind), None)
