"""Sharding rules, pipelines, checkpoints and training for Flax NNX models. Importing it has no side effects."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from flax_mesh.axes import PartitionAxis as PartitionAxis
from flax_mesh.errors import CheckpointCorruptedError as CheckpointCorruptedError
from flax_mesh.errors import ConfigError as ConfigError
from flax_mesh.errors import SaveError as SaveError
from flax_mesh.errors import ShardingError as ShardingError
from flax_mesh.mesh.context import NoMeshError as NoMeshError
from flax_mesh.mesh.context import current_mesh as current_mesh
from flax_mesh.mesh.context import get_axes_size_in_mesh as get_axes_size_in_mesh
from flax_mesh.mesh.context import get_incontext_mesh as get_incontext_mesh
from flax_mesh.mesh.context import get_mesh_axis_names as get_mesh_axis_names
from flax_mesh.mesh.context import get_mesh_axis_size as get_mesh_axis_size
from flax_mesh.mesh.context import get_submesh_device_index as get_submesh_device_index
from flax_mesh.mesh.context import names_in_current_mesh as names_in_current_mesh
from flax_mesh.mesh.create import calculate_host_mesh_shape as calculate_host_mesh_shape
from flax_mesh.mesh.create import cpu_context as cpu_context
from flax_mesh.mesh.create import create_cpu_mesh as create_cpu_mesh
from flax_mesh.mesh.create import create_mesh as create_mesh
from flax_mesh.mesh.create import force_cpu as force_cpu
from flax_mesh.mesh.create import parse_mesh_from_string as parse_mesh_from_string
from flax_mesh.mesh.device_mesh import create_device_mesh as create_device_mesh
from flax_mesh.mesh.device_mesh import create_hybrid_device_mesh as create_hybrid_device_mesh
from flax_mesh.mesh.slices import SlowNetworkWarning as SlowNetworkWarning
from flax_mesh.sharding.abstract import abstract_state as abstract_state
from flax_mesh.sharding.abstract import init_model as init_model
from flax_mesh.sharding.abstract import init_state as init_state
from flax_mesh.sharding.abstract import partition_rules as partition_rules
from flax_mesh.sharding.abstract import partitioned as partitioned
from flax_mesh.sharding.constrain import constrain as constrain
from flax_mesh.sharding.constrain import with_sharding_constraint as with_sharding_constraint
from flax_mesh.sharding.gather import gather as gather
from flax_mesh.sharding.legacy import create_pattern_based_partition_spec as create_pattern_based_partition_spec
from flax_mesh.sharding.legacy import extract_sharding_structure as extract_sharding_structure
from flax_mesh.sharding.legacy import extract_shardings as extract_shardings
from flax_mesh.sharding.legacy import get_names_from_partition_spec as get_names_from_partition_spec
from flax_mesh.sharding.legacy import get_partition_spec as get_partition_spec
from flax_mesh.sharding.legacy import get_shardings_with_structure as get_shardings_with_structure
from flax_mesh.sharding.report.account import analyze_sharding_strategy as analyze_sharding_strategy
from flax_mesh.sharding.report.explain import explain_sharding as explain_sharding
from flax_mesh.sharding.report.report import ShardingReport as ShardingReport
from flax_mesh.sharding.rules import PartitionRules as PartitionRules
from flax_mesh.sharding.rules import match_partition_rules as match_partition_rules
from flax_mesh.sharding.transfer import make_shard_and_gather_fns as make_shard_and_gather_fns
from flax_mesh.sharding.transfer import reshard as reshard
from flax_mesh.sharding.transfer import shard as shard
from flax_mesh.step.state import init_train_state as init_train_state
from flax_mesh.step.step import make_train_step as make_train_step
from flax_mesh.text import version_of as _version_of
from flax_mesh.tree import named_leaves as named_leaves

__version__: str

if not _TYPE_CHECKING:  # for a type checker, this function would define every name

    def __getattr__(name: str) -> str:
        """The version of the installed package, which is read when it is used."""
        if name == "__version__":
            return _version_of("flax-mesh")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
