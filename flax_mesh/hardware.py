"""Peak FLOP/s and bandwidths of accelerators, from the vendors' datasheets."""

from typing import NamedTuple


class Chip(NamedTuple):
    """One kind of device. `kind` is a substring of JAX's `device_kind`."""

    kind: str
    peak_flops: float  # dense bf16 FLOP/s of one device


# The first entry whose `kind` matches is used, so "H100 PCIe" must precede "H100".
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

# Bytes per second and direction. ICI per link, DCN per chip: jax-ml.github.io/scaling-book/tpus, "TPU specs".
ICI_BANDWIDTH = {
    "TPU v3": 1.0e11,
    "TPU v4": 4.5e10,
    "TPU v5": 9.0e10,
    "TPU v5p": 9.0e10,
    "TPU v5 lite": 4.5e10,
    "TPU v5e": 4.5e10,
    "TPU v6 lite": 9.0e10,
    "TPU v6e": 9.0e10,
    "TPU7x": 9.0e10,
    "TPU7": 9.0e10,
}
DCN_BANDWIDTH = {"TPU v5 lite": 3.125e9, "TPU v5e": 3.125e9, "TPU v6 lite": 1.25e10, "TPU v6e": 1.25e10}
DCN_BANDWIDTH |= {"TPU7x": 1.25e10, "TPU7": 1.25e10}
DEFAULT_ICI, DEFAULT_DCN = 4.5e10, 6.25e9  # kinds without a published figure


def peak_flops(device_kind: str) -> float | None:
    """Dense bf16 FLOP/s of one device; None if unknown (for example a CPU)."""
    return next((chip.peak_flops for chip in CHIPS if chip.kind in device_kind), None)
