"""Text that commands print: the help of train, tables of checkpoints, forecasts of a run, generated text."""
