"""What a run calls with its rows: hooks by name or dotted path, TensorBoard; and the profile of a few steps."""
