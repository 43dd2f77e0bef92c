"""The launchers that start several processes, by the environment variables that they set.

JAX detects Cloud TPU, Slurm, Open MPI 4 and Kubernetes. Of the launchers here it knows nothing, or too little: the
table has the variables with the number of a process and of all processes and, where the launcher states it, the address
of process 0.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from flax_mesh.errors import ConfigError
from flax_mesh.text import shown


@dataclass(frozen=True)
class Launcher:
    """Names of variables. `hosts` contains the host of process 0 in its first line; without a `port`, PORT is used.

    `misleads_jax` if JAX's own detection raises an error where these variables are set.
    """

    name: str
    index: str
    count: str
    hosts: str = ""
    port: str = ""
    misleads_jax: bool = False


# An earlier launcher starts the later ones: torchrun and MPI run in the processes of Slurm.
LAUNCHERS = (
    Launcher("torchrun", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    Launcher("SkyPilot", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS"),
    # JAX reads the address too, and expects the port in it.
    Launcher("xpk", "NODE_RANK", "NNODES", "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT", misleads_jax=True),
    Launcher("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    Launcher("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE"),
    Launcher("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
PORT = 8476  # which JAX uses on Cloud TPU
POD = "JOB_COMPLETION_INDEX"  # the number of a pod of Kubernetes, which does not state how many there are
AGENT = "TORCHELASTIC_USE_AGENT_STORE"  # torchrun itself listens at MASTER_PORT


@dataclass(frozen=True)
class Launched:
    """By its launcher, this process is number `index` of `count`. `coordinator` is "" if it states no address."""

    launcher: Launcher
    index: int
    count: int
    coordinator: str


def detect_launcher(environment: Mapping[str, str] = os.environ) -> Launched | None:
    """The launcher of this process; None if there is none that started several processes."""
    for launcher in LAUNCHERS:
        texts = {name: environment[name] for name in (launcher.index, launcher.count) if name in environment}
        if len(texts) < 2:
            continue
        wrong = [f"{name}={shown(text)}" for name, text in texts.items() if not (text.isascii() and text.isdecimal())]
        index, count = (0, 0) if wrong else map(int, texts.values())
        if wrong or (index >= count and count > 1):
            settings = ", ".join(wrong or [f"{name}={text}" for name, text in texts.items()])
            raise ConfigError(
                f"{launcher.name}: {launcher.index} and {launcher.count} must be the number of a process, from 0, and "
                f"of all processes, got {settings}; unset them for a run of one process"
            )
        if count > 1:
            return Launched(launcher, index, count, _address(launcher, environment))
    return None


def _address(launcher: Launcher, environment: Mapping[str, str]) -> str:
    hosts = environment.get(launcher.hosts, "").split()
    port = environment.get(launcher.port, "") if launcher.port else str(PORT)
    if not hosts or not (port.isascii() and port.isdecimal()):
        return ""
    return f"{hosts[0]}:{int(port) + (environment.get(AGENT) == 'True')}"


def pod_number(environment: Mapping[str, str] = os.environ) -> int:
    """The number of this pod in a job of Kubernetes; 0 if it is the first one, or in no such job."""
    text = environment.get(POD, "")
    return int(text) if text.isascii() and text.isdecimal() else 0
