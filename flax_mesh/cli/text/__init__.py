"""Text that commands print: tables of checkpoints, forecasts of a run, generated text."""
