"""Arrays from group to group of a pipeline, whether one process holds both groups, one of them, or neither."""

from functools import cached_property
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, Sharding

from flax_mesh.mpmd.mesh import MpmdMesh
from flax_mesh.mpmd.transport.device_put import copy_to
from flax_mesh.mpmd.transport.keyed import Channel
from flax_mesh.mpmd.transport.layout import sharding_on
from flax_mesh.mpmd.transport.local_copy import move


class GroupTransfers:
    """The groups of `mesh` as this process sees them; `channel` is None in a run of one process."""

    def __init__(self, mesh: MpmdMesh):
        self.mesh, self.meshes = mesh, mesh.unstack
        self.mine = frozenset(mesh.my_mpmd_axis_indices)  # groups of this process
        self.channel = Channel(mesh) if mesh.jax_mesh.is_multi_process else None
        self._shardings: dict[tuple[Sharding, int], NamedSharding] = {}

    @cached_property
    def my_meshes(self) -> dict[int, Mesh]:
        return {group: self.meshes[group] for group in sorted(self.mine)}

    def next_number(self) -> int:
        """A number for the keys of what is sent next, the same in all processes; 0 in a run of one."""
        return self.channel.next_run() if self.channel else 0

    def move_to(self, value: jax.Array, receiver: int) -> jax.Array:
        """`value`, of a group of this process, laid out alike on another of its groups."""
        key = value.sharding, receiver
        there = self._shardings.get(key)
        if there is None:
            there = self._shardings[key] = sharding_on(value.sharding, self.meshes[receiver])
        return move(value, there)

    def transfer(
        self,
        key: tuple[Any, ...],
        value: Any,
        sharding: NamedSharding,
        sender: int,
        receiver: int,
        *,
        donated: bool = False,
    ) -> jax.Array | None:
        """`value` of group `sender` by `sharding` on group `receiver`; None where another process holds that.

        Where another process holds the sender, only shape and dtype of `value` are used. `donated`: the value may be
        overwritten at once. The key is as in `Channel`.
        """
        if {sender, receiver} <= self.mine:
            return value if sender == receiver else move(value, sharding)
        if self.channel is None or not {sender, receiver} & self.mine:
            return None
        if receiver in self.mine:
            return self.channel.receive(key, value.shape, value.dtype, sharding, sender, receiver)
        at_home = sharding_on(sharding, self.meshes[sender])
        if donated or not value.sharding.is_equivalent_to(at_home, value.ndim):
            value = copy_to(at_home)(value)
        return self.channel.send(key, value, sender, receiver)
