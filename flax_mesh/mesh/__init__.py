"""Device meshes: mesh axes laid out over a TPU torus, over several slices or hosts, or over other devices."""

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
from flax_mesh.mesh.describe import describe_mesh as describe_mesh
from flax_mesh.mesh.device_mesh import create_device_mesh as create_device_mesh
from flax_mesh.mesh.device_mesh import create_hybrid_device_mesh as create_hybrid_device_mesh
from flax_mesh.mesh.draw import draw_mesh_svg as draw_mesh_svg
from flax_mesh.mesh.shape import parse_mesh_shape as parse_mesh_shape
from flax_mesh.mesh.slices import SlowNetworkWarning as SlowNetworkWarning
