"""The training step of a single program: train state, loss function, train and evaluation step."""
