"""`flax-mesh launch`: runs one command in several processes on this machine.

The processes communicate only over 127.0.0.1. Their output is merged line by line, with the number of the process in
front of each line. If the launcher or the reader of its output ends, no process remains.
"""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from flax_mesh.processes.output import reader_has_ended, write_stderr

GRACE_S = 20.0  # for the others to detect the failure themselves, and to report the call that they were waiting in
ORPHAN_GRACE_S = 15.0  # for the processes to save after the launcher was killed
DRAIN_S = 5.0  # for the rest of the output of a process that has ended: one that it has started may keep it open
HOST = "127.0.0.1"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True)
class _End:
    """How process `index` ended; a negative code is the number of a signal."""

    index: int
    code: int

    def __str__(self) -> str:
        if self.code >= 0:
            return f"process {self.index} ended with exit code {self.code}"
        return f"process {self.index} was terminated by {signal.Signals(-self.code).name}"


def launch(command: Sequence[str], count: int, extra: Sequence[str] = (), *, lost: int = 5) -> int:
    """Runs `command`, with `--process I/N@HOST:PORT` and `extra` appended, in `count` processes. Returns the exit code.

    Signals are forwarded to all processes. If the reader of standard output has ended, they are stopped by SIGTERM.
    If one ends with an error, the others have `GRACE_S` seconds to detect it before they are killed. The exit code is
    the code of the first process that ended with an error (`lost` if it was terminated by a signal), otherwise 0. A
    code other than 4 (stopped) and `lost` goes before these two.
    """
    port = _free_port()
    ends: queue.Queue[_End] = queue.Queue()
    printing = threading.Lock()
    children: list[subprocess.Popen[str]] = []
    with _process_group(children) as group:
        for index in range(count):
            process = [f"--process={index}/{count}@{HOST}:{port}", *extra]
            child = subprocess.Popen(
                [sys.executable, "-u", *command, *process],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                process_group=group,  # so that Ctrl-C reaches only this process, which forwards it once
            )
            children.append(child)
            threading.Thread(target=_follow, args=(index, child, printing, ends), daemon=True).start()
        with handled_signals(lambda number, _: _send_signal(children, number)):
            return _wait(children, ends, lost)


@contextmanager
def _process_group(children: Sequence[subprocess.Popen[str]]) -> Generator[int]:
    """A process group for `children`. None of it outlives the context, or this process, even if that is killed."""
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(__file__).with_name("orphans.py")), str(ORPHAN_GRACE_S)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )
    try:
        yield guard.pid
    finally:
        with suppress(OSError):  # all have ended
            os.killpg(guard.pid, signal.SIGKILL)
        for process in (guard, *children):
            process.wait()
        assert guard.stdin is not None
        guard.stdin.close()


def _wait(children: Sequence[subprocess.Popen[str]], ends: "queue.Queue[_End]", lost: int) -> int:
    ended: list[_End] = []
    first: _End | None = None
    deadline = float("inf")
    stopping = False
    while len(ended) < len(children):
        if not stopping and reader_has_ended(sys.stdout):
            stopping = True
            _send_signal(children, signal.SIGTERM)
            _log("standard output is closed: stopping all processes; the rest of their output is on standard error")
        try:
            end = ends.get(timeout=0.2)
        except queue.Empty:
            if time.monotonic() > deadline:
                running = [index for index in range(len(children)) if index not in {end.index for end in ended}]
                for index in running:
                    children[index].kill()
                _log(f"killed process {', '.join(map(str, running))}, still running {GRACE_S:.0f} s later")
                deadline = float("inf")
            continue
        ended.append(end)
        if end.code != 0 and first is None:
            first, deadline = end, time.monotonic() + GRACE_S
            _log(str(end))
    if first is None:
        return 0
    others = [str(end) for end in ended if end is not first and end.code != first.code]
    _log("; ".join([f"the run ended early: first, {first}", *others]) if others or first.code != 4 else "stopped")
    # A process that fails itself may end after the others, which end because they have lost it.
    cause = next((end for end in ended if end.code > 0 and end.code not in (4, lost)), first)
    return cause.code if cause.code > 0 else lost


def _follow(index: int, child: subprocess.Popen[str], printing: threading.Lock, ends: "queue.Queue[_End]") -> None:
    """Prints the output of a process, and puts how it ended into `ends`."""
    reader = threading.Thread(target=_forward_output, args=(index, child, printing), daemon=True)
    reader.start()
    code = child.wait()
    reader.join(DRAIN_S)
    ends.put(_End(index, code))


def _forward_output(index: int, child: subprocess.Popen[str], printing: threading.Lock) -> None:
    assert child.stdout is not None
    with child.stdout as lines:
        for line in lines:
            with printing:
                stream = sys.stderr if reader_has_ended(sys.stdout) else sys.stdout
                print(f"[{index}] {line}", end="" if line.endswith("\n") else "\n", file=stream, flush=True)


@contextmanager
def handled_signals(handler: Callable[[int, object], None]) -> Generator[None]:
    """Calls `handler` for SIGNALS. One that is ignored stays ignored: SIGHUP under nohup."""
    caught = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, handler) for number in caught}
    try:
        yield
    finally:
        for number, earlier in previous.items():
            signal.signal(number, earlier)


def _send_signal(children: Sequence[subprocess.Popen[str]], number: int) -> None:
    for child in children:
        child.send_signal(number)  # nothing if it has ended


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def _log(text: str) -> None:
    write_stderr(f"flax-mesh launch: {text}\n")
