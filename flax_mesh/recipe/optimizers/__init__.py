"""Optimizers by name: their settings, learning rate schedules and parameter groups."""
