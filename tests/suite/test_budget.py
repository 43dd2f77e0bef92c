"""The budget of the default tests: how counts are compared with limits."""

from collections import Counter

from tests.suite import budget


def test_a_count_above_its_limit_is_one_line_with_both_numbers():
    limits = {"a.py": Counter(programs=5, runs=1)}
    assert budget.problems({"a.py": {"programs": 5, "runs": 1}}, limits) == []
    assert budget.problems({"a.py": {"programs": 6, "processes": 1}, "b.py": {"runs": 2}}, limits) == [
        "a.py: 1 processes, but its limit is 0",
        "a.py: 6 programs, but its limit is 5",
        "b.py: 2 runs, but its limit is 0",
    ]


def test_limits_are_read_as_they_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(budget, "PATH", tmp_path / "tests" / "budget.txt")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").touch()
    budget.write_limits({"tests/test_a.py": {"programs": 3}, "tests/test_gone.py": {"runs": 1}})
    assert budget.read_limits() == {"tests/test_a.py": Counter(programs=3)}
    assert budget.with_room({"programs": 100, "runs": 2}) == {"programs": 110, "runs": 2}
    assert budget.with_room({"programs": 0}) == {"programs": 0}
