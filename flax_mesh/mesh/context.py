"""The mesh in context: which one it is, its axes and their sizes, and where a device stands inside `shard_map`.

JAX keeps two mesh contexts that do not see each other: `jax.set_mesh` (the one to use) and the legacy `with mesh:`.
Everything here sees both, the first before the second. Both belong to a thread: a new thread starts without a mesh.
"""

import math
from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, Mesh

from flax_mesh.jax_compat import legacy_mesh

AnyMesh = Mesh | AbstractMesh


class NoMeshError(AssertionError):
    """No mesh is in context where one is needed."""


def current_mesh() -> AnyMesh | None:
    """The mesh in context, or None.

    Outside a trace: the `Mesh` of `jax.set_mesh`, else that of the legacy `with mesh:`. Inside jit, `shard_map` or
    `eval_shape`, under `jax.set_mesh`: the `AbstractMesh` of the trace, whose axis types show what is Manual there;
    a trace holds no devices. Under `jax.sharding.use_abstract_mesh`: that AbstractMesh.
    """
    abstract = jax.sharding.get_abstract_mesh()
    if abstract.empty:
        return legacy_mesh()
    try:
        concrete = jax.sharding.get_mesh()
    except ValueError:  # inside a trace JAX hands out the abstract mesh alone
        return abstract
    return concrete if not concrete.empty and concrete.abstract_mesh == abstract else abstract


def get_incontext_mesh() -> AnyMesh:
    """As `current_mesh`; NoMeshError, an AssertionError, where there is none."""
    mesh = current_mesh()
    if mesh is None:
        raise NoMeshError(
            "No mesh is in context. Enter one around this call, `with jax.set_mesh(mesh):`, or pass the mesh itself. "
            "Mesh contexts belong to a thread: a thread that you start must enter the mesh again."
        )
    return mesh


def names_in_current_mesh(*names: str) -> bool:
    """Whether the mesh in context has all these axes; False without a mesh, unless no name is asked for."""
    mesh = current_mesh()
    return set(names) <= set(() if mesh is None else mesh.axis_names)


def get_mesh_axis_names(mesh: AnyMesh | None = None) -> list[str]:
    """Axis names in mesh order, of `mesh` or of the mesh in context."""
    return list((get_incontext_mesh() if mesh is None else mesh).axis_names)


def get_axes_size_in_mesh(axis_names: str | Sequence[str], mesh: AnyMesh | None = None) -> int:
    """Number of devices along one axis, or along several together, of `mesh` or of the mesh in context.

    KeyError names every axis that the mesh does not have; TypeError where `axis_names` is no string or list of them.

    >>> get_axes_size_in_mesh(("dp", "tp"), mesh)  # dp:2,tp:4
    8
    """
    names = _as_names(axis_names)
    shape = (get_incontext_mesh() if mesh is None else mesh).shape
    unknown = [name for name in names if name not in shape]
    if unknown:
        raise KeyError(f"No axis {', '.join(map(repr, unknown))} in the mesh; its axes are {dict(shape)}.")
    return math.prod(shape[name] for name in names)


def get_mesh_axis_size(axis_names: str | Sequence[str]) -> int:
    """As `get_axes_size_in_mesh`, first of the axes that are mapped here: inside `shard_map` or `vmap(axis_name=)`.

    A Python int in every case, so that shapes can be made of it; 1 for no axis.
    """
    sizes = []
    for name in _as_names(axis_names):
        try:
            sizes.append(int(jax.lax.axis_size(name)))
        except NameError:  # not a mapped axis: the mesh in context knows it, or nobody does
            sizes.append(get_axes_size_in_mesh(name))
    return math.prod(sizes)


def get_submesh_device_index(axis_names: str | Sequence[str]) -> jax.Array | int:
    """Index of this device among those along `axis_names`, the first name being the most significant. 0 for no axis.

    It is a value per device, so it exists only where the axes are mapped: a traced int32 scalar inside `shard_map`.
    ValueError elsewhere.
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
        raise TypeError(f"axis_names must be a string or a list or tuple of strings, got {axis_names!r}.")
    return tuple(names)
