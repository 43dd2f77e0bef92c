"""Compiles plain runs and pipelines of the zoo with equal options, so that they round equally."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def fresh_caches() -> None:
    """Discards the programs of earlier test files, which JAX would use again although their options differ."""
    jax.clear_caches()


@pytest.fixture(autouse=True)
def quick_compilation() -> Iterator[None]:
    """As in tests/conftest.py, but also for slow tests, because they share the cached plain runs."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
