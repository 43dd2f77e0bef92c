"""The forecast of a run: memory, time and traffic of a step, for hardware that need not be here."""

from flax_mesh.plan.plan import Plan
from flax_mesh.plan.recipe import plan, plan_step

__all__ = ["Plan", "plan", "plan_step"]
