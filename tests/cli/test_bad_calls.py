"""Every bad call and every bad command, of those that a seed draws, is answered by a short error of flax_mesh."""

import jax
import pytest

from flax_mesh.errors import MOST, ConfigError, ShardingError, limited
from flax_mesh.tree import check_dtype
from tests.cli import bad_calls
from tests.cli.bad_calls import Call, finding, problem_of_output

COUNT = 1500  # calls, and as many commands: about 30 s


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_bad_calls_and_commands_of_a_seed_end_in_short_errors(seed, tmp_path):
    if jax.default_backend() != "cpu":
        pytest.skip("the meshes require eight CPU devices")
    answers = bad_calls.run(seed, COUNT, tmp_path)
    assert not answers.findings, "\n".join(answers.findings)
    assert answers.refused > COUNT and answers.accepted > COUNT // 10


def found(error: BaseException) -> str | None:
    """The finding of a call that another library ends with this error."""

    def call(x: object) -> object:
        raise error

    return finding(Call("call", call, {"x": 3}, ()))


def test_answers_that_are_no_short_errors_of_flax_mesh_are_found():
    others = (
        KeyError("x"),
        AttributeError("x"),
        IndexError("x"),
        ZeroDivisionError("x"),
        ValueError("x"),
        OSError("x"),
    )
    assert all(type(error).__name__ in (found(error) or "") for error in others)
    assert found(AssertionError()) == "AssertionError without a message"
    assert found(ValueError("x" * 2001)) == "ValueError of 2001 characters"
    assert found(ConfigError("x" * 5000)) == "" == found(ShardingError("x\n" * 5000))
    assert finding(Call("check_dtype", check_dtype, {"dtype": "x"}, ())) == ""  # a TypeError that names its argument
    assert "names no argument" in (finding(Call("call", lambda other: check_dtype(other), {"other": "x"}, ())) or "")
    assert finding(Call("check_dtype", check_dtype, {"dtype": "int8"}, ())) is None


def test_outputs_of_commands_that_are_no_errors_are_found():
    line = "flax-mesh: run.steps must be at least 1, got 0\n"
    assert not problem_of_output(2, line) and not problem_of_output(0, "")
    for code, text in (
        (1, line),
        (2, ""),
        (0, line),
        (2, f"{line}Traceback (most recent call last):\n"),
        (2, "steps\n"),
    ):
        assert problem_of_output(code, text)
    assert problem_of_output(2, f"flax-mesh: {'x' * 2001}")


def test_a_long_text_of_lines_says_how_many_are_left_out():
    assert limited(["a", "b"], end="c") == ["a", "b", "c"]
    lines = limited([f"{number}: {'x' * 90}" for number in range(50)])
    assert len("\n".join(lines)) <= MOST and lines[-1] == f"and {50 - len(lines) + 1} more lines"
    head, line, more = limited(["head:", "x" * 5000, "y"])
    assert (head, line[:9], line[-18:], more) == ("head:", "x" * 9, "(5,000 characters)", "and 1 more line")
    assert len(f"{head}\n{line}\n{more}") <= MOST
    error = ConfigError(["x" * 300] * 50, head="FILE is wrong:", repair="Edit it.")
    assert len(str(error)) <= MOST and str(error).startswith("FILE is wrong:\n") and str(error).endswith("\n  Edit it.")
    assert ConfigError(["x" * 1999, "y"]).lines == ["x" * 1999, "y"]
