"""Compiles reference runs, meshes and pipelines with equal options, as in the zoo."""

from tests.mpmd.zoo.conftest import compile_quickly as compile_quickly
