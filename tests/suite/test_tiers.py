"""Slices of the slow tests, and the folders that a change touches."""

import argparse
import re

import pytest

from tests.mutants import mutants_of
from tests.suite import tiers
from tests.suite.planted import PLANTED


def test_a_slice_is_the_same_for_all_cases_of_a_value_and_every_slice_has_tests():
    assert tiers.slice_of("a.py::f[x-1]") == tiers.slice_of("a.py::f[x-2]")
    assert {tiers.slice_of(f"a.py::f[{i}]") for i in range(40)} == set(range(tiers.SLICES))
    assert [tiers.slice_of(name) for name in ("a.py::f", "a.py::f[x]", "a.py::g")] == [2, 6, 4]  # on every machine


@pytest.mark.parametrize("text", ["4/4", "-1/4", "1", "a/b", ""])
def test_a_slice_that_does_not_exist_is_refused(text):
    assert tiers.parse_slice("3/4") == (3, 4)
    with pytest.raises(argparse.ArgumentTypeError, match="0 <= K < N"):
        tiers.parse_slice(text)


@pytest.mark.parametrize(
    ("changed", "folders"),
    [
        ("flax_mesh/mpmd/split/assign.py", {"mpmd/split", "mpmd/zoo", "mpmd/fuzz"}),
        ("tests/mpmd/split/test_assign.py", {"mpmd/split"}),
        ("flax_mesh/cli/text/forecast.py", {"cli"}),
        ("flax_mesh/axes.py", {"."}),
        ("recipes/tiny.py", {"train"}),
        ("docs/log.md", set()),
        ("README.md", set()),
    ],
)
def test_a_changed_file_touches_the_folders_that_guard_it(changed, folders):
    assert tiers.touched_folders([changed]) == folders


def test_the_folders_of_the_table_exist():
    for source, guards in tiers.GUARDS.items():
        assert (tiers.TESTS.parent / "flax_mesh" / source).is_dir()
        assert all((tiers.TESTS / guard).is_dir() for guard in guards)


def test_the_tests_of_the_versions_tier_exist():
    lines = (tiers.TESTS / "versions.txt").read_text().splitlines()
    assert lines and all(re.fullmatch(r"tests/[\w/]+\.py(::\w+)?", line) for line in lines)
    for line in lines:
        path, _, function = line.partition("::")
        assert f"def {function}" in (tiers.TESTS.parent / path).read_text(), line


def test_slow_tests_are_in_one_slice_or_in_all_if_their_folder_is_touched():
    names = [f"tests/train/test_a.py::test_{i}" for i in range(40)] + ["tests/mpmd/split/test_b.py::test_0[1-2]"]
    parts = [[name for name in names if tiers.is_selected(name, (k, 4), set())] for k in range(4)]
    assert sorted(name for part in parts for name in part) == sorted(names) and all(len(part) > 2 for part in parts)
    for k in range(4):
        assert all(tiers.is_selected(name, (k, 4), {"train"}) for name in names[:-1])
        assert tiers.is_selected(names[-1], (k, 4), {"mpmd"}) == (names[-1] in parts[k])  # not a folder below it


def test_the_mistakes_to_plant_are_places_in_the_code():
    for file, old, new in PLANTED:
        source = (tiers.TESTS.parent / file).read_text()
        assert source.count(old) == 1 and old != new, f"{file}: {old}"
        compile(source.replace(old, new), file, "exec")


def test_mutants_change_one_place_of_the_code_and_no_texts_or_annotations():
    source = "def f(a: int = 1 + 2, b: str = 'x'):\n    g(a, b)\n    assert a < (b), 'a' + b\n    return not a and b\n"
    mutants = list(mutants_of("f.py", source))
    assert all(compile(m.code, "f.py", "exec") for m in mutants)
    changes = sorted(
        next(new for old, new in zip(source.split("\n"), m.code.split("\n"), strict=True) if old != new)
        for m in mutants
    )
    assert changes == sorted(
        [
            "def f(a: int = 1 - 2, b: str = 'x'):",
            "def f(a: int = 2 + 2, b: str = 'x'):",
            "def f(a: int = 1 + 3, b: str = 'x'):",
            "    pass",
            "    g(b, a)",
            "    assert a <= (b), 'a' + b",
            "    return (a) and b",
            "    return not a or b",
        ]
    )
