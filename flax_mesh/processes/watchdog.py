"""Notices within seconds that another process of the run is gone, stopped or has failed, and ends this one.

Process 0 is the hub: every other process holds one connection to it, over which both say every second that they are
alive. A process that is killed closes its connection, one that is stopped falls silent; the hub tells the others. JAX
itself would wait for its heartbeat (100 s) and then abort. A second watch is on the steps: where none ends in time, the
stacks of all threads are written, for whoever has to find out why.
"""

import faulthandler
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import jax

from flax_mesh.jax_compat import distributed_state
from flax_mesh.processes.start import resolve_address
from flax_mesh.processes.store import call_number, get_text, put_text

PEER_TIMEOUT_S = 12.0  # silence after which a process counts as stopped; what is noticed is noticed within 15 s
HEARTBEAT_S = 1.0
TICK_S = 0.25
LINGER_S = 4.0
NOTICE_S = 2.0  # after an error of JAX, which may come before its cause is noticed here
SETTLE_S = 0.5  # until this process has come to where it waits for the one that is lost, so that it can say so
GRACE_S = 2.0  # after another's failure, for this process to come to the same by itself and say it better
JOIN_TIMEOUT_S = 300
LOST = 5  # exit code


@dataclass
class _Peer:
    process: int
    heard: float
    unread: bytes = b""
    done: bool = False  # said goodbye


@dataclass
class Watch:
    """The watch of this process over the others, and over its own steps; a context manager around the run.

    `step_timeout_s`: None for no limit. `tell_failure(error)` prints an error that ends the run here and gives the exit
    code; the others are told, and the process ends at once, without waiting for them.
    """

    tell_failure: Callable[[BaseException], int]
    step_timeout_s: float | None = None
    peer_timeout_s: float = PEER_TIMEOUT_S
    waiting: Callable[[], list[str]] = list  # what this process is waiting for; the pipeline knows
    _step: int = 0
    _since: float = field(default_factory=time.monotonic)
    _peers: dict[socket.socket, _Peer] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _noticed: threading.Event = field(default_factory=threading.Event)  # that another is lost or has failed
    _ending: threading.Event = field(default_factory=threading.Event)  # with an error
    _finished: threading.Event = field(default_factory=threading.Event)  # here
    _all_done: threading.Event = field(default_factory=threading.Event)

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

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and self._count > 1:
            if isinstance(error, jax.errors.JaxRuntimeError) and self._noticed.wait(NOTICE_S):
                self._thread.join()  # what came of a lost process is told and ended there
            self._ending.set()
            code = self.tell_failure(error)
            self._say({"failed": f"process {self._index} has failed: {_first_line(error)}"})
            self._linger()
            _end(code)
        if self._count > 1:
            # Until the others are done too: a failure during shutdown is still detected.
            self._finished.set()
            if self._index != 0:
                self._say({"done": True})
            while self._thread.is_alive() and not self._all_done.wait(1):
                pass
        self._stop.set()
        for connection in list(self._peers):
            connection.close()

    def step_ended(self, row: Any = None) -> None:
        """To be called after every step: the limit for the next one begins."""
        self._step, self._since = self._step + 1, time.monotonic()

    def _listen(self) -> None:
        # The others reach process 0 where they reach the coordinator of jax.distributed.
        family, (address, *_) = resolve_address(distributed_state().coordinator_address)
        server = socket.create_server((address, 0), family=family)
        token = secrets.token_hex(16)
        hub = {"address": address, "port": server.getsockname()[1], "token": token}
        put_text(f"watch/{call_number('watch')}", json.dumps(hub))
        server.settimeout(JOIN_TIMEOUT_S)
        while len(self._peers) < self._count - 1:
            try:
                connection, _ = server.accept()
            except TimeoutError as error:
                missing = sorted(set(range(1, self._count)) - {peer.process for peer in self._peers.values()})
                raise TimeoutError(
                    f"process {', '.join(map(str, missing))} did not come to process 0 ({address}) within "
                    f"{JOIN_TIMEOUT_S} s. Every process must reach it there, on a port that it chooses."
                ) from error
            connection.settimeout(10)
            try:
                hello = json.loads(_line(connection))
                known = isinstance(hello, dict) and hello.get("token") == token
            except (ValueError, OSError):
                known = False
            if known:
                self._add(connection, int(hello["process"]))
            else:
                connection.close()  # a stranger
        server.close()

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
        said = looked = time.monotonic()
        while not self._stop.is_set():
            if not self._peers:
                time.sleep(TICK_S)
            for key, _ in self._selector.select(TICK_S) if self._peers else ():
                self._read(key.fileobj)  # pyright: ignore[reportArgumentType]
            now = time.monotonic()
            if now - looked > self.peer_timeout_s / 2:  # this process was stopped itself: the others' words come late
                for peer in self._peers.values():
                    peer.heard = now
            looked = now
            if now - said >= HEARTBEAT_S:
                said = now
                self._say({})
            self._judge(now)
            self.waiting()  # lets go of what has arrived

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
            self._forget(connection)
            if not (peer.done or self._stop.is_set() or self._ending.is_set()):
                self._lost(f"process {peer.process} is gone: its connection is closed")
            return
        peer.heard = time.monotonic()
        *lines, peer.unread = (peer.unread + data).split(b"\n")
        for line in lines:
            self._hear(peer, json.loads(line))

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._peers[connection]

    def _hear(self, peer: _Peer, message: dict[str, Any]) -> None:
        if self._ending.is_set():
            return
        if "failed" in message:
            self._noticed.set()
            if self._index == 0:
                self._say(message, but=peer.process)
            time.sleep(GRACE_S)
            self._end(message["failed"])
        if "lost" in message:
            self._noticed.set()
            time.sleep(SETTLE_S)
            self._end(message["lost"])
        if "done" in message:
            peer.done = True
            if self._index != 0:  # the hub says it last
                self._all_done.set()

    def _judge(self, now: float) -> None:
        if self._ending.is_set():
            return
        for connection, peer in list(self._peers.items()):
            if now - peer.heard > self.peer_timeout_s and not peer.done:
                self._forget(connection)
                self._lost(f"process {peer.process} has said nothing for {now - peer.heard:.0f} s: stopped, or stuck")
        if self._finished.is_set():
            if self._index == 0 and not self._all_done.is_set() and all(peer.done for peer in self._peers.values()):
                self._say({"done": True})
                self._all_done.set()
        elif self.step_timeout_s is not None and now - self._since > self.step_timeout_s:
            text = f"no step has ended within {self.step_timeout_s:.0f} s, after {self._step} of this start"
            sys.stderr.flush()
            faulthandler.dump_traceback(all_threads=True)
            self._say({"failed": f"process {self._index}: {text}"})
            self._end(text)

    def _lost(self, text: str) -> None:
        self._noticed.set()
        if self._index == 0:
            self._say({"lost": text})
            time.sleep(SETTLE_S)
        self._end(text)

    def _say(self, message: dict[str, Any], but: int | None = None) -> None:
        """To the hub, or from it to all others, except process `but`."""
        data = json.dumps(message).encode() + b"\n"
        for connection, peer in list(self._peers.items()):
            if peer.process != but:
                with suppress(OSError):  # its end is noticed where it is read
                    connection.send(data)  # a few bytes: they fit the buffer of the socket, or nobody reads it

    def _end(self, text: str) -> None:
        if self._ending.is_set():  # by an error of its own
            return
        waited = self.waiting()
        lines = [f"flax-mesh: {text}"]
        lines += [f"flax-mesh: process {self._index} was waiting: {what}" for what in waited[:4]]
        if len(waited) > 4:
            lines.append(f"flax-mesh: ... and for {len(waited) - 4} arrays more")
        lines.append(f"flax-mesh: process {self._index} ends with exit code {LOST}; the last checkpoint is whole")
        os.write(2, ("\n".join(lines) + "\n").encode())  # at once: JAX may be about to abort
        self._ending.set()
        self._linger()
        _end(LOST)

    def _linger(self) -> None:
        """Process 0 goes last: JAX aborts the others as soon as its coordinator is gone."""
        until = time.monotonic() + LINGER_S
        while self._index == 0 and self._peers and time.monotonic() < until:
            if threading.current_thread() is not self._thread:
                time.sleep(TICK_S)  # the other thread reads
                continue
            for key, _ in self._selector.select(TICK_S):
                self._read(key.fileobj)  # pyright: ignore[reportArgumentType]


def _line(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n") and len(data) < 4096:
        if not (more := connection.recv(1024)):
            break
        data += more
    return data


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _end(code: int) -> None:
    """Without the exit handlers, which wait for the other processes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
