"""Initialization by kinds of arrays."""
