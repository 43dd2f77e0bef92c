"""The search of layouts: which settings of a recipe are fastest on a number of chips."""

from flax_mesh.plan.search.search import LayoutSearch as LayoutSearch
from flax_mesh.plan.search.search import search_layouts as search_layouts
