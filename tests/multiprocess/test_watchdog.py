"""`Watch` in several processes: all end with the reason of the one that fails, is lost, or takes too long."""

import json
import socket
import threading
from collections import defaultdict
from contextlib import suppress
from itertools import chain

import pytest

from flax_mesh.processes import Watch, watchdog
from flax_mesh.processes.agree import get_text
from tests.multiprocess.in_threads import in_threads
from tests.multiprocess.processes import TIME_LIMIT_S

FAILED = 3  # the exit code of a process that fails


class Exits:
    """The exit code and the text on standard error of each process that its watch ends."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[int, str]] = {}
        self.printed: defaultdict[int, list[str]] = defaultdict(list)  # by thread
        self.connections: defaultdict[int, list[socket.socket]] = defaultdict(list)
        self.has_ended = [threading.Event() for _ in range(3)]  # by process

    def write(self, text: str) -> None:
        self.printed[threading.get_ident()].append(text)

    def exit_after(self, report, code):
        watch = report.func.__self__
        if watch._index not in self.found:
            code = report()
            self.end(watch, code, "".join(self.printed[threading.get_ident()]))
        if threading.current_thread() is not watch._thread:  # that thread stops by itself
            raise SystemExit

    def end(self, watch: Watch, code: int, text: str = "") -> None:
        watch._stop.set()
        for connection in self.connections[watch._index]:
            with suppress(OSError):  # the other side may have closed it
                connection.shutdown(socket.SHUT_RDWR)
        self.found[watch._index] = code, text
        self.has_ended[watch._index].set()


@pytest.fixture
def exits(monkeypatch):
    found, add = Exits(), Watch._add

    def keep(watch, connection, process):
        found.connections[watch._index].append(connection)
        add(watch, connection, process)

    monkeypatch.setattr(watchdog, "_exit_after", found.exit_after)
    monkeypatch.setattr(watchdog, "write_stderr", found.write)
    monkeypatch.setattr(watchdog, "JOIN_TIMEOUT_S", 60)
    monkeypatch.setattr(Watch, "_add", keep)
    for name in ("HEARTBEAT_S", "TICK_S", "NOTICE_S", "SETTLE_S", "GRACE_S"):
        monkeypatch.setattr(watchdog, name, 0.02)
    yield found
    for thread in threading.enumerate():
        if thread.name == "flax_mesh_watch":
            thread.join(TIME_LIMIT_S)
            assert not thread.is_alive()
    for connection in chain(*found.connections.values()):
        connection.close()


def fail(watch: Watch, exits: Exits) -> None:
    raise RuntimeError("no room\nfor more")


def disappear(watch: Watch, exits: Exits) -> None:
    exits.end(watch, 9)


def fall_silent(watch: Watch, exits: Exits) -> None:
    watch._send = lambda message, exclude=None: None


def stand_still(watch: Watch, exits: Exits) -> None:
    watch.step_ended()
    watch.step_timeout_s = 0.1


def train(exits: Exits, number: int, who: int, what) -> None:
    """A process that goes on until its watch ends it, or with process `who` until `what` happens."""
    limit_s = 0.5 if what is fall_silent and number == 0 else 60.0
    with Watch(lambda error: FAILED, None, limit_s, lambda: [f"array {i}" for i in range(6)]) as watch:
        if number == who:
            what(watch, exits)
        assert exits.has_ended[number].wait(TIME_LIMIT_S)
        raise SystemExit


@pytest.mark.parametrize(
    ("count", "who", "what", "code", "own", "others"),
    [
        (3, 1, fail, FAILED, "", "process 1 has failed: RuntimeError: no room\n"),
        (3, 0, fail, FAILED, "", "process 0 has failed: RuntimeError: no room\n"),
        (3, 2, disappear, 9, "", "lost process 2: its connection is closed"),
        (3, 0, disappear, 9, "", "lost process 0: its connection is closed"),
        (2, 1, fall_silent, 5, "lost process 0: its connection is closed", "lost process 1: no heartbeat for"),
        (3, 1, stand_still, 5, "no step has finished within 0 s, after 1 step", "process 1: no step has finished"),
    ],
)
def test_all_processes_end_with_the_reason_of_one(count, who, what, code, own, others, exits, monkeypatch):
    in_threads(monkeypatch, count, lambda number: train(exits, number, who, what))
    assert sorted(exits.found) == list(range(count))
    for number, (found, text) in exits.found.items():
        assert found == (code if number == who else 5), text
        assert (own if number == who else others) in text
        if found == 5:
            assert f"process {number} was waiting: array 3" in text and "... and for 2 more arrays" in text
    assert ("Current thread" in exits.found[who][1]) == (what is stand_still)


def test_messages_of_a_process_that_is_not_admitted_yet_are_read_afterwards(exits, monkeypatch):
    accept, admitted = Watch._accept, exits.has_ended[1]
    monkeypatch.setattr(Watch, "_accept", lambda watch, *rest: admitted.wait(TIME_LIMIT_S) and accept(watch, *rest))
    in_threads(monkeypatch, 2, lambda number: train(exits, number, 1, fail))
    assert "process 1 has failed: RuntimeError: no room\n" in exits.found[0][1]


def test_a_heartbeat_after_the_first_message_is_no_part_of_it():
    here, there = socket.socketpair()
    with here, there:
        there.sendall(b"1\n.")
        assert (watchdog._line(here), here.recv(9)) == (b"1\n", b".")


def test_processes_that_finish_wait_for_each_other_and_strangers_are_not_admitted(exits, monkeypatch):
    finished: list[int] = []

    def process(number):
        if number == 2:
            hub = json.loads(get_text("watch/1", 60))
            for line in (b"not JSON\n", json.dumps({**hub, "token": "other", "process": 1}).encode() + b"\n", b"1\n"):
                with socket.create_connection((hub["address"], hub["port"])) as stranger:
                    stranger.sendall(line)
                    assert stranger.recv(1) == b""
        with Watch(lambda error: FAILED):
            finished.append(number)
        assert sorted(finished) == [0, 1, 2]
        return "done"

    assert in_threads(monkeypatch, 3, process) == ["done"] * 3 and not exits.found


def test_process_0_names_the_processes_that_do_not_connect(exits, monkeypatch):
    monkeypatch.setattr(watchdog, "JOIN_TIMEOUT_S", 0.1)

    def process(number):
        if number == 0:
            with pytest.raises(TimeoutError, match=r"process 1, 2 did not connect to process 0 \(127.0.0.1\)"):
                Watch(lambda error: FAILED).__enter__()

    in_threads(monkeypatch, 3, process)
