"""Arrays of quantized folders, decoded where they are read.

MXFP4 (OCP Microscaling Formats, 2023), read as bfloat16, of the experts of gpt-oss: 32 numbers of 4 bits, two in a
byte, with one exponent:

    NAME_blocks  (e, f, d / 32, 16) uint8    the lower half of a byte is the first number of two
    NAME_scales  (e, f, d / 32) uint8        their power of two, plus 127
    NAME         (e, d, f)                   number * 2^(scale - 127), which bfloat16 represents exactly

Float8 with scales of blocks, read as float32, of the weights of DeepSeek-V3:

    NAME            (rows, columns) float8_e4m3fn
    NAME_scale_inv  (rows / 128, columns / 128), rounded up: the factor of each block of 128 x 128 numbers
"""

# JAX and NumPy have no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false

import math
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = np.asarray([*_POSITIVE, *(-x for x in _POSITIVE)], np.float32)
_BLOCKS, _SCALES = "_blocks", "_scales"
BLOCK, _BLOCK_SCALES = 128, "_scale_inv"


class Packed:
    """An array (e, d, f) that is decoded where it is read."""

    dtype = np.dtype(jnp.bfloat16)

    def __init__(self, blocks: np.ndarray, scales: np.ndarray):
        self.blocks, self.scales = blocks, scales
        experts, rows, count, half = blocks.shape
        self.shape = (experts, count * half * 2, rows)

    def decode(self, experts: slice) -> np.ndarray:
        arrays = []
        for blocks, scales in zip(self.blocks[experts], self.scales[experts], strict=True):
            pairs = np.stack([_NUMBERS[blocks & 15], _NUMBERS[blocks >> 4]], axis=-1)
            numbers = np.ldexp(pairs.reshape(*blocks.shape[:2], -1), scales.astype(np.int32)[..., None] - 127)
            arrays.append(numbers.astype(self.dtype).reshape(blocks.shape[0], -1).T)
        return np.stack(arrays) if arrays else np.empty((0, *self.shape[1:]), self.dtype)


class Scaled:
    """An array that is multiplied by its scales where it is read."""

    dtype = np.dtype(np.float32)

    def __init__(self, numbers: np.ndarray, scales: np.ndarray):
        self.numbers, self.scales, self.shape = numbers, scales, numbers.shape

    def decode(self, rows: slice) -> np.ndarray:
        first, stop, _ = rows.indices(self.shape[0])
        scales = self.scales[np.arange(first, stop) // BLOCK].astype(self.dtype)
        return self.numbers[rows].astype(self.dtype) * np.repeat(scales, BLOCK, axis=1)[:, : self.shape[1]]


Stored = np.ndarray | Packed | Scaled


def unpacked(stored: Mapping[str, np.ndarray]) -> dict[str, Stored]:
    """`stored` with an array NAME in place of NAME_blocks and NAME_scales, or of NAME and its scales of blocks."""
    arrays: dict[str, Stored] = dict(stored)
    for name in stored:
        if _is_scaled(stored[name], scales := stored.get(name + _BLOCK_SCALES)):
            assert scales is not None
            arrays[name] = Scaled(stored[name], scales)
            del arrays[name + _BLOCK_SCALES]
        base = name.removesuffix(_BLOCKS)
        if name.endswith(_BLOCKS) and _is_packed(stored[name], stored.get(base + _SCALES)):
            arrays[base] = Packed(arrays.pop(name), arrays.pop(base + _SCALES))  # pyright: ignore[reportArgumentType]
    return arrays


def _is_packed(blocks: np.ndarray, scales: np.ndarray | None) -> bool:
    if scales is None or not blocks.dtype == scales.dtype == np.uint8:
        return False
    return blocks.ndim == 4 and blocks.shape[-1] == 16 and blocks.shape[:-1] == scales.shape


def _is_scaled(numbers: np.ndarray, scales: np.ndarray | None) -> bool:
    if scales is None or numbers.dtype.name != "float8_e4m3fn" or numbers.ndim != 2:
        return False
    return scales.shape == tuple(math.ceil(size / BLOCK) for size in numbers.shape)
