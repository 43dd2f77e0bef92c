"""Pipelines: programs on groups of devices, arrays that live on some groups only, and the transfers between them."""

from flax_mesh.mpmd.array import (
    MpmdArray,
    as_jax_array,
    is_fully_local_sharding,
    is_fully_remote_array,
    is_fully_remote_sharding,
    is_local_device,
)
from flax_mesh.mpmd.jit import jit
from flax_mesh.mpmd.mesh import MpmdMesh, current_mpmd_mesh
from flax_mesh.mpmd.transfer import device_put

__all__ = [
    "MpmdArray",
    "MpmdMesh",
    "as_jax_array",
    "current_mpmd_mesh",
    "device_put",
    "is_fully_local_sharding",
    "is_fully_remote_array",
    "is_fully_remote_sharding",
    "is_local_device",
    "jit",
]
from flax_mesh.mpmd.cut import CutError as CutError
from flax_mesh.mpmd.pipeline import Pipeline as Pipeline
from flax_mesh.mpmd.schedules import Action as Action
from flax_mesh.mpmd.schedules import Schedule as Schedule
from flax_mesh.mpmd.schedules import forward_schedule as forward_schedule
from flax_mesh.mpmd.schedules import make_schedule as make_schedule
from flax_mesh.mpmd.stage import StagedModel as StagedModel
from flax_mesh.mpmd.stage import split_stages as split_stages
