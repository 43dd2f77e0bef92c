"""Rows of files: their tokens, and the parts that are trained."""
