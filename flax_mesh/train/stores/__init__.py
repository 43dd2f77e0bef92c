"""A run folder in an object store: its lease, and the working copy of its files."""
