"""Recipes: the settings of a run, and everything that is derived from them before the run starts."""

from flax_mesh.recipe.explain import explain as explain
from flax_mesh.recipe.resolve import Recipe as Recipe
from flax_mesh.recipe.resolve import resolve as resolve
from flax_mesh.recipe.target import Target as Target
from flax_mesh.recipe.target import abstract_target as abstract_target
from flax_mesh.recipe.target import local_target as local_target
