"""Splits traced programs: into stages, into F, B and W, and into groups."""
