"""Runs of several processes: how they start, agree, notice each other's failures and stop together."""

from flax_mesh.processes.agree import Phases, agree, from_first, stop_together
from flax_mesh.processes.launch import launch
from flax_mesh.processes.start import Processes, parse_processes, resolve_address, start_processes
from flax_mesh.processes.store import call_number, get_text, put_text, try_get_text
from flax_mesh.processes.watchdog import LOST, Watch

__all__ = [
    "LOST",
    "Phases",
    "Processes",
    "Watch",
    "agree",
    "call_number",
    "from_first",
    "get_text",
    "launch",
    "parse_processes",
    "put_text",
    "resolve_address",
    "start_processes",
    "stop_together",
    "try_get_text",
]
