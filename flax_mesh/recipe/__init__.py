"""Recipes: the settings of a run, and everything that is derived from them before the run starts."""
