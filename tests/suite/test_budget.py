"""The budget of the default tests: how counts are compared with limits."""

import subprocess
import sys
from collections import Counter

import jax
import jax.numpy as jnp

from flax_mesh.recipe.overrides import to_lines
from flax_mesh.train.run_folder import MetricsFile
from tests.suite import budget
from tests.train.bigram import recipe


def test_programs_runs_and_processes_of_a_test_are_counted(request, tmp_path):
    plugin = request.config.pluginmanager.get_plugin("budget")
    before = Counter(plugin.counts.get("tests/suite/test_budget.py", {}))
    jax.jit(lambda x: 2 * x + 1)(jnp.zeros(7))  # one program; jnp.zeros is an operation
    subprocess.run([sys.executable, "-c", ""], check=True)
    subprocess.run(["true"], check=True)  # not Python
    file = MetricsFile(tmp_path, to_lines(recipe()), 0, print)
    file.write({"step": 1, "loss": 1.0})
    file.write({"step": 2, "loss": 1.0})
    file.close()
    counts = plugin.counts["tests/suite/test_budget.py"] - before
    assert counts == Counter(programs=1, runs=1, processes=1)


def test_a_count_above_its_limit_is_one_line_with_both_numbers():
    limits = {"a.py": Counter(programs=5, runs=1)}
    assert budget.problems({"a.py": {"programs": 5, "runs": 1}}, limits) == []
    counts = {"a.py": {"programs": 6, "processes": 1}, "b.py": {"runs": 2, "programs": budget.ROOM}}
    counts["c.py"] = {"programs at import": 1}
    assert budget.problems(counts, limits) == [
        "a.py: 1 processes, but its limit is 0",
        "a.py: 6 programs, but its limit is 5",
        "b.py: 2 runs, but its limit is 0",
        "c.py: 1 programs at import, but its limit is 0",
    ]


def test_limits_are_read_as_they_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(budget, "PATH", tmp_path / "tests" / "budget.txt")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").touch()
    budget.write_limits({"tests/test_a.py": {"programs": 3}, "tests/test_gone.py": {"runs": 1}})
    assert budget.read_limits() == {"tests/test_a.py": Counter(programs=3)}
    assert budget.with_room({"programs": 100, "runs": 2}) == {"programs": 110, "runs": 2}
    assert budget.with_room({"programs": 0}) == {"programs": 0}
