"""Pipeline parallelism: models split into stages, arrays and programs on groups of devices, transfers between them."""

from flax_mesh.mpmd.array import MpmdArray as MpmdArray
from flax_mesh.mpmd.array import as_jax_array as as_jax_array
from flax_mesh.mpmd.array import is_fully_local_sharding as is_fully_local_sharding
from flax_mesh.mpmd.array import is_fully_remote_array as is_fully_remote_array
from flax_mesh.mpmd.array import is_fully_remote_sharding as is_fully_remote_sharding
from flax_mesh.mpmd.array import is_local_device as is_local_device
from flax_mesh.mpmd.jit import jit as jit
from flax_mesh.mpmd.mesh import MpmdMesh as MpmdMesh
from flax_mesh.mpmd.runtime.pipeline import Pipeline as Pipeline
from flax_mesh.mpmd.runtime.profile import Timeline as Timeline
from flax_mesh.mpmd.runtime.profile import measure_costs as measure_costs
from flax_mesh.mpmd.runtime.profile import trace_step as trace_step
from flax_mesh.mpmd.split.assign import CutError as CutError
from flax_mesh.mpmd.split.split import StagedModel as StagedModel
from flax_mesh.mpmd.split.stages.chain_stages import chain_stages as chain_stages
from flax_mesh.mpmd.split.stages.split_stages import split_stages as split_stages
from flax_mesh.mpmd.transport.device_put import device_put as device_put
