"""Pipeline schedules: data, validation, simulation, search, text and pictures. Pure Python."""
