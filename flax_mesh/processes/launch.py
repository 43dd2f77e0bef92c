"""`flax-mesh launch`: runs one command in several processes on this machine.

The processes communicate only over 127.0.0.1. Their output is merged line by line, with the number of the process in
front of each line.
"""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

GRACE_S = 20.0  # for the others to detect the failure themselves, and to report what they were waiting for
HOST = "127.0.0.1"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class End(NamedTuple):
    """How process `index` ended; a negative code is the number of a signal."""

    index: int
    code: int

    def __str__(self) -> str:
        if self.code >= 0:
            return f"process {self.index} ended with exit code {self.code}"
        return f"process {self.index} was terminated by {signal.Signals(-self.code).name}"


def launch(command: Sequence[str], count: int, extra: Sequence[str] = (), *, lost: int = 5) -> int:
    """Runs `command`, with `--process I/N@HOST:PORT` and `extra` appended, in `count` processes. Returns the exit code.

    Signals are forwarded to all processes. If one ends with an error, the others have `GRACE_S` seconds to detect it
    before they are killed. The exit code is that of the first process that ended with an error (`lost` if it was
    terminated by a signal), otherwise 0.
    """
    port = _free_port()
    ends: queue.Queue[End] = queue.Queue()
    printing = threading.Lock()
    children: list[subprocess.Popen[str]] = []
    try:
        for index in range(count):
            process = [f"--process={index}/{count}@{HOST}:{port}", *extra]
            child = subprocess.Popen(
                [sys.executable, "-u", *command, *process],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                process_group=0,  # so that Ctrl-C reaches only this process, which forwards it once
            )
            children.append(child)
            threading.Thread(target=_forward_output, args=(index, child, printing, ends), daemon=True).start()
        with _forward_signals(children):
            return _wait(children, ends, lost)
    finally:
        for child in children:
            _kill(child)


def _wait(children: Sequence[subprocess.Popen[str]], ends: "queue.Queue[End]", lost: int) -> int:
    ended: list[End] = []
    first: End | None = None
    deadline = float("inf")
    while len(ended) < len(children):
        try:
            end = ends.get(timeout=0.2)
        except queue.Empty:
            if time.monotonic() > deadline:
                running = [index for index in range(len(children)) if index not in {end.index for end in ended}]
                _log(f"killing process {', '.join(map(str, running))}, still running {GRACE_S:.0f} s later")
                for index in running:
                    _kill(children[index])
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
    return first.code if first.code > 0 else lost


def _forward_output(
    index: int, child: subprocess.Popen[str], printing: threading.Lock, ends: "queue.Queue[End]"
) -> None:
    """Prints the output of a process, then puts how it ended into `ends`."""
    assert child.stdout is not None
    for line in child.stdout:
        with printing:
            sys.stdout.write(f"[{index}] {line}" if line.endswith("\n") else f"[{index}] {line}\n")
            sys.stdout.flush()
    ends.put(End(index, child.wait()))


@contextmanager
def _forward_signals(children: Sequence[subprocess.Popen[str]]) -> Iterator[None]:
    def forward(number: int, frame: object) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _kill(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        child.kill()
        child.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def _log(text: str) -> None:
    os.write(2, f"flax-mesh launch: {text}\n".encode())
