"""Batches that each process, or the model of the run, makes itself."""
