"""MpmdArray: an array on some groups of devices, which a process that has none of them knows by shape alone."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from flax_mesh.mpmd.mesh import MpmdMesh, current_mpmd_mesh
from flax_mesh.text import array_text


@dataclass(frozen=True, eq=False, repr=False)
class MpmdArray:
    """An array laid out by `sharding`, whose devices are those of some groups, maybe none of this process.

    Every process holds one for the same array. `value` is this process's part, a jax.Array of the global shape, which
    may still be computing or on its way; it is None exactly where the process has no device of the sharding: there
    the array is fully remote. ValueError where this does not hold, or `value` has another shape, dtype or layout.

    `mpmd_mesh` gives the groups their numbers, in `groups`; by default the one in context, where it has the devices.
    Two are equal only if they are the same object. It is a leaf of JAX's trees.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding
    value: jax.Array | None = None
    mpmd_mesh: MpmdMesh | None = None
    weak_type: bool = False  # as of a jax.Array: made of Python numbers, so that sums keep the other's dtype

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if not isinstance(self.dtype, np.dtype) and not jnp.issubdtype(self.dtype, jax.dtypes.extended):
            object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        if self.mpmd_mesh is None:
            object.__setattr__(self, "mpmd_mesh", find_mpmd_mesh(self.sharding, current_mpmd_mesh()))
        elif not find_mpmd_mesh(self.sharding, self.mpmd_mesh):
            strangers = sorted(map(str, self.sharding.device_set - set(self.mpmd_mesh.device_coords)))
            raise ValueError(
                f"The sharding has devices that are not in {self.mpmd_mesh!r}: {', '.join(strangers)}. "
                "Use a sharding over a mesh of its groups, mpmd_mesh.unstack[i] or mpmd_mesh.mpmd_submesh([...])."
            )
        _check_value(self)

    def __repr__(self) -> str:
        layout = self.sharding.spec if isinstance(self.sharding, NamedSharding) else self.sharding
        groups = "" if self.mpmd_mesh is None else f", groups={self.groups}"
        return f"MpmdArray({array_text(self)}, {layout}{groups}{', remote' if self.is_fully_remote else ''})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        # Without this numpy would make an array of dtype object of it, and say nothing.
        return np.asarray(self.jax_array, dtype=dtype, copy=copy)

    @property
    def groups(self) -> tuple[int, ...]:
        """Indices of the groups that it lives on. ValueError where no `mpmd_mesh` numbers them."""
        if self.mpmd_mesh is None:
            raise ValueError(
                "No MpmdMesh numbers the groups of this array. Make it under `with mpmd_mesh:`, where the mesh has its "
                "devices, or pass mpmd_mesh=."
            )
        return _groups(self.sharding, self.mpmd_mesh)

    @property
    def is_fully_remote(self) -> bool:
        """Whether this process has no device of it."""
        return self.value is None

    @property
    def jax_array(self) -> jax.Array:
        """This process's part. ValueError where it is fully remote."""
        if self.value is None:
            raise ValueError(
                f"{self!r} is fully remote: process {_this_process(self.sharding)} has none of its devices, which "
                f"belong to process {_processes(self.sharding)}. Read it there, or bring it to a group of this process "
                "with mpmd.device_put."
            )
        return self.value

    def block_until_ready(self) -> "MpmdArray":
        """Itself, once this process's part is computed or has arrived; at once where it has none."""
        if self.value is not None:
            self.value.block_until_ready()
        return self


def is_local_device(device: Any) -> bool:
    """Whether the device belongs to this process."""
    return device.process_index == device.client.process_index()


def is_fully_remote_sharding(sharding: Sharding) -> bool:
    """Whether none of its devices belongs to this process."""
    return not sharding.addressable_devices


def is_fully_local_sharding(sharding: Sharding) -> bool:
    """Whether all its devices belong to this process."""
    return sharding.is_fully_addressable


def is_fully_remote_array(array: jax.Array | MpmdArray) -> bool:
    """Whether this process has no device of the array."""
    return array.is_fully_remote if isinstance(array, MpmdArray) else is_fully_remote_sharding(array.sharding)


def as_jax_array(array: Any) -> jax.Array:
    """This process's part of an MpmdArray, ValueError where it has none; what else JAX takes for an array, as one."""
    return array.jax_array if isinstance(array, MpmdArray) else jnp.asarray(array)


def is_weakly_typed(array: Any) -> bool:
    """Whether an array or shape of JAX stems from Python numbers; arrays of random keys cannot."""
    return getattr(array, "weak_type", False)


def find_mpmd_mesh(sharding: Sharding, *candidates: MpmdMesh | None) -> MpmdMesh | None:
    """The first of `candidates` that has all devices of `sharding`, or None."""
    found = (mesh for mesh in candidates if mesh is not None and _groups(sharding, mesh) is not None)
    return next(found, None)


@lru_cache(maxsize=4096)
def _groups(sharding: Sharding, mpmd_mesh: MpmdMesh) -> Any:
    """Indices of the groups, or None where a device is in none."""
    groups = {mpmd_mesh.device_mpmd_idx.get(device) for device in sharding.device_set}
    return None if None in groups else tuple(sorted(groups))  # pyright: ignore[reportArgumentType]


def _check_value(array: MpmdArray) -> None:
    value, sharding = array.value, array.sharding
    if (value is None) != is_fully_remote_sharding(sharding):
        has = "no device of it, so value must be None" if value is not None else "devices of it, so value must be given"
        raise ValueError(f"Process {_this_process(sharding)} has {has}; the sharding is {sharding}.")
    if value is None:
        return
    facts = [
        ("shape", value.shape, array.shape),
        ("dtype", value.dtype, array.dtype),
        ("weak_type", is_weakly_typed(value), array.weak_type),
    ]
    found = [f"{name} is {theirs}, not {ours}" for name, theirs, ours in facts if theirs != ours]
    if not found and not value.sharding.is_equivalent_to(sharding, value.ndim):
        found = [f"sharding is {value.sharding}, not {sharding}"]
    if found:
        raise ValueError(f"value must have the shape, dtype and layout of the array, but its {'; its '.join(found)}.")


def _this_process(sharding: Sharding) -> int:
    return next(iter(sharding.device_set)).client.process_index()


def _processes(sharding: Sharding) -> str:
    return ", ".join(map(str, sorted({device.process_index for device in sharding.device_set})))
