"""The lease of a run folder in a store: what the locks of files are for a folder of this machine."""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from flax_mesh.checkpoint.read import plain
from flax_mesh.errors import ConfigError
from flax_mesh.store import StorePath

LEASE = "lease.json"
SECONDS = 60.0  # a lease that was not renewed for so long ends
RENEWED = 15.0  # seconds between two renewals
_POLLED = 2.0


class Lease:
    """The object lease.json in the `folder` of a run, which the run creates, renews and removes.

    No clocks of two machines are compared: a run that finds a lease waits until its holder renews it, and then refuses
    to start, or until `SECONDS` have passed, and then takes the lease over. The lease of a run that was killed on this
    machine is taken over at once, because `here`, the working copy that every holder locks, is locked by this run.
    """

    def __init__(self, folder: StorePath, here: Path, say: Callable[[str], None]):
        self._folder, self._path, self._say = folder, folder / LEASE, say
        self._mark, self._host = here / ".lease", socket.gethostname()
        self._id = f"{self._host}/{uuid.uuid4()}"
        self._since, self._renewals = datetime.now(UTC).isoformat(timespec="seconds"), 0
        self._lock, self._loss = threading.Lock(), ""

    def claim(self) -> None:
        """Take the lease. ConfigError if another run has it."""
        content = self._read()
        if content is not None and not self._is_left_here(content):
            content = self._waited(content)
        if not self._path.exchange(lambda now: now == content, self._record()):
            raise self._in_use(self._read())
        self._mark.write_text(self._id)

    @property
    def is_lost(self) -> bool:
        return bool(self._loss)

    def check(self) -> None:
        """ConfigError if the lease is lost, as far as this run knows, or the working copy was removed."""
        if not (self._loss or self._mark.is_file()):
            here = self._mark.parent
            self._loss = f"its files on this machine, {here}, were removed"
        if self._loss:
            raise ConfigError(
                f"run.folder={self._folder}: {self._loss}; this run ends, and saves nothing more there. Start it again "
                "to resume"
            )

    def renew(self) -> None:
        """`check`, after a renewal. Several threads may call it."""
        with self._lock:
            self._renewals += 1
            if not self._loss and not self._path.exchange(self._is_mine, self._record()):
                content = self._read()
                late = f"since this run did not renew its lease for {SECONDS:.0f} s"
                taken = f"it was taken over by {_holder(content or b'')}, {late}"
                self._loss = f"{LEASE} was removed" if content is None else taken
                self._say(f"warning: run.folder={self._folder}: {self._loss}; this run ends at its next save")
        self.check()

    def release(self) -> None:
        with suppress(OSError):  # it ends by itself
            self._path.exchange(self._is_mine, None)
        self._mark.unlink(missing_ok=True)

    def _waited(self, content: bytes) -> bytes | None:
        """Wait until nobody has the lease `content`; returns the content of the object then, None if it is gone."""
        holder, until = _holder(content), time.monotonic() + SECONDS
        self._say(f"run: {self._folder} is in use by {holder}; waiting up to {SECONDS:.0f} s for its end")
        while time.monotonic() < until:
            time.sleep(min(_POLLED, SECONDS))
            if (now := self._read()) is None:
                return None
            if now != content:
                raise self._in_use(now)
        self._say(f"run: taking over the lease of {holder}, which was not renewed for {SECONDS:.0f} s")
        return content

    def _in_use(self, content: bytes | None) -> ConfigError:
        return ConfigError(
            f"run.folder={self._folder} is in use by another run, {_holder(content or b'')}, which renews its lease "
            f"({LEASE}); stop that run, or use another folder. If it was killed, its lease ends {SECONDS:.0f} s later"
        )

    def _read(self) -> bytes | None:
        with suppress(FileNotFoundError):
            return self._path.read_bytes()
        return None

    def _record(self) -> bytes:
        holder = f"{self._host}, process {os.getpid()}"
        return json.dumps(
            {"holder": holder, "since": self._since, "id": self._id, "renewals": self._renewals, "seconds": SECONDS}
        ).encode()

    def _is_mine(self, content: bytes | None) -> bool:
        return _field(content or b"", "id") == self._id

    def _is_left_here(self, content: bytes) -> bool:
        """Whether a run on this machine took the lease in this working copy, and cannot run any more."""
        name = _field(content, "id")
        with suppress(FileNotFoundError):
            return name.startswith(f"{self._host}/") and self._mark.read_text() == name
        return False


def _holder(content: bytes) -> str:
    return plain(f"{_field(content, 'holder')} since {_field(content, 'since')}")


def _field(content: bytes, name: str) -> str:
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        return str(json.loads(content)[name])[:200]
    return "unknown"
