"""The figures of tests/ratchet.txt hold, and only fall."""

import ast
import subprocess

import pytest

from tests.suite import ratchet
from tests.suite.ratchet import FILE, Limit, lowered, problems, read, write
from tests.suite.tiers import find_base

FIGURES = {"lines of flax_mesh": 110, "lines of tests": 90, "Any": 7}
TEXT = "lines of flax_mesh 100\n    +9 kernels\n    +2 rewards\nlines of tests 90\nAny 7\n"


def test_no_figure_is_above_its_limit():
    """Delete what is not needed. A feature may raise a limit of lines: tests/README.md describes how."""
    assert not problems(read(FILE.read_text()), ratchet.measure())


def test_no_limit_is_above_the_limit_of_the_last_merge_but_for_rises_with_a_reason():
    command = ["git", "show", f"{find_base()}:tests/ratchet.txt"]
    shown = subprocess.run(command, cwd=FILE.parent, capture_output=True, text=True, check=False)
    if shown.returncode:
        pytest.skip("the last merge has no tests/ratchet.txt, or its commit is not here")
    before, now = read(shown.stdout), read(FILE.read_text())
    most = {name: limit.value for name, limit in before.items()}
    assert not problems(before, {name: limit.base for name, limit in now.items() if name in most})
    assert now.keys() >= before.keys()


def test_the_file_is_read_and_written_and_a_limit_is_lowered_with_its_rises():
    limits = read(TEXT)
    assert write(limits) == TEXT and limits["lines of flax_mesh"].value == 111
    assert not problems(limits, FIGURES) and lowered(limits, FIGURES) == {**limits, "lines of flax_mesh": Limit(110)}
    assert problems(limits, {**FIGURES, "Any": 8, "new": 0}) == ["Any: 8, limit 7", "new: 0, limit None"]
    assert lowered(limits, {**FIGURES, "Any": 8})["Any"] == Limit(7)  # never raised


@pytest.mark.parametrize("line", ["    +9 a reason", "Any 7\n    +1 a reason", "lines of tests 9\n    +5", "Any many"])
def test_a_line_without_a_figure_or_a_reason_is_refused(line):
    with pytest.raises(ValueError, match=r"must be|may only fall"):
        read(line)


def test_handlers_that_catch_everything_or_read_texts_are_counted():
    code = """
try: f()
except (OSError, Exception) as e: print(f"{e}", str(e), e.args, e.errno)
except KeyError as e: str(other)
except: pass
"""
    handlers = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ExceptHandler)]
    assert [*map(ratchet._is_broad, handlers)] == [True, False, True]
    assert [*map(ratchet._text_reads, handlers)] == [2, 0, 0]
