"""The plain runs and the pipelines of the zoo are compiled alike, so that their rounding is too."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def quick_compilation() -> Iterator[None]:
    """As in tests/conftest.py, but in slow tests too: they are many, and they share the cached plain runs."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
