"""A batch as (microbatch, row, ...) on the groups of a pipeline that read it."""

from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from flax_mesh.axes import PartitionAxis
from flax_mesh.mpmd.mesh import MpmdMesh
from flax_mesh.mpmd.transport.layout import on_group, put_host
from flax_mesh.sharding.rules import fit_spec


def place_array(x: Any, count: int, mesh: MpmdMesh, group: int, axes: PartitionAxis) -> jax.Array:
    """An array of a batch of `count` microbatches on a group.

    An array on the whole mesh is there already, the same on every group; any other goes through the host.
    """
    shape = (count, x.shape[0] // count, *x.shape[1:])
    there = _sharding(shape, mesh.unstack[group], axes)
    if not isinstance(getattr(x, "sharding", None), NamedSharding) or x.sharding.mesh != mesh.jax_mesh:
        return put_host(np.asarray(x).reshape(shape), there)
    return _reshape(shape, there)(on_group(x, mesh.unstack[group]))


@lru_cache(maxsize=256)
def _sharding(shape: tuple[int, ...], mesh: Mesh, axes: PartitionAxis) -> NamedSharding:
    """Layout of an array (microbatch, row, ...) on a group; of two dims a row the second is the sequence."""
    logical = (None, "batch", "sequence") if len(shape) == 3 else (None, "batch")
    # A hint where the rows should be placed: what does not divide is left out.
    spec, _ = fit_spec("batch", shape, axes.resolve(logical), mesh)
    return NamedSharding(mesh, spec)


@lru_cache(maxsize=256)
def _reshape(shape: tuple[int, ...], sharding: NamedSharding) -> Any:
    return jax.jit(lambda x: x.reshape(shape), out_shardings=sharding)
