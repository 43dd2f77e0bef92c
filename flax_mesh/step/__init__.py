"""The training step of one program: its state, its loss function, the step itself."""
