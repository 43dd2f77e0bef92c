"""Placement in two real processes."""

import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_two_processes_shard_and_gather_what_neither_holds_alone():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "tests.sharding.process_worker", port]
    workers = [
        subprocess.Popen([*command, str(rank)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]
    try:
        output = [worker.communicate(timeout=120)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for rank, (worker, text) in enumerate(zip(workers, output, strict=True)):
        assert worker.returncode == 0 and f"process {rank} is done" in text, text
