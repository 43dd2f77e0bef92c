"""Batches of arrays in memory, as a pure function of (seed, step)."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from flax_mesh.data.batches import sample_rows
from flax_mesh.data.user_batches import batch_problems
from flax_mesh.errors import ConfigError
from flax_mesh.fields import check_types
from flax_mesh.text import count_text


@check_types
def array_batches(arrays: Any, *, batch_size: int, seed: int) -> Callable[[int], Any]:
    """Batches of numpy arrays for `make_batches`: a function of the step, for every mesh and number of processes.

    An epoch visits every row once, in an order that depends on (seed, epoch) only. A batch may span two epochs.

    Args:
        arrays: A pytree of numpy arrays with equal numbers of rows, their first dim.
        batch_size: Rows of a batch, `config.data.batch_size`.
        seed: Seed of the order, such as `config.run.seed`.

    Returns:
        step -> batch, a pytree like `arrays`.

    Raises:
        ConfigError: A leaf is not an array of numbers, the numbers of rows differ, or they are fewer than `batch_size`.

    Example:
        >>> from flax_mesh.train import array_batches
        >>> batch = array_batches({"x": np.arange(6), "y": np.arange(6) ** 2}, batch_size=3, seed=0)
        >>> sorted([*batch(0)["x"], *batch(1)["x"]]) == list(range(6))
        True
    """
    problems = batch_problems(arrays)
    rows = 0 if problems else len(jax.tree.leaves(arrays)[0])
    if not problems and rows < batch_size:
        problems.append(f"they have {count_text(rows, 'row')}, but one batch has {batch_size} (data.batch_size)")
    if batch_size < 1:
        problems.append(f"batch_size must be at least 1, got {batch_size}")
    if problems:
        raise ConfigError([f"array_batches: {problem}" for problem in problems])

    def batch_fn(step: int) -> Any:
        index = sample_rows(step * batch_size + np.arange(batch_size), rows, seed)
        return jax.tree.map(lambda x: x[index], arrays)

    return batch_fn
