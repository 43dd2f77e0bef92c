"""Arrays in float8 with scales of blocks, read as float32: the weights of DeepSeek-V3.

NAME            (rows, columns) float8_e4m3fn
NAME_scale_inv  (rows / 128, columns / 128), rounded up: the factor of each block of 128 x 128 numbers
"""

import math

import numpy as np

BLOCK = 128
SCALES = "_scale_inv"


class Scaled:
    """An array that is multiplied by its scales where it is read."""

    dtype = np.dtype(np.float32)

    def __init__(self, numbers: np.ndarray, scales: np.ndarray):
        self.numbers, self.scales, self.shape = numbers, scales, numbers.shape

    def decode(self, rows: slice) -> np.ndarray:
        first, stop, _ = rows.indices(self.shape[0])
        scales = self.scales[np.arange(first, stop) // BLOCK].astype(self.dtype)
        return self.numbers[rows].astype(self.dtype) * np.repeat(scales, BLOCK, axis=1)[:, : self.shape[1]]


def is_scaled(numbers: np.ndarray, scales: np.ndarray | None) -> bool:
    if scales is None or numbers.dtype.name != "float8_e4m3fn" or numbers.ndim != 2:
        return False
    return scales.shape == tuple(math.ceil(size / BLOCK) for size in numbers.shape)
