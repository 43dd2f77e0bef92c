"""Meshes: devices of a torus, of several slices or of a CPU, laid out for the axes of a model."""

from flax_mesh.mesh.context import (
    NoMeshError,
    current_mesh,
    get_axes_size_in_mesh,
    get_incontext_mesh,
    get_mesh_axis_names,
    get_mesh_axis_size,
    get_submesh_device_index,
    names_in_current_mesh,
)
from flax_mesh.mesh.create import (
    calculate_host_mesh_shape,
    cpu_context,
    create_cpu_mesh,
    create_mesh,
    force_cpu,
    parse_mesh_from_string,
)
from flax_mesh.mesh.describe import describe_mesh
from flax_mesh.mesh.device_mesh import create_device_mesh, create_hybrid_device_mesh
from flax_mesh.mesh.draw import draw_mesh_svg
from flax_mesh.mesh.shape import parse_mesh_shape
from flax_mesh.mesh.slices import SlowNetworkWarning

__all__ = [
    "NoMeshError",
    "SlowNetworkWarning",
    "calculate_host_mesh_shape",
    "cpu_context",
    "create_cpu_mesh",
    "create_device_mesh",
    "create_hybrid_device_mesh",
    "create_mesh",
    "current_mesh",
    "describe_mesh",
    "draw_mesh_svg",
    "force_cpu",
    "get_axes_size_in_mesh",
    "get_incontext_mesh",
    "get_mesh_axis_names",
    "get_mesh_axis_size",
    "get_submesh_device_index",
    "names_in_current_mesh",
    "parse_mesh_from_string",
    "parse_mesh_shape",
]
