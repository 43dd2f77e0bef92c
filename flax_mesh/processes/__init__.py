"""Runs of several processes: startup, checks that they are consistent, failure detection, and coordinated stopping."""

from flax_mesh.processes.agree import assert_equal as assert_equal
from flax_mesh.processes.agree import broadcast_from_process_0 as broadcast_from_process_0
from flax_mesh.processes.agree import stop_together as stop_together
from flax_mesh.processes.start import start_processes as start_processes
from flax_mesh.processes.watchdog import Watch as Watch
