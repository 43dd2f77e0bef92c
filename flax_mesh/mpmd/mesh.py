"""MpmdMesh: a mesh cut along one axis into groups of devices, each of which runs programs of its own."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, SupportsIndex

import numpy as np
from jax.sharding import Mesh

from flax_mesh.mesh.shape import format_mesh_shape
from flax_mesh.text import listed

# One stack per thread: a new thread starts with an empty one, as it starts without a mesh of `jax.set_mesh`.
_entered: ContextVar[tuple["MpmdMesh", ...]] = ContextVar("entered_mpmd_meshes", default=())


@dataclass(frozen=True, repr=False)
class MpmdMesh:
    """`jax_mesh` as a row of groups: group i is the sub-mesh at index i of axis `mpmd_axis_name`.

    Every derived mesh keeps all axes and their types, the MPMD axis with its smaller size, so that one PartitionSpec
    serves all groups. Equal arguments make equal meshes with equal hashes.

    A process owns one or more whole groups, or shares one group with other processes; ValueError names every process
    that does neither. ValueError too where the axis is not one of the mesh.

    `with mpmd_mesh:` makes it the one that `current_mpmd_mesh` gives in this thread; it enters no mesh of JAX.

    >>> groups = MpmdMesh(create_mesh((2, 4), ("pp", "fsdp")), "pp")
    >>> [dict(mesh.shape) for mesh in groups.unstack]
    [{'pp': 1, 'fsdp': 4}, {'pp': 1, 'fsdp': 4}]
    """

    jax_mesh: Mesh
    mpmd_axis_name: str

    def __post_init__(self) -> None:
        if not isinstance(self.jax_mesh, Mesh):
            raise ValueError(f"jax_mesh must be a jax.sharding.Mesh, which holds devices; got {self.jax_mesh!r}.")
        names = self.jax_mesh.axis_names
        if self.mpmd_axis_name not in names:
            axes = format_mesh_shape(names, self.jax_mesh.axis_sizes)
            raise ValueError(
                f"mpmd_axis_name {self.mpmd_axis_name!r} is no axis of the mesh {axes}. Name one of its axes, or add "
                f"one: create_mesh((num_groups, ...), ({self.mpmd_axis_name!r}, ...))."
            )
        groups_of_processes([mesh.devices.flat for mesh in self.unstack])

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
        """Index of the MPMD axis among the axes of the mesh."""
        return self.jax_mesh.axis_names.index(self.mpmd_axis_name)

    @property
    def mpmd_dim(self) -> int:
        """Number of groups."""
        return self.jax_mesh.shape[self.mpmd_axis_name]

    @cached_property
    def device_coords(self) -> Mapping[Any, tuple[int, ...]]:
        """Every device to its index along each axis."""
        return MappingProxyType({device: coords for coords, device in np.ndenumerate(self.jax_mesh.devices)})

    @cached_property
    def device_mpmd_idx(self) -> Mapping[Any, int]:
        """Every device to its group."""
        return MappingProxyType({device: coords[self.mpmd_axis] for device, coords in self.device_coords.items()})

    @cached_property
    def _groups(self) -> tuple[Mesh, ...]:
        return tuple(self._take((index,)) for index in range(self.mpmd_dim))

    @property
    def unstack(self) -> list[Mesh]:
        """The groups in order, each a Mesh in which the MPMD axis has size 1."""
        return list(self._groups)

    @cached_property
    def mpmd_idx_for_mesh(self) -> Mapping[Mesh, int]:
        """Every mesh of `unstack` to its group."""
        return MappingProxyType({mesh: index for index, mesh in enumerate(self._groups)})

    def mpmd_submesh(self, indices: Sequence[SupportsIndex]) -> "MpmdMesh":
        """The groups at `indices`, in that order, as an MpmdMesh. ValueError unless they exist and differ."""
        if not isinstance(indices, list | tuple) or not all(hasattr(index, "__index__") for index in indices):
            raise ValueError(f"indices must be a list or tuple of integers, got {indices!r}.")
        chosen = tuple(map(operator.index, indices))
        if not chosen:
            last = self.mpmd_dim - 1
            raise ValueError(f"indices is empty, but a mesh has devices. Name some of the groups 0..{last}.")
        outside = sorted({index for index in chosen if not 0 <= index < self.mpmd_dim})
        twice = sorted({index for index in chosen if chosen.count(index) > 1})
        if outside or twice:
            problems = [f"{listed(outside)} not in 0..{self.mpmd_dim - 1}"] if outside else []
            problems += [f"{listed(twice)} more than once"] if twice else []
            raise ValueError(f"indices {chosen} must be groups of {self!r}, each once; found {' and '.join(problems)}.")
        return MpmdMesh(self._take(chosen), self.mpmd_axis_name)

    @cached_property
    def my_mpmd_axis_indices(self) -> tuple[int, ...]:
        """The groups in which this process has devices, in order; all of them in one process."""
        return tuple(sorted({self.device_mpmd_idx[device] for device in self.jax_mesh.local_devices}))

    @cached_property
    def speakers(self) -> tuple[int, ...]:
        """The first group of every process, each once: what is brought to these reaches every process."""
        held = groups_of_processes([mesh.devices.flat for mesh in self._groups])
        return tuple(sorted({groups[0] for groups in held.values()}))

    @property
    def my_mpmd_axis_index(self) -> int:
        """The one group of this process. ValueError in one process, and where it has no group or several."""
        indices = self.my_mpmd_axis_indices
        if not self.jax_mesh.is_multi_process:
            raise ValueError(
                f"All groups of {self!r} belong to this one process, so none is its own. "
                "Use unstack[i] for group i; my_mpmd_axis_indices lists all."
            )
        if len(indices) != 1:
            owned = f"the groups {listed(indices)}" if indices else "no device"
            raise ValueError(
                f"This process has {owned} of {self!r}, not one group. Use my_mpmd_axis_indices, here {indices}."
            )
        return indices[0]

    @property
    def my_mpmd_group_mesh(self) -> Mesh:
        """The sub-mesh of the one group of this process. ValueError as for `my_mpmd_axis_index`."""
        return self._groups[self.my_mpmd_axis_index]

    def lowering_mesh(self) -> Mesh:
        """A group that this process can lower programs for: its first one, which in one process is group 0."""
        if not self.my_mpmd_axis_indices:
            raise ValueError(f"This process has no device of {self!r}, so it has nothing to lower programs for.")
        return self._groups[self.my_mpmd_axis_indices[0]]

    def _take(self, indices: tuple[int, ...]) -> Mesh:
        devices = np.take(self.jax_mesh.devices, indices, axis=self.mpmd_axis)
        return Mesh(devices, self.jax_mesh.axis_names, axis_types=self.jax_mesh.axis_types)


def current_mpmd_mesh() -> MpmdMesh | None:
    """The MpmdMesh entered last in this thread with `with mpmd_mesh:`, or None."""
    entered = _entered.get()
    return entered[-1] if entered else None


def groups_of_processes(groups: Sequence[Iterable[Any]]) -> dict[int, tuple[int, ...]]:
    """Every process index to the groups in which it has devices.

    `groups` holds the devices of each group; of a device only `process_index` is read. ValueError names every process
    that shares a group with another process and has devices of a further group too.
    """
    held: dict[int, dict[int, list[Any]]] = {}  # process -> group -> devices
    sharers: list[set[int]] = []
    for index, devices in enumerate(groups):
        sharers.append(set())
        for device in devices:
            held.setdefault(device.process_index, {}).setdefault(index, []).append(device)
            sharers[-1].add(device.process_index)
    wrong = {
        process: parts
        for process, parts in sorted(held.items())
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
            "A process owns one or more whole groups, or shares one group with other processes; but "
            + "; ".join(lines)
            + ". Choose the sizes so that each group holds whole processes, or each process whole groups."
        )
    return {process: tuple(parts) for process, parts in sorted(held.items())}
