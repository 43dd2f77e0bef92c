"""Batches as equal microbatches."""

from typing import Any

import jax
import numpy as np

from flax_mesh.errors import ConfigError
from flax_mesh.tree import path_of


def microbatch_shapes(batch: Any, count: int) -> Any:
    """ShapeDtypeStructs of one of `count` equal microbatches; ConfigError if the batch cannot be divided into them."""
    sizes = {path_of(path): np.shape(x)[:1] for path, x in jax.tree_util.tree_flatten_with_path(batch)[0]}
    if count < 1:
        raise ConfigError(f"the number of microbatches must be at least 1, got {count}")
    problems = [
        f"batch {path!r} is a scalar; every array must have rows as its first dim" for path in sizes if not sizes[path]
    ]
    if len(rows := {size[0] for size in sizes.values() if size}) > 1:
        problems.append(f"the arrays of the batch have different numbers of rows, {sorted(rows)}; they must be equal")
    for path, size in sizes.items():
        if size and size[0] % count:
            problems.append(f"batch {path!r} has {size[0]} rows, not divisible into {count} microbatches")
    if problems:
        raise ConfigError(problems)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0] // count, *x.shape[1:]), x.dtype), batch)
