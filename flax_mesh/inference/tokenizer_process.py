"""Sends requests to tokenizer_child.py, which runs the package tokenizers. ConfigError if it fails or ends."""

import json
import signal
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from flax_mesh.errors import ConfigError
from flax_mesh.inference import tokenizer_child
from flax_mesh.text import shortened

SECONDS = 60  # for a request
CHARACTERS = 10_000  # of a text or ids for which a request has one second more
REPAIR = "replace it by the tokenizer of the model"


class TokenizerProcess:
    """A tokenizer.json in a process, which is started again after an end. Raises ConfigError if it cannot be read."""

    def __init__(self, path: Path):
        self._path, self._lock = path, Lock()
        self._child: subprocess.Popen[str] | None = None
        with self._lock:
            self._start()

    def encode(self, text: str, *, special: bool) -> tuple[list[int], list[int]]:
        """Ids of a text, and how many characters precede the end of each of them."""
        return self._ask("encode every text", len(text), {"text": text, "special": special})

    def decode(self, ids: list[int]) -> str:
        return self._ask("decode all ids", len(ids), {"ids": ids})

    def _ask(self, must: str, size: int, request: dict[str, Any]) -> Any:
        seconds = SECONDS + size // CHARACTERS
        with self._lock:
            child = self._child or self._start()
            reply, problem = self._reply(child, seconds, json.dumps(request | {"seconds": seconds}))
        if problem is not None:
            raise ConfigError(f"{self._path} must {must}, and failed: {problem}; {REPAIR}, or use another text")
        return reply

    def _start(self) -> "subprocess.Popen[str]":
        command = [sys.executable, "-P", tokenizer_child.__file__, str(self._path), str(SECONDS)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        child = self._child = subprocess.Popen(command, encoding="ascii", **pipes)
        self._end = weakref.finalize(self, _end, child)
        _, problem = self._reply(child, SECONDS)
        if problem is not None:
            self._stop()
            what = "is not a tokenizer that the package tokenizers reads"
            raise ConfigError(f"{self._path} {what}: {problem}; {REPAIR}")
        return child

    def _reply(self, child: "subprocess.Popen[str]", seconds: int, request: str = "") -> tuple[Any, str | None]:
        """The result of a request, or its problem."""
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
            return None, _how_it_ended(child.returncode, seconds)
        reply, problem = json.loads(line)
        return reply, None if problem is None else shortened(" ".join(problem.split()))

    def _stop(self) -> None:
        self._end()
        self._child = None


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


def _how_it_ended(code: int, seconds: int) -> str:
    if code == -signal.SIGALRM:
        return f"the package tokenizers did not end in {seconds} s"
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
    return f"the package tokenizers ended its process {how}"
