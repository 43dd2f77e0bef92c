"""The data of a run: tokens of files, batches of a recipe, and how held-out data is evaluated."""
