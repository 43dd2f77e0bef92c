"""Libraries that are no dependencies of flax_mesh: docs/benchmarks.md describes an environment with them."""

import importlib
import importlib.util
import warnings
from typing import Any


def peer(module: str) -> Any:
    """The module, such as "eformer.escale", or None if its package is not installed."""
    if importlib.util.find_spec(module.split(".")[0]) is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(module)
