"""A process that compiles, and its answers: progress, then the result."""

import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from flax_mesh.errors import ConfigError
from flax_mesh.plan.compile.target import environment
from flax_mesh.plan.topology import Topology
from flax_mesh.text import shortened

COMMAND = ("-P", "-m", "flax_mesh.plan.compile.worker")  # -P: a file such as jax.py in the folder is not imported
FATAL = re.compile(r"^(?:F\d{4} .*?\] |.*?Check failed|.*?Fatal Python error)")
CODE = re.compile(r"\bE\d{4}: ")  # of libtpu: "E1001: CompileTimeScopedVmemOom: ..."
MOST = 400  # characters of an error


def ask(
    request: Mapping[str, object], topology: Topology, limit: float, say: Callable[[str], None]
) -> tuple[str, dict[str, Any]]:
    """("result" or "refused", its value). Raises a ConfigError in one line for everything else."""
    with tempfile.TemporaryDirectory(prefix="flax-mesh-") as folder:
        messages = Path(folder, "messages")
        with messages.open("wb") as errors:
            child = subprocess.Popen(
                [sys.executable, *COMMAND],
                env=environment(topology, os.environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        try:
            key, value = _answer(child, {**request, "messages": str(messages)}, limit, say)
        finally:
            child.kill()
            child.wait()
            for stream in (child.stdin, child.stdout):
                if stream is not None:
                    stream.close()
        text = messages.read_text(encoding="utf-8", errors="replace")
    if key in ("result", "refused"):
        return key, value
    if key == "ended":
        raise ConfigError(f"the compiler for {topology.text} ended {how_it_ended(value, text)}")
    problems = value if isinstance(value, list) else [f"the compiler for {topology.text}: {first_message(value)}"]
    raise ConfigError(problems)


def _answer(
    child: "subprocess.Popen[str]", request: Mapping[str, object], limit: float, say: Callable[[str], None]
) -> tuple[str, Any]:
    """The last line of the process; ("ended", exit code) if it has ended without one."""
    assert child.stdin is not None and child.stdout is not None
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(child.stdout, lines), daemon=True).start()
    deadline, last = time.monotonic() + limit, "starting"
    try:
        child.stdin.write(json.dumps(request) + "\n")
        child.stdin.flush()  # the pipe stays open: its end is the end of the process
    except BrokenPipeError:
        return "ended", child.wait()
    while True:
        try:
            line = lines.get(timeout=max(deadline - time.monotonic(), 0))
        except queue.Empty:
            raise ConfigError(
                f"compiling took longer than the limit of {limit:g} s and was stopped while {last}; raise --limit, or "
                "set model.scan=true, which compiles one layer for all"
            ) from None
        if not line:
            return "ended", child.wait()
        ((key, value),) = json.loads(line).items()
        if key != "progress":
            return key, value
        last = value
        say(value)


def _read(stream: IO[str], lines: "queue.Queue[str]") -> None:
    try:
        for line in stream:
            lines.put(line)
    except ValueError:  # closed while it was read: the process was killed
        pass
    lines.put("")


def how_it_ended(code: int, messages: str) -> str:
    """`by SIGABRT: Check failed ...`, with the first message that names a reason."""
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    lines = [line for line in messages.splitlines() if line.strip()]
    reason = next((line for line in lines if FATAL.match(line)), lines[-1] if lines else "it printed no reason")
    return f"{how}: {shortened(reason.strip(), MOST)}"


def first_message(text: str) -> str:
    """A compiler's error from its code of libtpu on, or else its first line."""
    match = CODE.search(text)
    return shortened(" ".join((text[match.start() :] if match else text.strip().split("\n", 1)[0]).split()), MOST)
