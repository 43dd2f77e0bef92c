"""Pipelines: programs on groups of devices, arrays that live on some groups only, and the transfers between them."""

from flax_mesh.mpmd.mesh import MpmdMesh, current_mpmd_mesh

__all__ = [
    "MpmdMesh",
    "current_mpmd_mesh",
]
