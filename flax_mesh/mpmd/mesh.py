"""MpmdMesh: a mesh split along one axis into groups of devices, each with separate programs."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import SupportsIndex

import numpy as np
from jax.sharding import Mesh

from flax_mesh.mesh.shape import format_mesh_shape
from flax_mesh.mesh.torus.torus import DeviceLike
from flax_mesh.text import listed, shown

# One stack per thread: a new thread starts with an empty stack, just as it starts without the mesh of `jax.set_mesh`.
_entered: ContextVar[tuple["MpmdMesh", ...]] = ContextVar("entered_mpmd_meshes", default=())


@dataclass(frozen=True, repr=False)
class MpmdMesh:
    """A mesh split into groups along one axis: group i is the submesh at index i of axis `mpmd_axis_name`.

    Different groups run different programs (multiple program, multiple data); in a pipeline, a group is the submesh of
    one pipeline rank. Submeshes keep all axes and axis types of `jax_mesh`, and only the MPMD axis becomes smaller, so
    the same PartitionSpec is valid on every group. A process must own one or more entire groups, or share exactly one
    group with other processes.

    Equal arguments produce meshes that compare and hash equal. `with mpmd_mesh:` makes the mesh the one that
    `current_mpmd_mesh` returns in this thread; it does not change the mesh set by `jax.set_mesh`.

    Args:
        jax_mesh: A mesh with concrete devices. It may span several processes.
        mpmd_axis_name: The axis of `jax_mesh` to split along. Its size is the number of groups.

    Raises:
        ValueError: If `jax_mesh` is not a `jax.sharding.Mesh`, if it has no axis `mpmd_axis_name`, or if a process owns
            only part of a group that it shares and also has devices in another group.

    Example:
        >>> from flax_mesh.mpmd import MpmdMesh
        >>> groups = MpmdMesh(fm.create_mesh((2, 4), ("pp", "fsdp")), "pp")
        >>> groups
        MpmdMesh(pp:2,fsdp:4, groups along pp)
        >>> [dict(mesh.shape) for mesh in groups.unstack]
        [{'pp': 1, 'fsdp': 4}, {'pp': 1, 'fsdp': 4}]
        >>> x = jax.device_put(np.zeros((8, 2)), jax.NamedSharding(groups.unstack[1], jax.P("fsdp")))
        >>> sorted(device.id for device in x.devices())
        [4, 5, 6, 7]
    """

    jax_mesh: Mesh
    mpmd_axis_name: str

    def __post_init__(self) -> None:
        if not isinstance(self.jax_mesh, Mesh):
            received = shown(self.jax_mesh)
            raise ValueError(f"jax_mesh must be a jax.sharding.Mesh, which has devices; got {received}.")
        names = self.jax_mesh.axis_names
        if not isinstance(self.mpmd_axis_name, str) or self.mpmd_axis_name not in names:
            axes, name = format_mesh_shape(names, self.jax_mesh.axis_sizes), shown(self.mpmd_axis_name)
            raise ValueError(
                f"mpmd_axis_name {name} is not an axis of the mesh {axes}. Use one of its axes, or "
                f"add one: create_mesh((num_groups, ...), ({name}, ...))."
            )
        _groups_of_processes([mesh.devices.flat for mesh in self.unstack])

    def __repr__(self) -> str:
        axes = format_mesh_shape(self.jax_mesh.axis_names, self.jax_mesh.axis_sizes)
        return f"MpmdMesh({axes}, groups along {self.mpmd_axis_name})"

    def __enter__(self) -> "MpmdMesh":
        _entered.set((*_entered.get(), self))
        return self

    def __exit__(self, *exception: object) -> None:
        _entered.set(_entered.get()[:-1])

    @cached_property
    def mpmd_axis(self) -> int:
        """Position of the MPMD axis in the axis names of the mesh."""
        return self.jax_mesh.axis_names.index(self.mpmd_axis_name)

    @property
    def mpmd_dim(self) -> int:
        """Number of groups."""
        return self.jax_mesh.shape[self.mpmd_axis_name]

    @cached_property
    def device_coords(self) -> Mapping[object, tuple[int, ...]]:
        """Coordinates of every device in the mesh, one index per axis."""
        return MappingProxyType({device: coords for coords, device in np.ndenumerate(self.jax_mesh.devices)})

    @cached_property
    def device_mpmd_idx(self) -> Mapping[object, int]:
        """Group index of every device."""
        return MappingProxyType({device: coords[self.mpmd_axis] for device, coords in self.device_coords.items()})

    @cached_property
    def _groups(self) -> tuple[Mesh, ...]:
        return tuple(self._take((index,)) for index in range(self.mpmd_dim))

    @property
    def unstack(self) -> list[Mesh]:
        """The submesh of every group, in order. The MPMD axis has size 1 in each."""
        return list(self._groups)

    def mpmd_submesh(self, indices: Sequence[SupportsIndex]) -> "MpmdMesh":
        """An MpmdMesh of the groups at `indices`, in that order. Raises ValueError for invalid or repeated indices."""
        if not isinstance(indices, list | tuple) or not all(hasattr(index, "__index__") for index in indices):
            raise ValueError(f"indices must be a list or tuple of integers, got {indices!r}.")
        chosen = tuple(map(operator.index, indices))
        if not chosen:
            last = self.mpmd_dim - 1
            raise ValueError(
                f"indices is empty, but a mesh needs devices. Select at least one of the groups 0..{last}."
            )
        outside = sorted({index for index in chosen if not 0 <= index < self.mpmd_dim})
        repeated = sorted({index for index in chosen if chosen.count(index) > 1})
        if outside or repeated:
            problems = [f"{listed(outside)} not in 0..{self.mpmd_dim - 1}"] if outside else []
            problems += [f"{listed(repeated)} more than once"] if repeated else []
            raise ValueError(f"indices {chosen} must be distinct groups of {self!r}; found {' and '.join(problems)}.")
        return MpmdMesh(self._take(chosen), self.mpmd_axis_name)

    @cached_property
    def my_mpmd_axis_indices(self) -> tuple[int, ...]:
        """The groups in which this process has devices, in order. A single process has all groups."""
        return tuple(sorted({self.device_mpmd_idx[device] for device in self.jax_mesh.local_devices}))

    @cached_property
    def representative_groups(self) -> tuple[int, ...]:
        """The representative groups, the first group of each process: an array sent to them reaches every process."""
        owned = _groups_of_processes([mesh.devices.flat for mesh in self._groups])
        return tuple(sorted({groups[0] for groups in owned.values()}))

    @property
    def my_mpmd_axis_index(self) -> int:
        """The only group of this process. Raises ValueError in a single-process run, or for no or several groups."""
        indices = self.my_mpmd_axis_indices
        if not self.jax_mesh.is_multi_process:
            raise ValueError(
                f"my_mpmd_axis_index requires several processes, but this process owns all groups of {self!r}. "
                "Use unstack[i] for group i; my_mpmd_axis_indices lists all groups."
            )
        if len(indices) != 1:
            owned = f"the groups {listed(indices)}" if indices else "no device"
            raise ValueError(
                f"my_mpmd_axis_index requires exactly one group, but this process has {owned} of {self!r}. "
                f"Use my_mpmd_axis_indices, here {indices}."
            )
        return indices[0]

    def _take(self, indices: tuple[int, ...]) -> Mesh:
        devices = np.take(self.jax_mesh.devices, indices, axis=self.mpmd_axis)
        return Mesh(devices, self.jax_mesh.axis_names, axis_types=self.jax_mesh.axis_types)


def current_mpmd_mesh() -> MpmdMesh | None:
    """The innermost `with mpmd_mesh:` of this thread, or None."""
    entered = _entered.get()
    return entered[-1] if entered else None


def _groups_of_processes(groups: Sequence[Iterable[DeviceLike]]) -> dict[int, tuple[int, ...]]:
    """The groups in which each process has devices, by process index.

    `groups` contains the devices of each group; only their `process_index` is read. Raises ValueError that names every
    process that shares a group with another process and also has devices in a different group.
    """
    owned: dict[int, dict[int, list[object]]] = {}  # process -> group -> devices
    sharers: list[set[int]] = []  # processes that have devices in each group
    for index, devices in enumerate(groups):
        sharers.append(set())
        for device in devices:
            owned.setdefault(device.process_index, {}).setdefault(index, []).append(device)
            sharers[-1].add(device.process_index)
    wrong = {
        process: parts
        for process, parts in sorted(owned.items())
        if len(parts) > 1 and any(len(sharers[index]) > 1 for index in parts)
    }
    if wrong:
        lines = [
            f"process {process} has "
            + ", ".join(
                f"{listed(devices)} of group {index}"
                + (f", which processes {listed(sorted(sharers[index]))} share" if len(sharers[index]) > 1 else "")
                for index, devices in parts.items()
            )
            for process, parts in wrong.items()
        ]
        raise ValueError(
            "A process must own one or more entire groups, or share exactly one group with other processes; but "
            + "; ".join(lines)
            + ". Choose axis sizes so that a group consists of entire processes, or a process of entire groups."
        )
    return {process: tuple(parts) for process, parts in sorted(owned.items())}
