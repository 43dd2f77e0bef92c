"""The budget of the default tests: compiled programs, whole runs and child processes of every test file.

They are counted, not timed, so that the limits hold on every machine. tests/budget.txt contains the limits; a file that
exceeds one of them makes the run of pytest fail. `pytest --update-budget` writes the limits of the files that it runs:
the counts and a tenth more, since a program that an earlier file has compiled in the same process is not counted. The
programs of single operations, such as `jnp.zeros`, are not counted: they are small, and most files share them; a file
may compile none of them while it is imported, since every process of pytest-xdist imports all files. A run is
counted when it opens its metrics.jsonl; a test that opens the file often, such as a test of the file, counts each time.
"""

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import pytest

PATH = Path(__file__).parents[1] / "budget.txt"
KINDS = ("programs", "runs", "processes")
OPERATIONS = {name for module in (jax.lax, jax.numpy, jax.random) for name in dir(module)}
ROOM = 5  # programs that a file may compile besides those that were counted
Counts = dict[str, Counter[str]]  # test file -> kind -> number


def read_limits() -> Counts:
    lines = [line.split() for line in PATH.read_text().splitlines() if line and not line.startswith("#")]
    return {file: Counter(dict(zip(KINDS, map(int, numbers), strict=True))) for file, *numbers in lines}


def write_limits(limits: Mapping[str, Mapping[str, int]]) -> None:
    """Write the limits of all files that still exist. Files without any of the three are left out."""
    rows = {file: [counts.get(kind, 0) for kind in KINDS] for file, counts in limits.items()}
    lines = [f"{file} {' '.join(map(str, row))}" for file, row in sorted(rows.items()) if any(row)]
    existing = [line for line in lines if (PATH.parent.parent / line.split()[0]).exists()]
    PATH.write_text("\n".join([f"# file {' '.join(KINDS)}", *existing]) + "\n")


def with_room(counts: Mapping[str, int]) -> dict[str, int]:
    """A tenth more programs than counted, and ROOM at least; runs and processes exactly."""
    return {kind: n + max(ROOM, n // 10) if kind == "programs" and n else n for kind, n in counts.items()}


def problems(counts: Mapping[str, Mapping[str, int]], limits: Counts) -> list[str]:
    """One line for every count above its limit; the limits of a file without a row are ROOM programs."""
    found = []
    for file, kinds in sorted(counts.items()):
        own = limits.get(file, Counter(programs=ROOM))
        found += [
            f"{file}: {n} {kind}, but its limit is {own[kind]}" for kind, n in sorted(kinds.items()) if n > own[kind]
        ]
    return found


class BudgetPlugin:
    """Counts in every process of pytest-xdist; the main process compares the sums with the limits."""

    def __init__(self, config: pytest.Config):
        self.counts: Counts = {}
        self.updates = bool(config.getoption("--update-budget"))
        self.applies = config.getoption("markexpr") == "not slow" and config.getoption("platform") == "cpu"
        self._file = ""
        self._is_import = False
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        sys.addaudithook(self._on_audit)

    def _add(self, kind: str) -> None:
        if self._file:
            self.counts.setdefault(self._file, Counter())[kind] += 1

    def _on_duration(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        name = str(kwargs.get("fun_name")).removeprefix("jit(").removesuffix(")").lstrip("_")
        if "backend_compile" in event and self._is_import:
            self._add("programs at import")
        elif "backend_compile" in event and name not in OPERATIONS:
            self._add("programs")

    def _on_audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and "python" in Path(str(arguments[0])).name:
            self._add("processes")
        elif event == "open" and str(arguments[0]).endswith("metrics.jsonl") and arguments[1] == "a+":
            self._add("runs")

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Any:
        if isinstance(collector, pytest.Module):
            self._file, self._is_import = collector.nodeid, True
        try:
            return (yield)
        finally:
            self._file, self._is_import = "", False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._file = item.nodeid.partition("::")[0]
        try:
            return (yield)
        finally:
            self._file = ""

    @pytest.hookimpl(optionalhook=True)  # of pytest-xdist
    def pytest_testnodedown(self, node: Any) -> None:
        for file, kinds in getattr(node, "workeroutput", {}).get("budget", {}).items():
            self.counts.setdefault(file, Counter()).update(kinds)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)  # of a process of pytest-xdist
        if output is not None:
            output["budget"] = {file: dict(kinds) for file, kinds in self.counts.items()}
        elif self.updates:
            write_limits(read_limits() | {file: with_room(kinds) for file, kinds in self.counts.items()})
        elif self.applies and problems(self.counts, read_limits()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        lines = problems(self.counts, read_limits()) if self.applies else []
        if lines:
            terminalreporter.section("tests/budget.txt is exceeded", red=True)
            for line in [*lines, "make the tests cheaper, mark cases as slow, or raise the limit: --update-budget"]:
                terminalreporter.line(line)
