"""Descriptions and drawings of device meshes."""

from flax_mesh.mesh.describe import describe_mesh as describe_mesh
from flax_mesh.mesh.draw import draw_mesh_svg as draw_mesh_svg
