"""Transfers of arrays between groups, within one process and between processes."""
