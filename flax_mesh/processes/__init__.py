"""Runs of several processes: how they start, agree, notice each other's failures and stop together."""

from flax_mesh.processes.agree import agree, from_first, stop_together
from flax_mesh.processes.start import Processes, parse_processes, start_processes
from flax_mesh.processes.store import get_text, put_text, try_get_text
from flax_mesh.processes.watchdog import Watch

__all__ = [
    "Processes",
    "Watch",
    "agree",
    "from_first",
    "get_text",
    "parse_processes",
    "put_text",
    "start_processes",
    "stop_together",
    "try_get_text",
]
