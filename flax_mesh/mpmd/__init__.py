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
from flax_mesh.mpmd.runtime.pipeline import Pipeline
from flax_mesh.mpmd.runtime.profile import Timeline, measure_costs, trace_step, write_timeline
from flax_mesh.mpmd.schedules.schedule import Action, Schedule, forward_schedule, make_schedule
from flax_mesh.mpmd.split.assign import CutError
from flax_mesh.mpmd.split.split import StagedModel, chain_stages, split_stages
from flax_mesh.mpmd.transport.device_put import device_put

__all__ = [
    "Action",
    "CutError",
    "MpmdArray",
    "MpmdMesh",
    "Pipeline",
    "Schedule",
    "StagedModel",
    "Timeline",
    "as_jax_array",
    "chain_stages",
    "current_mpmd_mesh",
    "device_put",
    "forward_schedule",
    "is_fully_local_sharding",
    "is_fully_remote_array",
    "is_fully_remote_sharding",
    "is_local_device",
    "jit",
    "make_schedule",
    "measure_costs",
    "split_stages",
    "trace_step",
    "write_timeline",
]
