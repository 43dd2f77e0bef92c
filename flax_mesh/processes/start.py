"""How a process becomes one of several: told on the command line, or as the cluster tells JAX."""

import re
import socket
from typing import Any, NamedTuple

import jax

from flax_mesh.errors import ConfigError
from flax_mesh.jax_compat import backends_are_initialized, distributed_state

PROCESS = re.compile(r"(\d+)/(\d+)@(.+:\d+)")
NO_CLUSTER = "coordinator_address should be defined"  # what JAX says where it finds none


class Processes(NamedTuple):
    """This process is number `index` of `count`; number 0 listens at `coordinator`, "host:port"."""

    index: int
    count: int
    coordinator: str


def parse_processes(text: str) -> Processes:
    """ "2/4@127.0.0.1:1234"; ConfigError for anything else."""
    match = PROCESS.fullmatch(text)
    if match is None or int(match[1]) >= int(match[2]):
        raise ConfigError(f"--process must be I/N@HOST:PORT with I in 0..N-1, such as 2/4@10.0.0.1:1234, got {text!r}")
    return Processes(int(match[1]), int(match[2]), match[3])


def resolve_address(address: str) -> tuple[socket.AddressFamily, Any]:
    """The family of "host:port", and the address that a socket of this family connects to."""
    host, _, port = address.rpartition(":")
    family, _, _, _, found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    return family, found


def start_processes(given: Processes | None) -> int:
    """Start jax.distributed, before the first use of a device; without a cluster and `given` there is nothing to start.
    Gives the number of processes.

    What JAX detects by itself: SLURM, Open MPI, Kubernetes, Cloud TPU. A process that JAX was used in before, such as a
    notebook, stays alone.
    """
    if given is not None:
        # Only where the others are told to reach it does the coordinator listen; JAX's default is every address.
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
            if NO_CLUSTER not in str(error):
                raise
    return distributed_state().num_processes or 1
