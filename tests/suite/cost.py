"""CPU time of the default tests compared with the README's training, and the test files that need most of it.

    python -m tests.suite.cost     # both, their ratio and its limit
    pytest --cost                  # the dearest files of any run of pytest

CPU time includes child processes, and both start without compiled programs. Python writes its bytecode, as in
`.ci/run`; otherwise every process of pytest-xdist would compile all tests again. Nothing else may run meanwhile:
programs that share a core slow each other down.
"""

import os
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

LIMIT = 6.5  # CPU time of the default tests / CPU time of the training
DEAREST = 20  # files to print
ROOT = Path(__file__).parents[2]
REST = "(imports and collection, in all processes)"


def cpu_seconds() -> float:
    """The CPU time of this process so far, and of its child processes that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


class CostPlugin:
    """Adds up the CPU time of every test file in each process of pytest-xdist; the main process prints the sums."""

    def __init__(self) -> None:
        self.own: Counter[str] = Counter()  # file -> seconds in this process
        self.workers: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        before = cpu_seconds()
        try:
            return (yield)
        finally:
            self.own[item.nodeid.partition("::")[0]] += cpu_seconds() - before  # pyright: ignore[reportArgumentType]

    @pytest.hookimpl(optionalhook=True)  # of pytest-xdist
    def pytest_testnodedown(self, node: Any) -> None:
        self.workers.update(getattr(node, "workeroutput", {}).get("cost", {}))

    @pytest.hookimpl(tryfirst=True)  # before pytest-xdist ends its processes, whose time would count twice
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.own[REST] = cpu_seconds() - self.own.total()  # pyright: ignore[reportArgumentType]
        getattr(session.config, "workeroutput", {})["cost"] = dict(self.own)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        seconds = self.own + self.workers
        terminalreporter.section(f"CPU time of {len(seconds) - 1} files: {seconds.total():.0f} s")
        for file, one in seconds.most_common(DEAREST + (REST in seconds)):
            terminalreporter.line(f"{one:8.1f} s {file}")


def measured(name: str, arguments: Sequence[str], *, shows_output: bool) -> tuple[int, float]:
    """The exit code and the CPU time of Python with these arguments."""
    left_out = ("JAX_COMPILATION_CACHE_DIR", "PYTHONDONTWRITEBYTECODE")
    environment = {key: value for key, value in os.environ.items() if key not in left_out}
    output = None if shows_output else subprocess.DEVNULL
    before = cpu_seconds()
    code = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, stdout=output).returncode
    seconds = cpu_seconds() - before
    print(f"{name}: {seconds:.0f} s of CPU time, exit code {code}", flush=True)
    return code, seconds


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        train = ("-m", "flax_mesh.cli", "train", "recipes/tiny.py", f"run.folder={folder}/tiny")
        train_code, train_seconds = measured("flax-mesh train recipes/tiny.py", train, shows_output=False)
    test_code, test_seconds = measured("pytest", ("-m", "pytest", "--cost", "-q"), shows_output=True)
    ratio = test_seconds / train_seconds
    print(f"ratio: {ratio:.2f}, and at most {LIMIT}")
    return int(bool(train_code or test_code or ratio > LIMIT))


if __name__ == "__main__":
    sys.exit(main())
