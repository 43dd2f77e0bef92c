"""MpmdArray: an array on the devices of some groups. Processes without these devices only have its shape."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.typing import DTypeLike

from flax_mesh.mpmd.mesh import MpmdMesh, current_mpmd_mesh
from flax_mesh.text import array_text, processes_text


@dataclass(frozen=True, eq=False, repr=False)
class MpmdArray:
    """An array with layout `sharding` on the devices of some groups, possibly none of them in this process.

    Every process has an MpmdArray for the same array. `value` is the part in this process: a jax.Array with the global
    shape, possibly still being computed or transferred. In a process without devices of the sharding, the array is
    fully remote and `value` is None. ValueError if `value` contradicts this, or differs in shape, dtype or layout.

    `mpmd_mesh` defines the indices in `groups`. It defaults to the mesh in context, if that contains the devices.
    Arrays are compared by identity. An MpmdArray is a leaf of a pytree.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding
    value: jax.Array | None = None
    mpmd_mesh: MpmdMesh | None = None
    weak_type: bool = False  # as in jax.Array: from a Python scalar, takes the dtype of the other operand

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if not isinstance(self.dtype, np.dtype) and not jnp.issubdtype(self.dtype, jax.dtypes.extended):
            object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        if self.mpmd_mesh is None:
            object.__setattr__(self, "mpmd_mesh", find_mpmd_mesh(self.sharding, current_mpmd_mesh()))
        elif not find_mpmd_mesh(self.sharding, self.mpmd_mesh):
            foreign = sorted(map(str, self.sharding.device_set - set(self.mpmd_mesh.device_coords)))
            raise ValueError(
                f"The sharding has devices that are not in {self.mpmd_mesh!r}: {', '.join(foreign)}. "
                "Use a sharding over a mesh of its groups, mpmd_mesh.unstack[i] or mpmd_mesh.mpmd_submesh([...])."
            )
        _check_value(self)

    def __repr__(self) -> str:
        layout = self.sharding.spec if isinstance(self.sharding, NamedSharding) else self.sharding
        groups = "" if self.mpmd_mesh is None else f", groups={self.groups}"
        return f"MpmdArray({array_text(self)}, {layout}{groups}{', remote' if self.is_fully_remote else ''})"

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        # Without this method, numpy would silently create an array of dtype object.
        return np.asarray(self.jax_array, dtype=dtype, copy=copy)

    @property
    def groups(self) -> tuple[int, ...]:
        """Indices of the groups on which the array is placed. Raises ValueError without an `mpmd_mesh`."""
        if self.mpmd_mesh is None:
            raise ValueError(
                "This array has no MpmdMesh, which defines the indices of groups. Create it inside `with mpmd_mesh:` "
                "for a mesh with its devices, or pass mpmd_mesh=."
            )
        groups = _groups(self.sharding, self.mpmd_mesh)
        assert groups is not None  # the mesh has all devices of the sharding
        return groups

    @property
    def is_fully_remote(self) -> bool:
        """Whether this process has none of the array's devices."""
        return self.value is None

    @property
    def jax_array(self) -> jax.Array:
        """The local part. Raises ValueError if the array is fully remote."""
        if self.value is None:
            raise ValueError(
                f"{self!r} is fully remote: process {_this_process(self.sharding)} has none of its devices, which "
                f"belong to {_owners(self.sharding)}. Read it there, or transfer it to a group of this "
                "process with mpmd.device_put."
            )
        return self.value

    def block_until_ready(self) -> "MpmdArray":
        """Wait until the local part is available, and return self. Returns immediately if the array is fully remote."""
        if self.value is not None:
            self.value.block_until_ready()
        return self


def is_local_device(device: Any) -> bool:
    """Whether the device belongs to this process.

    Example:
        >>> from flax_mesh import mpmd
        >>> mpmd.is_local_device(jax.devices()[0])
        True
    """
    return device.process_index == device.client.process_index()


def is_fully_remote_sharding(sharding: Sharding) -> bool:
    """Whether none of the devices of the sharding belongs to this process.

    Example:
        >>> from flax_mesh import mpmd
        >>> mpmd.is_fully_remote_sharding(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
        False
    """
    return not sharding.addressable_devices


def is_fully_local_sharding(sharding: Sharding) -> bool:
    """Whether all devices of the sharding belong to this process.

    Example:
        >>> from flax_mesh import mpmd
        >>> mpmd.is_fully_local_sharding(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
        True
    """
    return sharding.is_fully_addressable


def is_fully_remote_array(array: jax.Array | MpmdArray) -> bool:
    """Whether this process has none of the devices of the array.

    Example:
        >>> from flax_mesh import mpmd
        >>> mpmd.is_fully_remote_array(jnp.ones(4))
        False
    """
    return array.is_fully_remote if isinstance(array, MpmdArray) else is_fully_remote_sharding(array.sharding)


def as_jax_array(array: Any) -> jax.Array:
    """The local part of an MpmdArray (ValueError if fully remote), or any other array-like as a jax.Array.

    Example:
        >>> from flax_mesh import mpmd
        >>> here = jax.sharding.SingleDeviceSharding(jax.devices()[3])
        >>> mpmd.as_jax_array(mpmd.device_put(np.arange(3), here)).tolist()
        [0, 1, 2]
    """
    return array.jax_array if isinstance(array, MpmdArray) else jnp.asarray(array)


def is_weakly_typed(array: object) -> bool:
    """Whether an array or ShapeDtypeStruct is weakly typed. Arrays of random keys never are."""
    return getattr(array, "weak_type", False)


def find_mpmd_mesh(sharding: Sharding, *candidates: MpmdMesh | None) -> MpmdMesh | None:
    """The first of `candidates` that contains all devices of `sharding`, or None."""
    matching = (mesh for mesh in candidates if mesh is not None and _groups(sharding, mesh) is not None)
    return next(matching, None)


@lru_cache(maxsize=4096)
def _groups(sharding: Sharding, mpmd_mesh: MpmdMesh) -> tuple[int, ...] | None:
    """Indices of the groups of `sharding`, or None if one of its devices is not in the mesh."""
    groups = {mpmd_mesh.device_mpmd_idx.get(device) for device in sharding.device_set}
    return None if None in groups else tuple(sorted(groups))  # pyright: ignore[reportArgumentType]


def _check_value(array: MpmdArray) -> None:
    value, sharding = array.value, array.sharding
    if (value is None) != is_fully_remote_sharding(sharding):
        needs_none = "no device of the sharding, so value must be None"
        has = needs_none if value is not None else "devices of the sharding, so value must not be None"
        raise ValueError(f"Process {_this_process(sharding)} has {has}; got {sharding}.")
    if value is None:
        return
    properties = [
        ("shape", value.shape, array.shape),
        ("dtype", value.dtype, array.dtype),
        ("weak_type", is_weakly_typed(value), array.weak_type),
    ]
    differences = [f"{name} is {actual}, not {expected}" for name, actual, expected in properties if actual != expected]
    if not differences and not value.sharding.is_equivalent_to(sharding, value.ndim):
        differences = [f"sharding is {value.sharding}, not {sharding}"]
    if differences:
        raise ValueError(
            f"value must have the shape, dtype and layout of the array, but its {'; its '.join(differences)}."
        )


def _this_process(sharding: Sharding) -> int:
    return next(iter(sharding.device_set)).client.process_index()


def _owners(sharding: Sharding) -> str:
    return processes_text(device.process_index for device in sharding.device_set)
