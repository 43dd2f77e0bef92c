"""Batches as equal microbatches."""

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from flax_mesh.axes import PartitionAxis
from flax_mesh.errors import ConfigError
from flax_mesh.sharding.constrain import spec_in_mesh
from flax_mesh.sharding.rules import fit_spec
from flax_mesh.text import listed
from flax_mesh.tree import PyTree, path_of


def shapes_of(batch: PyTree) -> PyTree:
    """`batch` as ShapeDtypeStructs without shardings.

    Their dtypes are those on devices: int32 for int64, unless 64-bit types are enabled. ConfigError for leaves that are
    no arrays.
    """
    named = [(path_of(path), x) for path, x in jax.tree_util.tree_flatten_with_path(batch)[0]]
    others = [(path, x) for path, x in named if not _has_numbers(x)]
    if others:
        kinds = [f"an array of {x.dtype}" if hasattr(x, "dtype") else f"of type {type(x).__name__}" for _, x in others]
        raise ConfigError(
            [
                f"batch {path!r} is {kind}; every leaf must be an array of numbers with rows as its first dim. Close "
                "over it in loss_fn, or leave it out of the batch"
                for (path, _), kind in zip(others, kinds, strict=True)
            ]
        )
    dtype = jax.dtypes.canonicalize_dtype  # of random keys there is only one
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, dtype(x.dtype) if isinstance(x.dtype, np.dtype) else x.dtype), batch
    )


def _has_numbers(x: object) -> bool:
    """Whether `x` is an array of numbers or of random keys."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and (not isinstance(dtype, np.dtype) or dtype.kind not in "OSTU")


def microbatch_shapes(batch: PyTree, count: int) -> PyTree:
    """ShapeDtypeStructs of one of `count` equal microbatches; ConfigError if the batch cannot be divided into them."""
    shapes = shapes_of(batch)
    sizes = {path_of(path): x.shape[:1] for path, x in jax.tree_util.tree_flatten_with_path(shapes)[0]}
    if count < 1:
        raise ConfigError(f"the number of microbatches must be at least 1, got {count}")
    problems = [
        f"batch {path!r} is a scalar; every array must have rows as its first dim. Close over it in loss_fn, or repeat "
        "it for every row"
        for path in sizes
        if not sizes[path]
    ]
    if len(rows := {size[0] for size in sizes.values() if size}) > 1:
        each = "; ".join(f"{n} in {listed(repr(p) for p in sizes if sizes[p] == (n,))}" for n in sorted(rows))
        problems.append(
            f"the arrays of the batch have different numbers of rows, {sorted(rows)}; they must be equal: {each}. "
            "Close over an array without rows in loss_fn, such as class weights or a mask of positions, or repeat it "
            "for every row"
        )
    for path, size in sizes.items():
        if size and size[0] % count:
            problems.append(f"batch {path!r} has {size[0]} rows, not divisible into {count} microbatches")
    if problems:
        raise ConfigError(problems)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0] // count, *x.shape[1:]), x.dtype), shapes)


def microbatch_spec(shape: tuple[int, ...], mesh: Mesh | AbstractMesh, axes: PartitionAxis) -> PartitionSpec:
    """The spec of an array of a microbatch in a pipeline. The second dim of an array with two dims is the sequence.

    Rows are sharded if they are divisible: axes that do not divide a dim are dropped.
    """
    logical = ("batch", "sequence") if len(shape) == 2 else ("batch",)
    return fit_spec("batch", shape, spec_in_mesh(axes.resolve(logical), axes, mesh), mesh)[0]
