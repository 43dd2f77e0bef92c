"""Batches: the checks of their rows, and their placement on a mesh, as a whole and as equal microbatches."""

# JAX and Flax have no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false, reportMissingTypeArgument=false
# pyright: reportMissingTypeStubs=false

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from flax_mesh.axes import DEFAULT_AXES, PartitionAxis
from flax_mesh.errors import ConfigError
from flax_mesh.fields import check_types
from flax_mesh.mesh.context import current_mesh
from flax_mesh.modes import array_from
from flax_mesh.sharding.constrain import spec_in_mesh, with_sharding_constraint
from flax_mesh.sharding.rules import fit_spec
from flax_mesh.text import array_text, count_text, listed
from flax_mesh.tree import PyTree, array_problem, path_of


@dataclass(frozen=True, eq=False)
class ProcessRows:
    """The rows of a global batch that are on the devices of one process, from `process_rows`.

    Processes whose devices differ only in mesh axes that do not split the batch, such as tp, sp and pp, have the same
    rows.

    Attributes:
        index: The numbers of the rows in the global batch, ascending, (n,).
        shard: The number of this set of rows; processes with the same rows have the same number.
        num_shards: How many sets there are. All of them have n rows.
    """

    index: np.ndarray
    shard: int = 0
    num_shards: int = 1


def shapes_of(batch: PyTree) -> PyTree:
    """`batch` as ShapeDtypeStructs without shardings.

    Their dtypes are the dtypes on devices: int32 for int64, unless 64-bit types are enabled. ConfigError for leaves
    that are not arrays.
    """
    named = [(path_of(path), x) for path, x in jax.tree_util.tree_flatten_with_path(batch)[0]]
    if problems := [f"batch {path!r} {problem}" for path, x in named if (problem := array_problem(x))]:
        raise ConfigError(problems, repair="Close over other values in loss_fn, or leave them out of the batch.")
    dtype = jax.dtypes.canonicalize_dtype  # of random keys there is only one
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, dtype(x.dtype) if isinstance(x.dtype, np.dtype) else x.dtype), batch
    )


def microbatch_shapes(
    batch: PyTree, count: int, mesh: Mesh | AbstractMesh | None = None, axes: PartitionAxis = DEFAULT_AXES
) -> PyTree:
    """ShapeDtypeStructs of one of `count` equal microbatches. A scalar belongs to each of them.

    ConfigError if the batch cannot be divided into them, or the rows of one over the mesh axes of the batch.
    """
    shapes = shapes_of(batch)
    sizes = {path_of(path): x.shape[0] for path, x in jax.tree_util.tree_flatten_with_path(shapes)[0] if x.shape}
    if count < 1:
        raise ConfigError(f"the number of microbatches must be at least 1, got {count}")
    if len(rows := set(sizes.values())) > 1:
        each = "; ".join(f"{n} in {listed(repr(p) for p in sizes if sizes[p] == n)}" for n in sorted(rows))
        raise ConfigError(
            f"the arrays of the batch have different numbers of rows, {sorted(rows)}; they must be equal: {each}. "
            "Close over an array without rows in loss_fn, such as class weights or a mask of positions, or repeat it "
            "for every row"
        )
    if rows and (problems := rows_problems(rows.pop(), count, mesh, axes)):
        raise ConfigError(problems)
    return jax.tree.map(lambda x: x.update(shape=(x.shape[0] // count, *x.shape[1:])) if x.shape else x, shapes)


def microbatched_shape(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """(microbatch, row, ...) of an array (row, ...), (microbatch,) of a scalar."""
    return (count, shape[0] // count, *shape[1:]) if shape else (count,)


def rows_problems(
    rows: int,
    count: int,
    mesh: Mesh | AbstractMesh | None,
    axes: PartitionAxis,
    setting: str = "num_microbatches",
) -> list[str]:
    """One line if `rows` cannot be divided into `count` equal parts, each split over the mesh axes of the batch."""
    sizes = {} if mesh is None else {name: mesh.shape.get(name, 1) for name in axes.mesh_axes("batch")}
    ways = count * math.prod(sizes.values())
    if rows % ways == 0:
        return []
    over = " * ".join(f"{name}={size}" for name, size in (*sizes.items(), (setting, count)) if size > 1)
    repair = "use a multiple, or add rows whose weight in the loss is 0"
    return [f"the batch of {count_text(rows, 'row')} is not divisible by {ways} ({over}); {repair}"]


def microbatch_spec(shape: tuple[int, ...], mesh: Mesh | AbstractMesh, axes: PartitionAxis) -> PartitionSpec:
    """The spec of an array (row, ...) of a batch. The second dim of an array with two dims is the sequence.

    Axes that do not divide a dim are dropped; `microbatch_shapes` checks the rows.
    """
    logical = ("batch", "sequence") if len(shape) == 2 else ("batch",)
    return fit_spec("batch", shape, spec_in_mesh(axes.resolve(logical), axes, mesh), mesh)[0]


def batch_sharding(shape: tuple[int, ...], mesh: Mesh | AbstractMesh, axes: PartitionAxis) -> NamedSharding:
    return NamedSharding(mesh, microbatch_spec(shape, mesh, axes))


@check_types
def place_batch(
    batch: PyTree, mesh: Mesh, axes: PartitionAxis = DEFAULT_AXES, *, rows: ProcessRows | None = None
) -> PyTree:
    """Places a batch on the devices of `mesh`. Each device receives only its rows.

    A train step does this itself with arrays of NumPy. Call it for the next batch while the devices compute, such as in
    the thread of a loader. The arrays of NumPy are copied first: you may fill the same arrays again.

    Args:
        batch: A tree of arrays (row, ...) with equal numbers of rows. The second dim of an array with two dims is the
            sequence. Scalars are replicated. In a run of several processes every process passes the same NumPy arrays,
            the global batch, and transfers the rows of its devices.
        mesh: The mesh of the state.
        axes: Maps the logical axes "batch" and "sequence" to mesh axes.
        rows: The rows that `batch` has, from `process_rows`: every process passes its own rows only.

    Returns:
        The batch as arrays of JAX with the dtypes that devices have, int32 for int64.

    Raises:
        ConfigError: Numbers of rows differ or are not divisible by the mesh axes of the batch, a leaf is not an array
            of numbers, or int32 does not have an integer of the batch.

    Example:
        >>> from flax_mesh.train import place_batch
        >>> mesh = fm.create_mesh((2, 4), ("fsdp", "tp"))
        >>> x = place_batch({"x": np.ones((8, 16, 3))}, mesh)["x"]
        >>> x.addressable_shards[0].data.shape
        (4, 16, 3)
    """
    if rows is None:
        microbatch_shapes(batch, 1, mesh, axes)
    elif problems := _process_problems(batch, len(rows.index)):
        raise ConfigError(problems)
    batch = on_device_dtypes(batch, "batch")
    return jax.tree.map(
        lambda x: jax.device_put(x, batch_sharding(x.shape, mesh, axes)) if isinstance(x, jax.Array) else x,
        put_batch(batch, mesh, axes, rows),
    )


def _process_problems(batch: PyTree, num_rows: int) -> list[str]:
    """One line for every leaf that is not an array of NumPy with the rows of this process."""
    return [
        f"batch {path_of(path)!r} must be a NumPy array with the {num_rows} rows of this process, got {array_text(x)}"
        for path, x in jax.tree_util.tree_flatten_with_path(batch)[0]
        if not isinstance(x, np.ndarray) or (x.ndim and len(x) != num_rows)
    ]


def put_batch(batch: PyTree, mesh: Mesh, axes: PartitionAxis, rows: ProcessRows | None = None) -> PyTree:
    """The arrays of NumPy on the devices, which may use their memory; other leaves as they are.

    With `rows`, the arrays have these rows of the global batch.
    """

    def put(x: object) -> object:
        if not isinstance(x, np.ndarray):
            return x
        if rows is None or not x.ndim:
            return array_from(x.shape, batch_sharding(x.shape, mesh, axes), x.__getitem__, x.dtype)
        shape, numbers = (rows.num_shards * len(x), *x.shape[1:]), rows.index

        def read(index: tuple[slice, ...]) -> np.ndarray:
            first, last, _ = index[0].indices(shape[0])
            start = int(np.searchsorted(numbers, first))
            return x[(slice(start, start + last - first), *index[1:])]

        return array_from(shape, batch_sharding(shape, mesh, axes), read, x.dtype)

    return jax.tree.map(put, batch)


def on_device_dtypes(batch: PyTree, what: str) -> PyTree:
    """Copies of the arrays of NumPy with the dtypes that devices have, int32 for int64; other leaves as they are.

    ConfigError, about `what`, for arrays that JAX does not have, and for integers that int32 does not have.
    """

    named = jax.tree_util.tree_flatten_with_path(batch)[0]
    arrays = [(path_of(path), x) for path, x in named if isinstance(x, np.ndarray | np.generic)]
    if problems := [f"{what}: {path!r} {problem}" for path, x in arrays if (problem := array_problem(x))]:
        raise ConfigError(problems)

    def convert(path: KeyPath, x: object) -> object:
        if not isinstance(x, np.ndarray | np.generic):
            return x
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)
        if x.dtype.kind in "iu" and dtype != x.dtype and x.size:
            least, most, limits = int(x.min()), int(x.max()), np.iinfo(dtype)
            if least < limits.min or most > limits.max:
                raise ConfigError(
                    f"{what}: {path_of(path)!r} is {x.dtype} and must fit {dtype}, got values from {least} to {most}"
                )
        return np.array(x, dtype)

    return jax.tree_util.tree_map_with_path(convert, batch)


def split_over_mesh(batch: PyTree, axes: PartitionAxis) -> PyTree:
    """The traced batch with its rows, and its sequences, split over the mesh in context.

    The compiler passes the sharding on to the arguments of the program. Rows that are split over Explicit axes stay as
    they are.
    """
    mesh = current_mesh()

    def split(x: jax.Array) -> jax.Array:
        if mesh is None or (AxisType.Explicit in mesh.axis_types and any(jax.typeof(x).sharding.spec[:1])):
            return x
        return _constrained(x, microbatch_spec(x.shape, mesh, axes))

    return jax.tree.map(split, batch)


def split_into_microbatches(batch: PyTree, count: int, axes: PartitionAxis) -> PyTree:
    """The traced batch as arrays (microbatch, row, ...), whose rows are split over the mesh in context.

    Scalars are repeated. XLA exchanges rows between devices, each as many as it has; if neither `count` nor the number
    of devices of a batch divides the other one, it gathers the batch first.
    """
    mesh = current_mesh()

    def split(x: jax.Array) -> jax.Array:
        if not x.ndim:
            return jnp.broadcast_to(x, (count,))
        shape = microbatched_shape(x.shape, count)
        if mesh is None:
            return x.reshape(shape)
        if AxisType.Explicit in mesh.axis_types:
            spec = PartitionSpec(None, *jax.typeof(x).sharding.spec)
            return jnp.reshape(x, shape, out_sharding=fit_spec("batch", shape, spec, mesh)[0])
        return _constrained(x.reshape(shape), PartitionSpec(None, *microbatch_spec(shape[1:], mesh, axes)), fixed=1)

    return jax.tree.map(split, split_over_mesh(batch, axes))


def _constrained(x: jax.Array, spec: PartitionSpec, fixed: int = 0) -> jax.Array:
    """`x` with the constraint `spec` on its first `fixed` dims and on those that `spec` splits; others stay free."""
    entries = [*spec, *[None] * (x.ndim - len(spec))][: x.ndim]
    free = [entry or PartitionSpec.UNCONSTRAINED for entry in entries[fixed:]]
    return with_sharding_constraint(x, PartitionSpec(*entries[:fixed], *free))
