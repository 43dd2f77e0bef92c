"""Hooks that a run calls with its rows, by name or dotted path; TensorBoard; and the profile of a few steps."""
