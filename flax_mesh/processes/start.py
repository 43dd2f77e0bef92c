"""Initialization of jax.distributed, from the command line or from the cluster environment that JAX detects."""

import re
import socket
from typing import Any, NamedTuple

import jax

from flax_mesh.errors import ConfigError
from flax_mesh.jax_compat import backends_are_initialized, distributed_state
from flax_mesh.text import says

PROCESS = re.compile(r"(\d{1,9})/(\d{1,9})@(.+):(\d{1,9})", re.ASCII)
_NO_CLUSTER = "coordinator_address should be defined"  # part of JAX's error if it detects no cluster


class Processes(NamedTuple):
    """This process has number `index` of `count`; process 0 listens at `coordinator`, "host:port"."""

    index: int
    count: int
    coordinator: str


def parse_processes(text: str) -> Processes:
    """Parses "2/4@127.0.0.1:1234"; raises a ConfigError for any other format."""
    match = PROCESS.fullmatch(text)
    if match is None or int(match[1]) >= int(match[2]):
        raise ConfigError(f"--process must be I/N@HOST:PORT with I in 0..N-1, such as 2/4@10.0.0.1:1234, got {text!r}")
    if not 0 < int(match[4]) < 2**16:
        raise ConfigError(f"--process must have a port in 1..65535, got {match[4]} in {text!r}")
    return Processes(int(match[1]), int(match[2]), f"{match[3]}:{match[4]}")


def resolve_address(address: str) -> tuple[socket.AddressFamily, Any]:
    """The address family of "host:port", and the address for a socket of this family."""
    host, _, port = address.rpartition(":")
    family, _, _, _, found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    return family, found


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


def start_processes(given: Processes | None) -> int:
    """Initializes jax.distributed and returns the number of processes. Call it before the first use of a device.

    With `given=None` JAX detects the cluster: SLURM, Open MPI, Kubernetes or Cloud TPU. If there is none, or if the
    backends of JAX are already initialized (for example in a notebook), the process runs alone.
    """
    if given is not None:
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
    elif not jax.distributed.is_initialized() and not backends_are_initialized():
        try:
            jax.distributed.initialize()
        except ValueError as error:
            if not says(error, _NO_CLUSTER):
                raise
    return distributed_state().num_processes or 1
