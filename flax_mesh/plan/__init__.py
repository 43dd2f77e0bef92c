"""The forecast of a run: memory, time and traffic of a step, for hardware that need not be here."""

from flax_mesh.hardware import Chip as Chip
from flax_mesh.hardware import load_chip as load_chip
from flax_mesh.plan.plan import Plan as Plan
from flax_mesh.plan.recipe import plan as plan
from flax_mesh.plan.recipe import plan_step as plan_step
from flax_mesh.plan.topology import Topology as Topology
from flax_mesh.plan.topology import parse_topology as parse_topology
