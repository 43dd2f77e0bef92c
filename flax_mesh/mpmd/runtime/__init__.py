"""Pipelines at run time: placement, compilation, execution, the optimizer, profiles."""
