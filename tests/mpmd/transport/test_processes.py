"""MpmdMesh, mpmd.device_put and mpmd.jit between real processes, over jax.distributed on 127.0.0.1."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpmd.transport.worker import TIME_LIMIT_S

ROOT = Path(__file__).parents[3]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_processes(case: str, processes: int, devices: int) -> list[tuple[int, str]]:
    """(exit code, output) of every process of a case, all ended when this returns."""
    port = free_port()
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.mpmd.transport.worker", case, *map(str, (process, processes, port, devices))],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in range(processes)
    ]
    try:
        outputs = [process.communicate(timeout=TIME_LIMIT_S + 20)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [(process.returncode, output) for process, output in zip(started, outputs, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "processes", "devices"),
    [
        ("two_groups", 2, 2),
        ("shared_groups", 4, 1),
        ("chain", 3, 1),
        ("several_groups", 2, 2),
        ("late", 2, 1),
        ("ownership", 3, 2),
    ],
)
def test_between_processes(case, processes, devices):
    results = run_processes(case, processes, devices)
    for process, (code, output) in enumerate(results):
        assert code == 0 and f"process {process} of {processes}: {case} holds" in output, "\n".join(
            f"--- process {i}, exit code {code}\n{text}" for i, (code, text) in enumerate(results)
        )
