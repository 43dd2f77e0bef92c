"""The data of a run: reading files as tokens, and forming batches of tokens."""
