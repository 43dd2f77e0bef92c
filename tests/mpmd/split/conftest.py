"""Compiles as the tests of the zoo, whose models these tests run: equal operations share compiled programs."""

from tests.mpmd.zoo.conftest import compile_quickly as compile_quickly
