"""Initialization of jax.distributed, from the command line or from the cluster environment that JAX detects."""

import re
import socket
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import jax

from flax_mesh.errors import ConfigError
from flax_mesh.jax_compat import backends_are_initialized, distributed_state
from flax_mesh.processes.launchers import POD, Launched, detect_launcher, pod_number
from flax_mesh.text import says, shown

PROCESS = re.compile(r"(\d{1,9})/(\d{1,9})@(.+):(\d{1,9})", re.ASCII)
_NO_CLUSTER = "coordinator_address should be defined"  # part of JAX's error if it detects no cluster
_NO_COUNT = "Number of processes must be defined"  # if JAX_COORDINATOR_ADDRESS is set beside
_NO_MPI4PY = "requires mpi4py"  # part of JAX's error if it detects Open MPI 5


@dataclass(frozen=True)
class Processes:
    """This process has number `index` of `count`; process 0 listens at `coordinator`, "host:port"."""

    index: int
    count: int
    coordinator: str


FORM = "--process must be I/N@HOST:PORT with I in 0..N-1, such as 2/4@10.0.0.1:1234"


def parse_processes(text: str, form: str = FORM) -> Processes:
    """Parses "2/4@127.0.0.1:1234"; raises a ConfigError, which states the `form`, for any other format."""
    match = PROCESS.fullmatch(text)
    if match is None or int(match[1]) >= int(match[2]):
        raise ConfigError(f"{form}, got {text!r}")
    if not 0 < int(match[4]) < 2**16:
        raise ConfigError(f"--process must have a port in 1..65535, got {match[4]} in {text!r}")
    return Processes(int(match[1]), int(match[2]), f"{match[3]}:{match[4]}")


def resolve_address(address: str) -> tuple[socket.AddressFamily, Any]:
    """The address family of "host:port", and the address for a socket of this family."""
    host, _, port = address.rpartition(":")
    family, _, _, _, address_ = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    return family, address_


def check_coordinator(coordinator: str) -> None:
    """Raises a ConfigError if this process cannot listen at the address: JAX would crash."""
    try:
        family, address = resolve_address(coordinator)
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that cannot be one of a host
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"--process: process 0 cannot listen at {coordinator} ({reason}); use HOST:PORT with an address of "
            "the machine of process 0, and a free port"
        ) from error


def start_processes(given: Processes | None, *, coordinator: str = "") -> int:
    """Initializes jax.distributed and returns the number of processes. Call it before the first use of a device.

    With `given=None` the processes are detected: by JAX, which knows Cloud TPU, Slurm, Open MPI 4 and Kubernetes, or by
    the variables of another launcher (`LAUNCHERS` in flax_mesh/processes/launchers.py). If there is none, or if the
    backends of JAX are already initialized (for example in a notebook), the process runs alone.

    Args:
        given: The number of this process, of all processes, and the address of process 0.
        coordinator: HOST:PORT of process 0, for launchers that set the two numbers only.

    Raises:
        ConfigError: A launcher has started several processes, but JAX has one; or process 0 cannot listen.

    Example:
        >>> from flax_mesh.processes import start_processes
        >>> start_processes(None)  # without a launcher
        1
    """
    launched = None if given is not None else detect_launcher()
    if coordinator and given is not None:
        raise ConfigError("--process has the address of process 0 already; remove --coordinator")
    if coordinator:
        given = _at(coordinator, launched)
    if given is not None:
        _initialize(given)
    elif not jax.distributed.is_initialized() and not backends_are_initialized():
        _detect(launched)
    count = distributed_state().num_processes or 1
    if launched is not None and count == 1:
        variable = launched.launcher.count
        raise ConfigError(
            f"{variable}={launched.count}: {launched.launcher.name} has started {launched.count} processes, but JAX "
            "has one, so that each would train alone. Pass --coordinator HOST:PORT, a free port on the machine of "
            "process 0 (start_processes(None, coordinator=...) in Python, before the first use of a device), or "
            f"install mpi4py. For a run of one process, unset {variable}"
        )
    if given is None and count == 1 and (pod := pod_number()):
        raise ConfigError(
            f"{POD}={pod}: Kubernetes has started several pods, but JAX has one process, so that each would train "
            f"alone. Pass --process '$({POD})/N@HOST:PORT', with the number of pods and the address of pod 0, or "
            f"install the package kubernetes, by which JAX finds both. For runs of one process, unset {POD}"
        )
    return count


def _detect(launched: Launched | None) -> None:
    """Initialize jax.distributed by JAX's own detection, or by the variables of a launcher that it does not know."""
    stated = None
    if launched is not None and launched.coordinator:
        stated = Processes(launched.index, launched.count, launched.coordinator)
    if launched is not None and launched.launcher.misleads_jax and stated is not None:
        return _initialize(stated)
    try:
        jax.distributed.initialize()
    except (ValueError, RuntimeError) as error:
        if not any(says(error, text) for text in (_NO_CLUSTER, _NO_COUNT, _NO_MPI4PY)):
            raise
        if stated is not None:
            _initialize(stated)
        elif launched is not None and find_spec("mpi4py") is not None:
            jax.distributed.initialize(cluster_detection_method="mpi4py")


def _at(coordinator: str, launched: Launched | None) -> Processes:
    if launched is None:
        raise ConfigError(
            f"--coordinator={shown(coordinator)} needs a launcher that numbers the processes, but no variable of one "
            "is set; pass --process I/N@HOST:PORT, or use flax-mesh launch"
        )
    return parse_processes(f"{launched.index}/{launched.count}@{coordinator}", "--coordinator must be HOST:PORT")


def _initialize(given: Processes) -> None:
    if given.index == 0:  # the others wait until the address has a host
        check_coordinator(given.coordinator)
    # The coordinator listens only at the given address; JAX's default is all network interfaces.
    jax.distributed.initialize(
        given.coordinator,
        given.count,
        given.index,
        coordinator_bind_address=given.coordinator,
        cluster_detection_method="deactivate",
    )


def check_single_process(command: str) -> None:
    """Raises a ConfigError if a launcher has started several processes, each of which would do all of the work."""
    if pod := pod_number():
        raise ConfigError(
            f"{command} runs in one process, but {POD}={pod}: Kubernetes has started several pods, each of which would "
            "do all of the work; set completions: 1 in the job"
        )
    if (launched := detect_launcher()) is not None:
        name, count = launched.launcher.name, launched.count
        raise ConfigError(
            f"{command} runs in one process, but {launched.launcher.count}={count}: {name} has started {count} "
            f"processes, each of which would do all of the work; run the command without {name}"
        )
