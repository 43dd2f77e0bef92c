"""The training step: its state, its loss function, the step itself."""
