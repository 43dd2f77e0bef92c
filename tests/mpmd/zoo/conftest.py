"""Compiles plain runs and pipelines of the zoo with equal options, so that they round equally."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def fresh_caches() -> None:
    """Discards the programs of earlier test files, which JAX would use again although their options differ."""
    if not jax.config.values["jax_disable_most_optimizations"]:  # in the default tier the options are equal
        jax.clear_caches()


@pytest.fixture(autouse=True)
def compile_quickly(quick_compilation: None) -> None:
    """All tests share the cached plain runs."""
