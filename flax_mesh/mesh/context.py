"""The current mesh, its axes and their sizes, and the index of a device inside `shard_map`.

JAX has two independent mesh contexts: `jax.set_mesh` (recommended) and the legacy `with mesh:`. The functions here use
the first if it is set, otherwise the second. Both are thread-local: a new thread starts without a mesh.
"""

# Users may pass other types than the annotated ones, which this file reports.
# pyright: reportUnnecessaryIsInstance=false

import contextlib
import math
from collections.abc import Generator, Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from flax_mesh.fields import check_types, require_types
from flax_mesh.jax_compat import legacy_mesh
from flax_mesh.text import shortened, shown

AnyMesh = Mesh | AbstractMesh


class NoMeshError(AssertionError):
    """No mesh is in context, but a mesh is required."""


def current_mesh() -> AnyMesh | None:
    """The mesh in context, or None.

    Outside a trace: the `Mesh` of `jax.set_mesh`, otherwise the `Mesh` of the legacy `with mesh:`. Inside jit,
    `shard_map` or `eval_shape` under `jax.set_mesh`: the `AbstractMesh` of the trace, because a trace has no devices;
    its axis types mark the axes that are Manual there. Under `jax.sharding.use_abstract_mesh`: that AbstractMesh.

    Example:
        >>> with jax.set_mesh(fm.create_mesh((2, 4), ("dp", "fsdp"))):
        ...     fm.current_mesh().axis_names
        ('dp', 'fsdp')
    """
    abstract = jax.sharding.get_abstract_mesh()
    if abstract.empty:
        return legacy_mesh()
    try:
        concrete = jax.sharding.get_mesh()
    except ValueError:  # inside a trace JAX provides only the abstract mesh
        return abstract
    return concrete if not concrete.empty and concrete.abstract_mesh == abstract else abstract


def get_incontext_mesh() -> AnyMesh:
    """As `current_mesh`, but raises NoMeshError (an AssertionError) if no mesh is in context.

    Example:
        >>> with jax.set_mesh(fm.create_mesh((2, 4), ("dp", "fsdp"))):
        ...     fm.get_incontext_mesh().size
        8
    """
    mesh = current_mesh()
    if mesh is None:
        raise NoMeshError(
            "No mesh is in context. Wrap this call in `with jax.set_mesh(mesh):`, or pass the mesh as an argument. "
            "Mesh contexts are thread-local: enter the mesh again in every thread that you start."
        )
    return mesh


def in_mesh(mesh: Mesh | AbstractMesh | None):
    """Context manager that sets the mesh of sharding constraints inside a trace; None keeps the current one."""
    # Inside a trace JAX allows only the abstract mesh to be set, which is enough for constraints.
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh if mesh is not None else jax.sharding.get_abstract_mesh())


@contextlib.contextmanager
def without_mesh() -> Generator[None]:
    """Context, or decorator, in which no mesh is set: all jitted programs would use the mesh of `jax.set_mesh`.

    A pipeline runs programs on the meshes of single groups, even if its caller has set the mesh of all groups.
    """
    if jax.sharding.get_abstract_mesh().empty:
        yield
        return
    with jax.set_mesh(Mesh(np.empty((), object), ())):
        yield


def names_in_current_mesh(*names: str) -> bool:
    """Whether the mesh in context has all these axes. Without a mesh: False, unless `names` is empty.

    Example:
        >>> with jax.set_mesh(fm.create_mesh((2, 4), ("dp", "fsdp"))):
        ...     fm.names_in_current_mesh("dp"), fm.names_in_current_mesh("dp", "tp")
        (True, False)
    """
    mesh = current_mesh()
    return set(names) <= set(() if mesh is None else mesh.axis_names)


@check_types
def get_mesh_axis_names(mesh: AnyMesh | None = None) -> list[str]:
    """Axis names of `mesh` (default: the mesh in context), in mesh order.

    Example:
        >>> fm.get_mesh_axis_names(fm.create_mesh((2, 4), ("dp", "fsdp")))
        ['dp', 'fsdp']
    """
    return list((get_incontext_mesh() if mesh is None else mesh).axis_names)


def get_axes_size_in_mesh(axis_names: str | Sequence[str], mesh: AnyMesh | None = None) -> int:
    """Number of devices along one axis, or along several axes together, of `mesh` (default: the mesh in context).

    Raises a KeyError that lists every axis that the mesh does not have, and a TypeError if `axis_names` is not a string
    or a sequence of strings.

    >>> get_axes_size_in_mesh(("dp", "tp"), jax.make_mesh((2, 4), ("dp", "tp")))
    8
    """
    require_types(get_axes_size_in_mesh, mesh=mesh)
    names = _as_names(axis_names)
    shape = (get_incontext_mesh() if mesh is None else mesh).shape
    unknown = [name for name in names if name not in shape]
    if unknown:
        raise KeyError(f"No axis {shortened(', '.join(map(repr, unknown)))} in the mesh; its axes are {dict(shape)}.")
    return math.prod(shape[name] for name in names)


def get_mesh_axis_size(axis_names: str | Sequence[str]) -> int:
    """As `get_axes_size_in_mesh`, but axes that are mapped (by `shard_map` or `vmap(axis_name=)`) take precedence.

    Always returns a Python int, so that it can be used in shapes; 1 for no axis.

    Example:
        >>> with jax.set_mesh(fm.create_mesh((2, 4), ("dp", "fsdp"))):
        ...     fm.get_mesh_axis_size(("dp", "fsdp"))
        8
    """
    sizes: list[int] = []
    for name in _as_names(axis_names):
        try:
            sizes.append(int(jax.lax.axis_size(name)))
        except NameError:  # not a mapped axis: look it up in the mesh, which raises if it is unknown there too
            sizes.append(get_axes_size_in_mesh(name))
    return math.prod(sizes)


def get_submesh_device_index(axis_names: str | Sequence[str]) -> jax.Array | int:
    """Index of this device along `axis_names`, of which the first is the most significant. 0 without axes.

    The value differs per device, so it is defined only if the axes are mapped: inside `shard_map` it is a traced int32
    scalar. Raises a ValueError elsewhere.

    Example:
        >>> index = lambda: fm.get_submesh_device_index("dp")[None]
        >>> mesh = fm.create_mesh((8,), ("dp",))
        >>> jax.shard_map(index, mesh=mesh, in_specs=(), out_specs=jax.P("dp"))().tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    index = 0
    for name in (names := _as_names(axis_names)):
        try:
            index = index * jax.lax.axis_size(name) + jax.lax.axis_index(name)
        except NameError:
            raise ValueError(
                f"Axis {name!r} is not mapped here, so a device has no index along it. Call this inside "
                f"jax.shard_map(..., axis_names={{{', '.join(map(repr, names))}}})."
            ) from None
    return index


def _as_names(axis_names: str | Sequence[str]) -> tuple[str, ...]:
    names = (axis_names,) if isinstance(axis_names, str) else axis_names
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"axis_names must be a string or a list or tuple of strings, got {shown(axis_names)}.")
    return tuple(names)
