"""Regression by a Gaussian process: which layouts that are not planned yet are probably fast, and probably fit.

The kernel is a constant, a linear and a squared exponential part (Rasmussen and Williams 2006, chapters 2.2 and 4.2).
The logarithms of time and memory are nearly linear in the features of a layout; the last part fits their bends,
such as the step from a compute limit to a network limit.
"""

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
LENGTH, LINEAR, CURVED, NOISE = 1.5, 0.3, 1.0, 1e-4  # see docs/log.md


def regress(features: Values, values: Values, wanted: Values) -> tuple[Values, Values]:
    """Mean and standard deviation at the rows of `wanted`, from `values` (N,) at the rows of `features` (N, D)."""
    center, scale = values.mean(), values.std() or 1.0
    covariance = _kernel(features, features) + NOISE * np.eye(len(features))
    mixed = _kernel(wanted, features)
    mean = mixed @ np.linalg.solve(covariance, (values - center) / scale)
    prior = 1.0 + LINEAR * (wanted**2).sum(1) + CURVED
    explained = np.einsum("ij,ji->i", mixed, np.linalg.solve(covariance, mixed.T))
    return center + scale * mean, scale * np.sqrt(np.maximum(prior - explained, 0.0))


def _kernel(a: Values, b: Values) -> Values:
    products = a @ b.T
    squares = (a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2 * products
    return 1.0 + LINEAR * products + CURVED * np.exp(-np.maximum(squares, 0.0) / (2 * LENGTH**2))
