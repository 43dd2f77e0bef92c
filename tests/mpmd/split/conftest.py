"""Compiles as the tests of the zoo, whose models these tests run: equal operations share compiled programs."""

from tests.mpmd.zoo.conftest import quick_compilation

__all__ = ["quick_compilation"]
