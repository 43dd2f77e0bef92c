"""Compiles reference runs, meshes and pipelines with equal options, as in the zoo."""

from tests.mpmd.zoo.conftest import quick_compilation as quick_compilation
