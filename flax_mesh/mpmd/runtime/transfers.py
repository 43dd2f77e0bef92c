"""Transfers between groups of a pipeline, if both groups, one of them, or neither is local."""

import itertools

import jax
from jax.sharding import NamedSharding, Sharding

from flax_mesh.mpmd.mesh import MpmdMesh
from flax_mesh.mpmd.transport.device_put import copy_to
from flax_mesh.mpmd.transport.keyed import Channel, Key
from flax_mesh.mpmd.transport.layout import sharding_on
from flax_mesh.mpmd.transport.local_copy import move
from flax_mesh.tree import PyTree


class GroupTransfers:
    """The groups of `mesh`, and which of them are local. `channel` is None in a run of one process."""

    def __init__(self, mesh: MpmdMesh):
        self.mesh, self.meshes = mesh, mesh.unstack
        self.local_groups = frozenset(mesh.my_mpmd_axis_indices)
        self.channel = Channel(mesh) if mesh.jax_mesh.is_multi_process else None
        self.local_meshes = {group: self.meshes[group] for group in sorted(self.local_groups)}
        self._shardings: dict[tuple[Sharding, int], NamedSharding] = {}
        self._numbers = itertools.count(1)

    def next_number(self) -> int:
        """A number for the keys of the next transfers, the same in all processes."""
        return next(self._numbers)

    def move_to(self, value: jax.Array, receiver: int) -> jax.Array:
        """`value` with the same spec on another local group."""
        key = value.sharding, receiver
        target = self._shardings.get(key)
        if target is None:
            target = self._shardings[key] = sharding_on(value.sharding, self.meshes[receiver])
        return move(value, target)

    def transfer(
        self,
        key: Key,
        value: PyTree,
        sharding: NamedSharding,
        sender: int,
        receiver: int,
        *,
        donated: bool = False,
    ) -> jax.Array | None:
        """Transfers `value` from group `sender` to `sharding` on group `receiver`; None if the receiver is remote.

        If the sender is remote, only shape and dtype of `value` are used. `donated`: the buffer of `value` may be
        donated before the transfer ends, so a copy is sent. The key is as in `Channel`.
        """
        if {sender, receiver} <= self.local_groups:
            return value if sender == receiver else move(value, sharding)
        if self.channel is None or not {sender, receiver} & self.local_groups:
            return None
        if receiver in self.local_groups:
            return self.channel.receive(key, value.shape, value.dtype, sharding, sender, receiver)
        on_sender = sharding_on(sharding, self.meshes[sender])
        if donated or not value.sharding.is_equivalent_to(on_sender, value.ndim):
            value = copy_to(on_sender)(value)
        return self.channel.send(key, value, sender, receiver)
