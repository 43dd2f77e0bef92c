"""Runs of several processes: how they start, agree, find each other's failures and stop together."""

from flax_mesh.processes.store import get_text, put_text, try_get_text

__all__ = ["get_text", "put_text", "try_get_text"]
