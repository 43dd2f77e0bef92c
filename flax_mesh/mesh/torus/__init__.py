"""The torus of a TPU slice: coordinates and wraparound links, assignment of mesh axes to physical axes, ring orders."""

from flax_mesh.mesh.torus.assign import DEFAULT_BYTES as DEFAULT_BYTES
from flax_mesh.mesh.torus.assign import assignment_cost as assignment_cost
from flax_mesh.mesh.torus.assign import axis_phases as axis_phases
from flax_mesh.mesh.torus.assign import choose_assignment as choose_assignment
from flax_mesh.mesh.torus.assign import gather_seconds as gather_seconds
from flax_mesh.mesh.torus.assign import is_better as is_better
from flax_mesh.mesh.torus.assign import strides_of as strides_of
from flax_mesh.mesh.torus.rings import ring_order as ring_order
from flax_mesh.mesh.torus.torus import Assignment as Assignment
from flax_mesh.mesh.torus.torus import Torus as Torus
from flax_mesh.mesh.torus.torus import arrange as arrange
from flax_mesh.mesh.torus.torus import factorings as factorings
from flax_mesh.mesh.torus.torus import known_assignment as known_assignment
from flax_mesh.mesh.torus.torus import mean_hops as mean_hops
from flax_mesh.mesh.torus.torus import physical_mesh as physical_mesh
from flax_mesh.mesh.torus.torus import read_device as read_device
from flax_mesh.mesh.torus.torus import wraps_around as wraps_around
