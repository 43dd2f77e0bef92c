"""Splitting traced programs: by stage, by F, B and W, by group."""
