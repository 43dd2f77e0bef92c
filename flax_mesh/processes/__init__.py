"""Runs of several processes: startup, checks that they are consistent, failure detection, and coordinated stopping."""

from flax_mesh.processes.agree import Phases as Phases
from flax_mesh.processes.agree import assert_equal as assert_equal
from flax_mesh.processes.agree import broadcast_from_process_0 as broadcast_from_process_0
from flax_mesh.processes.agree import stop_together as stop_together
from flax_mesh.processes.launch import launch as launch
from flax_mesh.processes.start import Processes as Processes
from flax_mesh.processes.start import parse_processes as parse_processes
from flax_mesh.processes.start import resolve_address as resolve_address
from flax_mesh.processes.start import start_processes as start_processes
from flax_mesh.processes.store import call_number as call_number
from flax_mesh.processes.store import get_text as get_text
from flax_mesh.processes.store import put_text as put_text
from flax_mesh.processes.store import try_get_text as try_get_text
from flax_mesh.processes.watchdog import LOST as LOST
from flax_mesh.processes.watchdog import Watch as Watch
