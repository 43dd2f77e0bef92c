"""Random NNX models, split at random layers and run by random schedules, compared with one device."""
