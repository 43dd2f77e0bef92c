"""The forecast of a run: what it needs and how long a step takes, for hardware that need not be here."""
