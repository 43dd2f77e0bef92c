"""Data of a run: files to tokens, tokens to batches."""
