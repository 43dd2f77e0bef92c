"""Sends requests to child.py, which runs the package of a tokenizer. ConfigError if it fails or ends."""

import json
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from flax_mesh.data.tokenizers import child as tokenizer_child
from flax_mesh.data.tokenizers.child import WAITING
from flax_mesh.errors import ConfigError
from flax_mesh.text import bytes_text, shortened

SECONDS = 60  # of computation for a request
CHARACTERS = 10_000  # of a request for which it has one second more
REPAIR = "replace it by the tokenizer of the model"
UNREADABLE = {
    "tokenizers": f"{{}} is not a tokenizer that the package tokenizers reads: {{}}; {REPAIR}",
    "transformers": "the tokenizer of {} cannot be read: {}; replace its files by those of the model",
}


class Reply(NamedTuple):
    """The result of a request, or its problem, and whether the process has ended because of it."""

    value: Any
    problem: str | None
    has_ended: bool = False


class Process:
    """A tokenizer in a process, which is started again after an end. Raises ConfigError if it cannot be read.

    `facts` are known of a tokenizer of the package transformers.
    """

    def __init__(self, package: str, path: Path):
        self._package, self.path, self._lock = package, path, Lock()
        self._child: subprocess.Popen[str] | None = None
        self._limit = ""
        with self._lock:
            self._start()

    def ask(self, request: Mapping[str, object]) -> Reply:
        text = json.dumps(request)
        seconds = SECONDS + len(text) // CHARACTERS
        with self._lock:
            return self._reply(self._child or self._start(), seconds, f"{seconds} {text}")

    def _start(self) -> "subprocess.Popen[str]":
        command = [sys.executable, "-P", tokenizer_child.__file__, self._package, str(self.path), str(SECONDS)]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        child = self._child = subprocess.Popen(command, encoding="ascii", stdin=pipe, stdout=pipe, stderr=null)
        self._end = weakref.finalize(self, _end, child)
        assert child.stdout is not None
        if line := child.stdout.readline():
            memory, is_earlier = json.loads(line)
            self._limit = f"at most {bytes_text(memory)} of memory{' (ulimit -v)' * is_earlier}"
        self.facts, problem, has_ended = self._reply(child, SECONDS)
        if problem is not None:
            self._stop()
            if "ulimit" in self._limit and not has_ended:
                problem += f", with {self._limit}"
            raise ConfigError(UNREADABLE[self._package].format(self.path, problem))
        return child

    def _reply(self, child: "subprocess.Popen[str]", seconds: int, request: str = "") -> Reply:
        assert child.stdin is not None and child.stdout is not None
        try:
            if request:
                child.stdin.write(request + "\n")
                child.stdin.flush()
            line = child.stdout.readline()
        except BrokenPipeError:
            line = ""
        except BaseException:  # as KeyboardInterrupt: the reply would be taken for the reply to the next request
            self._stop()
            raise
        if not line:
            self._stop()
            return Reply(None, self._how_it_ended(child.returncode, seconds), has_ended=True)
        value, problem = json.loads(line)
        return Reply(value, None if problem is None else shortened(" ".join(problem.split())))

    def _stop(self) -> None:
        self._end()
        self._child = None

    def _how_it_ended(self, code: int, seconds: int) -> str:
        package = f"the package {self._package}"
        if code in (-signal.SIGPROF, -signal.SIGALRM):
            return f"{package} did not end in {seconds if code == -signal.SIGPROF else seconds * WAITING} s"
        if code == tokenizer_child.OUT_OF_MEMORY:
            return f"{package} needs more memory: its process has {self._limit}"
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        return f"{package} ended its process {how}; it had {self._limit or 'too little memory to start'}"


def _end(child: "subprocess.Popen[str]") -> None:
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        with suppress(BrokenPipeError):  # of a request that was not sent
            pipe.close()
    try:
        child.wait(timeout=0.2)  # it ends at the end of its input
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
