"""Detects within seconds that another process of the run has exited, stopped or failed, and then ends this process.

Process 0 is the hub: every other process has one connection to it, over which both send a heartbeat every second. The
connection of a killed process closes, a stopped process sends no heartbeats, and the hub forwards this to the others.
Without the watchdog JAX would wait for the heartbeat of its service (100 s) and then abort. The watchdog also limits
the time of a step: if no step finishes in time, the stacks of all threads are printed.
"""

import faulthandler
import json
import os
import secrets
import selectors
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

import jax

from flax_mesh.errors import ConfigError
from flax_mesh.jax_compat import distributed_state
from flax_mesh.processes.agree import call_number, get_text, put_text
from flax_mesh.processes.output import write_stderr
from flax_mesh.processes.start import resolve_address
from flax_mesh.text import count_text, first_line

_PEER_TIMEOUT_S = 12.0  # without a message for this long a process counts as stopped; all detect it within 15 s
HEARTBEAT_S = 1.0
TICK_S = 0.25
LINGER_S = 4.0  # process 0 waits at most this long for the others to exit first
NOTICE_S = 2.0  # after a JAX error: its cause, a failure in another process, may be detected only later
SETTLE_S = 0.5  # until this process waits for the lost one, so that the error can report the reason
GRACE_S = 2.0  # after a failure in another process: this process may raise a more specific error itself
JOIN_TIMEOUT_S = 300
REPORT_S = 10.0  # to print why this process ends; then it ends even if no process reads its output
LOST, FAILED = 5, 1  # exit codes


@dataclass
class _Peer:
    process: int
    last_message: float
    unread: bytes = b""
    done: bool = False  # announced that it is about to exit normally


@dataclass
class Watch:
    """Monitors the other processes and the steps of this one; a context manager around the run.

    `tell_failure(error)` must print an error that ends the run in this process, and return the exit code. The other
    processes are notified, and this process exits immediately, without waiting for them. `step_timeout_s` is the time
    limit of a step; None for no limit.
    """

    tell_failure: Callable[[BaseException], int]
    step_timeout_s: float | None = None
    peer_timeout_s: float = _PEER_TIMEOUT_S
    waiting: Callable[[], list[str]] = list  # returns the transfers that this process waits for; set by the pipeline
    _step: int = 0
    _since: float = field(default_factory=time.monotonic)
    _peers: dict[socket.socket, _Peer] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _peer_failed: threading.Event = field(default_factory=threading.Event)  # another process is lost or has failed
    _ending: threading.Event = field(default_factory=threading.Event)  # this process exits with an error
    _finished: threading.Event = field(default_factory=threading.Event)  # this process has finished normally
    _all_done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        if problem := step_timeout_problem("step_timeout_s", self.step_timeout_s):
            raise ConfigError(problem)

    def __enter__(self) -> "Watch":
        self._since = time.monotonic()
        self._count, self._index = jax.process_count(), jax.process_index()
        self._selector = selectors.DefaultSelector()
        if self._count > 1:
            (self._listen if self._index == 0 else self._join)()
        if self._count > 1 or self.step_timeout_s is not None:
            self._thread = threading.Thread(target=self._run, name="flax_mesh_watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and self._count > 1:
            if isinstance(error, jax.errors.JaxRuntimeError) and self._peer_failed.wait(NOTICE_S):
                self._thread.join()  # that thread reports the lost process, and exits
            self._ending.set()
            _exit_after(partial(self._tell, error), FAILED)
        if self._count > 1:
            # Wait until the others have finished too, so that a failure during shutdown is still detected.
            self._finished.set()
            if self._index != 0:
                self._send({"done": True})
            while self._thread.is_alive() and not self._all_done.wait(1):
                pass
        self._stop.set()
        for connection in list(self._peers):
            connection.close()

    def step_ended(self, row: object = None) -> None:
        """Restarts the time limit. Call it after every step."""
        self._step, self._since = self._step + 1, time.monotonic()

    def _listen(self) -> None:
        # Listen at the address of the jax.distributed coordinator, which all processes can reach.
        family, (address, *_) = resolve_address(distributed_state().coordinator_address)
        token = secrets.token_hex(16)
        with socket.create_server((address, 0), family=family) as server:
            hub = {"address": address, "port": server.getsockname()[1], "token": token}
            put_text(f"watch/{call_number('watch')}", json.dumps(hub))
            server.settimeout(JOIN_TIMEOUT_S)
            while len(self._peers) < self._count - 1:
                self._accept(server, address, token)

    def _accept(self, server: socket.socket, address: str, token: str) -> None:
        try:
            connection, _ = server.accept()
        except TimeoutError as error:
            missing = sorted(set(range(1, self._count)) - {peer.process for peer in self._peers.values()})
            raise TimeoutError(
                f"process {', '.join(map(str, missing))} did not connect to process 0 ({address}) within "
                f"{JOIN_TIMEOUT_S} s. Every process must be able to reach this address, on a port that is chosen "
                "by the system."
            ) from error
        connection.settimeout(10)
        try:
            hello = json.loads(_line(connection))
            is_peer = isinstance(hello, dict) and hello.get("token") == token
        except (ValueError, OSError):
            is_peer = False
        if is_peer:
            self._add(connection, int(hello["process"]))
        else:
            connection.close()  # not a process of this run

    def _join(self) -> None:
        hub = json.loads(get_text(f"watch/{call_number('watch')}", JOIN_TIMEOUT_S))
        connection = socket.create_connection((hub["address"], hub["port"]), timeout=JOIN_TIMEOUT_S)
        connection.sendall(json.dumps({"token": hub["token"], "process": self._index}).encode() + b"\n")
        self._add(connection, 0)

    def _add(self, connection: socket.socket, process: int) -> None:
        connection.setblocking(False)
        self._peers[connection] = _Peer(process, time.monotonic())
        self._selector.register(connection, selectors.EVENT_READ)

    def _run(self) -> None:
        last_heartbeat = last_check = time.monotonic()
        while not self._stop.is_set():
            if not self._peers:
                time.sleep(TICK_S)
            for key, _ in self._selector.select(TICK_S) if self._peers else ():
                self._read(key.fileobj)  # pyright: ignore[reportArgumentType]
            now = time.monotonic()
            if now - last_check > self.peer_timeout_s / 2:  # this process itself was stopped: messages are unread
                for peer in self._peers.values():
                    peer.last_message = now
            last_check = now
            if now - last_heartbeat >= HEARTBEAT_S:
                last_heartbeat = now
                self._send({})
            self._check(now)
            self.waiting()  # frees the arrays that have arrived

    def _read(self, connection: socket.socket) -> None:
        peer = self._peers.get(connection)
        if peer is None:
            return
        try:
            data = connection.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._remove(connection)
            if not (peer.done or self._stop.is_set() or self._ending.is_set()):
                self._lost(f"lost process {peer.process}: its connection is closed")
            return
        peer.last_message = time.monotonic()
        *lines, peer.unread = (peer.unread + data).split(b"\n")
        for line in lines:
            self._handle(peer, json.loads(line))

    def _remove(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._peers[connection]

    def _handle(self, peer: _Peer, message: dict[str, Any]) -> None:
        if self._ending.is_set():
            return
        if "failed" in message:
            self._peer_failed.set()
            if self._index == 0:
                self._send(message, exclude=peer.process)
            time.sleep(GRACE_S)
            self._end(message["failed"])
        if "lost" in message:
            self._peer_failed.set()
            time.sleep(SETTLE_S)
            self._end(message["lost"])
        if "done" in message:
            peer.done = True
            if self._index != 0:  # sent by the hub when all processes are done
                self._all_done.set()

    def _check(self, now: float) -> None:
        if self._ending.is_set():
            return
        for connection, peer in list(self._peers.items()):
            silence_s = now - peer.last_message
            if silence_s > self.peer_timeout_s and not peer.done:
                self._remove(connection)
                self._lost(f"lost process {peer.process}: no heartbeat for {silence_s:.0f} s, it is stopped or blocked")
        if self._finished.is_set():
            if self._index == 0 and not self._all_done.is_set() and all(peer.done for peer in self._peers.values()):
                self._send({"done": True})
                self._all_done.set()
        elif self.step_timeout_s is not None and now - self._since > self.step_timeout_s:
            since = f"after {count_text(self._step, 'step')} since the start"
            text = f"no step has finished within {self.step_timeout_s:.0f} s, {since}"
            self._send({"failed": f"process {self._index}: {text}"})
            self._end(text, stacks=True)

    def _lost(self, text: str) -> None:
        self._peer_failed.set()
        if self._index == 0:
            self._send({"lost": text})
            time.sleep(SETTLE_S)
        self._end(text)

    def _send(self, message: dict[str, Any], exclude: int | None = None) -> None:
        """Sends to the hub, or from the hub to all other processes except `exclude`."""
        data = json.dumps(message).encode() + b"\n"
        for connection, peer in list(self._peers.items()):
            if peer.process != exclude:
                with suppress(OSError):  # a closed connection is detected in _read
                    connection.send(data)  # a few bytes, which fit the buffer unless the peer has stopped reading

    def _end(self, text: str, *, stacks: bool = False) -> None:
        if self._ending.is_set():  # because of an error in this process
            return
        self._ending.set()
        _exit_after(partial(self._report, text, stacks), LOST)

    def _report(self, text: str, stacks: bool) -> int:
        if stacks:
            write_stderr(_stacks())
        waiting = self.waiting()
        lines = [f"flax-mesh: {text}"]
        lines += [f"flax-mesh: process {self._index} was waiting: {what}" for what in waiting[:4]]
        if len(waiting) > 4:
            lines.append(f"flax-mesh: ... and for {len(waiting) - 4} more arrays")
        lines.append(f"flax-mesh: process {self._index} ends with exit code {LOST}; the last checkpoint is valid")
        write_stderr("\n".join(lines) + "\n")  # unbuffered, because JAX may be about to abort
        self._linger()
        return LOST

    def _tell(self, error: BaseException) -> int:
        self._send({"failed": f"process {self._index} has failed: {_first_line(error)}"})
        code = self.tell_failure(error)
        self._linger()
        return code

    def _linger(self) -> None:
        """In process 0, waits for the others to exit: JAX aborts them as soon as its coordinator is gone."""
        until = time.monotonic() + LINGER_S
        while self._index == 0 and self._peers and time.monotonic() < until:
            if threading.current_thread() is not self._thread:
                time.sleep(TICK_S)  # the watch thread reads the connections
                continue
            for key, _ in self._selector.select(TICK_S):
                self._read(key.fileobj)  # pyright: ignore[reportArgumentType]


def _line(connection: socket.socket) -> bytes:
    """One line. Bytes after it, such as a heartbeat, stay in the socket."""
    data = b""
    while not data.endswith(b"\n") and len(data) < 4096 and (byte := connection.recv(1)):
        data += byte
    return data


def _first_line(error: BaseException) -> str:
    return ": ".join(filter(None, [type(error).__name__, first_line(error)]))


def step_timeout_problem(name: str, seconds: float | None) -> str | None:
    if seconds is None or seconds > 0:
        return None
    return f"{name} must be more than 0 seconds, got {seconds:g}"


def _exit_after(report: Callable[[], int], code: int) -> NoReturn:
    """Exits with the code that `report` returns. Exit handlers are skipped: they would wait for the other processes.

    If `report` raises an error, or if its output blocks, the process exits with `code`.
    """
    try:
        limit = threading.Timer(REPORT_S + LINGER_S, os._exit, (code,))
        limit.daemon = True
        limit.start()
        code = report()
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception as error:  # whatever it is, the others must not wait for this process
        write_stderr("".join(traceback.format_exception(error)))
    finally:
        os._exit(code)


def _stacks() -> str:
    """The stacks of all threads. faulthandler itself would write to standard error while it holds the GIL."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")
