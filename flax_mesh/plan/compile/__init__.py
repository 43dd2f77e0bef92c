"""Steps compiled by XLA, for devices that need not be here."""

from flax_mesh.plan.compile.compiled import Compiled as Compiled
from flax_mesh.plan.compile.recipe import compile_recipe as compile_recipe
