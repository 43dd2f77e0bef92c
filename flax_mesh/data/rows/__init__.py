"""Rows of files: their tokens, the parts that are trained, and their hashes."""
