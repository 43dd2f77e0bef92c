"""Problems are records: code reads their fields, and one place forms their lines."""

import copy

from flax_mesh.errors import ConfigError, Problem


def test_a_problem_is_its_line_and_can_be_renamed():
    problem = Problem("data.batch_size", "is not divisible by 4 (dp=4)", "use a multiple", value="6 / 3", general="any")
    assert problem == "data.batch_size=6 / 3 is not divisible by 4 (dp=4); use a multiple"
    assert (problem.setting, problem.value, problem.general) == ("data.batch_size", "6 / 3", "any")
    assert problem.renamed("--batch") == "--batch=6 / 3 is not divisible by 4 (dp=4); use a multiple"
    assert problem.renamed("--batch").repair == "use a multiple"
    assert Problem("data.source", ": no such file").within("--data") == "--data: data.source: no such file"


def test_an_error_has_its_problems_without_head_and_repair():
    error = ConfigError(
        [Problem("key", "is unknown", can_ignore=True), "two"], head="FILE is wrong:", repair="Edit it."
    )
    assert error.problems == ["key is unknown", "two"] and error.can_ignore
    assert error.lines == ["FILE is wrong:", "  key is unknown", "  two", "  Edit it."] == str(error).splitlines()
    copied = copy.deepcopy(error)
    assert copied.lines == error.lines and copied.can_ignore and copied.problems[0].setting == "key"
    plain = ConfigError("one")
    assert plain.lines == plain.problems == ["one"] and not plain.can_ignore
    assert plain.problems[0].general == "one"


def test_a_long_value_is_shortened_in_the_line_and_complete_in_the_field():
    problem = Problem("model.note", "is too long", "use a shorter one", value="x" * 250_000)
    assert problem.startswith("model.note=xxx") and problem.endswith(
        "x... (250,000 characters) is too long; use a shorter one"
    )
    assert len(problem) < 2200 and len(problem.value) == 250_000
    for error in (
        ConfigError([problem, "y" * 9999]),
        ConfigError(Problem("", "must be text, got " + "z" * 9999, "repair it")),
    ):
        assert all(len(line) < 2200 for line in error.lines) and len(str(error)) < 4500
    assert str(error).endswith("(10,017 characters); repair it")
