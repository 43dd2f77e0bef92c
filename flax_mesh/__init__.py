"""flax_mesh: any Flax NNX model, unmodified, on any device mesh. Importing does nothing but define these names."""

from flax_mesh.axes import PartitionAxis as PartitionAxis
from flax_mesh.errors import ConfigError as ConfigError
from flax_mesh.errors import ShardingError as ShardingError
from flax_mesh.mesh import calculate_host_mesh_shape as calculate_host_mesh_shape
from flax_mesh.mesh import cpu_context as cpu_context
from flax_mesh.mesh import create_cpu_mesh as create_cpu_mesh
from flax_mesh.mesh import create_mesh as create_mesh
from flax_mesh.mesh import current_mesh as current_mesh
from flax_mesh.mesh import force_cpu as force_cpu
from flax_mesh.mesh import get_incontext_mesh as get_incontext_mesh
from flax_mesh.mesh import parse_mesh_from_string as parse_mesh_from_string
from flax_mesh.sharding import PartitionRules as PartitionRules
from flax_mesh.sharding import abstract_state as abstract_state
from flax_mesh.sharding import constrain as constrain
from flax_mesh.sharding import gather as gather
from flax_mesh.sharding import init_model as init_model
from flax_mesh.sharding import init_state as init_state
from flax_mesh.sharding import make_shard_and_gather_fns as make_shard_and_gather_fns
from flax_mesh.sharding import match_partition_rules as match_partition_rules
from flax_mesh.sharding import partition_rules as partition_rules
from flax_mesh.sharding import partitioned as partitioned
from flax_mesh.sharding import shard as shard
from flax_mesh.sharding import with_sharding_constraint as with_sharding_constraint
from flax_mesh.tree import map_named as map_named
from flax_mesh.tree import named_leaves as named_leaves
from flax_mesh.tree import path_of as path_of
