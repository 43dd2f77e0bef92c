"""Device meshes: mesh axes laid out over a TPU torus, over several slices or hosts, or over other devices."""

from flax_mesh.mesh.describe import describe_mesh as describe_mesh
from flax_mesh.mesh.draw import draw_mesh_svg as draw_mesh_svg
