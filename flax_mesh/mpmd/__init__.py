"""Pipelines: programs on groups of devices, arrays that live on some groups only, and the transfers between them."""

from flax_mesh.mpmd.array import MpmdArray as MpmdArray
from flax_mesh.mpmd.array import as_jax_array as as_jax_array
from flax_mesh.mpmd.array import is_fully_local_sharding as is_fully_local_sharding
from flax_mesh.mpmd.array import is_fully_remote_array as is_fully_remote_array
from flax_mesh.mpmd.array import is_fully_remote_sharding as is_fully_remote_sharding
from flax_mesh.mpmd.array import is_local_device as is_local_device
from flax_mesh.mpmd.jit import jit as jit
from flax_mesh.mpmd.mesh import MpmdMesh as MpmdMesh
from flax_mesh.mpmd.mesh import current_mpmd_mesh as current_mpmd_mesh
from flax_mesh.mpmd.runtime.pipeline import Pipeline as Pipeline
from flax_mesh.mpmd.runtime.placement import bytes_of_groups as bytes_of_groups
from flax_mesh.mpmd.runtime.profile import Timeline as Timeline
from flax_mesh.mpmd.runtime.profile import measure_costs as measure_costs
from flax_mesh.mpmd.runtime.profile import trace_step as trace_step
from flax_mesh.mpmd.runtime.profile import write_timeline as write_timeline
from flax_mesh.mpmd.schedules.schedule import Action as Action
from flax_mesh.mpmd.schedules.schedule import Schedule as Schedule
from flax_mesh.mpmd.schedules.schedule import forward_schedule as forward_schedule
from flax_mesh.mpmd.schedules.schedule import make_schedule as make_schedule
from flax_mesh.mpmd.split.assign import CutError as CutError
from flax_mesh.mpmd.split.remat import REMAT_MODES as REMAT_MODES
from flax_mesh.mpmd.split.split import StagedModel as StagedModel
from flax_mesh.mpmd.split.split import chain_stages as chain_stages
from flax_mesh.mpmd.split.split import split_stages as split_stages
from flax_mesh.mpmd.transport.device_put import device_put as device_put
from flax_mesh.mpmd.transport.ordered import TRANSPORTS as TRANSPORTS
