"""Starts real processes for tests on 127.0.0.1, with a time limit; each is ended by its process id.

A worker is a module whose functions are its cases, and that ends with `run_case(globals())`. `run_workers` starts
several processes of it.
"""

import faulthandler
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax

ROOT = Path(__file__).parent.parent.parent
AFTER_KILL_S = 120
TIME_LIMIT_S = 480  # of one process; a worker also exits by itself before


class Ended(NamedTuple):
    """The exit code and the output of a process."""

    code: int
    output: str


class Running:
    """A process whose output is read continuously; a context manager that kills the process at its end."""

    def __init__(self, arguments: Sequence[str]):
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self.lines: list[str] = []
        assert self.process.stdout is not None
        self._reader = threading.Thread(target=self.lines.extend, args=[self.process.stdout], daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_for(self, text: str, limit_s: float = TIME_LIMIT_S) -> None:
        """Waits until `text` is printed; raises an AssertionError if the process ends first, or after `limit_s`."""
        end = time.monotonic() + limit_s
        while text not in self.output:
            if self.process.poll() is not None:
                self._reader.join(10)  # `text` may be in its last output
                assert text in self.output, f"ended with {self.process.returncode} before {text!r}:\n{self.output}"
                return
            assert time.monotonic() < end, f"{text!r} was not printed within {limit_s} s:\n{self.output}"
            time.sleep(0.02)

    def ended(self, limit_s: float = TIME_LIMIT_S) -> Ended:
        """Waits until the process ends; raises an AssertionError with its output after `limit_s`."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {limit_s} s:\n{self.output}") from None
        self._reader.join(10)
        return Ended(code, self.output)

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *error: Any) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGCONT)
            self.process.kill()
        self.process.wait(10)
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_all(commands: Sequence[Sequence[str]], limit_s: float = TIME_LIMIT_S) -> list[Ended]:
    """Starts Python with each of these arguments, and waits until all processes have ended."""
    with ExitStack() as stack:
        started = [stack.enter_context(Running(arguments)) for arguments in commands]
        return [running.ended(limit_s) for running in started]


def run_workers(
    case: str, processes: int, devices: int, *arguments: str, module: str = "tests.multiprocess.worker"
) -> list[Ended]:
    """Runs a case of `module` in several processes, and waits until all have ended."""
    return run_all(commands_of_workers(case, processes, devices, *arguments, module=module))


def commands_of_workers(
    case: str, processes: int, devices: int, *arguments: str, module: str = "tests.multiprocess.worker"
) -> list[list[str]]:
    port = free_port()
    numbers = [map(str, (process, processes, port, devices)) for process in range(processes)]
    return [["-m", module, case, *four, *arguments] for four in numbers]


def run_case(cases: Mapping[str, Callable[..., object]]) -> None:
    """The main function of the processes that `run_workers` starts."""
    faulthandler.dump_traceback_later(TIME_LIMIT_S - 20, exit=True)
    case, process, processes, port, devices = sys.argv[1], *map(int, sys.argv[2:6])
    join(process, processes, port, devices)
    cases[case](*sys.argv[6:])
    print(f"{case} is done", flush=True)


def join(process: int, processes: int, port: int, devices: int) -> None:
    """Initializes jax.distributed as number `process` of `processes`, with `devices` CPU devices each."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(
        address, processes, process, coordinator_bind_address=address, cluster_detection_method="deactivate"
    )


def texts(ended: Sequence[Ended]) -> str:
    return "\n".join(f"--- process {i}, exit code {one.code}\n{one.output}" for i, one in enumerate(ended))


def assert_all_done(ended: Sequence[Ended], text: str) -> None:
    """Asserts that every process exited with 0 and printed `text`; the error contains all outputs."""
    assert all(one.code == 0 and text in one.output for one in ended), texts(ended)


def listed(launcher: int = -1, folder: str = "/none/", pids: Set[int] = frozenset()) -> dict[int, str]:
    """The running children of `launcher`, processes with `folder` in their arguments, and `pids`: pid -> arguments."""
    found = {}
    lines = subprocess.run(["ps", "-ww", "-eo", "pid=,ppid=,stat=,args="], capture_output=True, text=True, check=True)
    for line in lines.stdout.splitlines():
        pid, parent, state, arguments = line.split(maxsplit=3)
        if (int(parent) == launcher or folder in arguments or int(pid) in pids) and not state.startswith("Z"):
            found[int(pid)] = arguments
    return found


def children(launcher: int) -> dict[int, int]:
    """Number of each process of a launch that still runs -> its pid."""
    found = {pid: re.search(r"--process=(\d+)/", arguments) for pid, arguments in listed(launcher).items()}
    return {int(match[1]): pid for pid, match in found.items() if match}


def assert_all_end(folder: Path, pids: Iterable[int] = ()) -> None:
    """Waits until none of `pids` and no process of `folder` runs."""
    end = time.monotonic() + AFTER_KILL_S
    while left := listed(folder=str(folder), pids={*pids}):
        assert time.monotonic() < end, f"still running after {AFTER_KILL_S} s: {left}"
        time.sleep(0.1)


@contextmanager
def all_killed(folder: Path) -> Iterator[None]:
    """Ends the processes that a failed test leaves behind."""
    try:
        yield
    finally:
        for pid in listed(folder=str(folder)):
            os.kill(pid, signal.SIGKILL)
