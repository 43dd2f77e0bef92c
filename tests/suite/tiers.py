"""Which slow tests `.ci/run` runs: a slice of all, and the tests of the folders that a change touches.

`python -m tests.suite.tiers` prints the options of pytest that select them: `--slice=2/8 --touched=mpmd/runtime,train`.
tests/README.md describes the tiers.
"""

import argparse
import subprocess
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

TESTS = Path(__file__).parents[1]
SLICES = 8
COMMITS = 50  # that count as one change if the history does not contain the commit of the last merge
MOST_FOLDERS = 4  # whose slow tests run whole; with more of them CI would not end in time
# Folders of flax_mesh -> folders of tests, besides the one of the same name, that guard them.
GUARDS = {
    "hlo": ("plan", "sharding/report"),
    "cli/text": ("checkpoint",),
    "mpmd": ("mpmd/split",),
    "mpmd/split": ("mpmd/zoo", "mpmd/fuzz"),
    "mpmd/runtime": ("mpmd/zoo", "mpmd/fuzz"),
    "mpmd/transport": ("multiprocess",),
    "processes": ("multiprocess",),
    "program": ("blockwise", "lora", "mpmd/split"),
    "recipe": ("train",),
    "sharding/initialize": ("mpmd/zoo",),
}


def unit(nodeid: str) -> str:
    """The part of a test's id that determines its slice: the function and the value of its first parameter.

    Cases that share this value often share objects that are expensive to build.

    >>> unit("tests/train/test_loop.py::test_resume[dp-1f1b]")
    'tests/train/test_loop.py::test_resume[dp'
    """
    function, bracket, parameters = nodeid.partition("[")
    return function + bracket + parameters.removesuffix("]").partition("-")[0]


def slice_of(nodeid: str, slices: int = SLICES) -> int:
    """The slice of a test, from 0 to slices - 1. It depends on the id alone, so that a new test moves no other."""
    return zlib.crc32(unit(nodeid).encode()) % slices


def parse_slice(text: str) -> tuple[int, int]:
    """The two numbers of `K/N`, where 0 <= K < N."""
    first, slash, second = text.partition("/")
    if not (slash and first.isdecimal() and second.isdecimal() and int(first) < int(second)):
        raise argparse.ArgumentTypeError(f"a slice is K/N with 0 <= K < N, for example 1/4, not {text!r}")
    return int(first), int(second)


def is_selected(nodeid: str, chosen: tuple[int, int], touched: set[str]) -> bool:
    """Whether a slow test is in slice K of N, `chosen`, or its file directly in one of the folders `touched`."""
    number, slices = chosen
    folder = PurePosixPath(nodeid.partition("::")[0]).relative_to("tests").parent
    return slice_of(nodeid, slices) == number or str(folder) in touched


def touched_folders(changed: Iterable[str]) -> set[str]:
    """The folders below tests/ that guard the changed files, which are relative to the repository.

    A folder of flax_mesh without a folder of tests belongs to the nearest one above it. "." is tests/ itself.

    >>> sorted(touched_folders(["flax_mesh/mpmd/split/assign.py", "docs/log.md"]))
    ['mpmd/fuzz', 'mpmd/split', 'mpmd/zoo']
    """
    touched = set()
    for name in changed:
        top, *folders = PurePosixPath(name).parent.parts or ("",)
        if top == "recipes":
            folders = ["train"]
        elif top not in ("flax_mesh", "tests") or not name.endswith(".py"):
            continue
        while not (TESTS / Path(*folders)).is_dir():
            folders.pop()
        folder = "/".join(folders) or "."
        touched |= {folder, *(GUARDS.get(folder, ()) if top == "flax_mesh" else ())}
    return touched


def _git(*words: str) -> list[str]:
    return subprocess.run(["git", *words], cwd=TESTS.parent, capture_output=True, text=True, check=True).stdout.split()


def find_base() -> str:
    """The commit of the last merge: the last change of slice.txt, or the one before if HEAD itself changes it."""
    raises = _git("log", "-2", "--format=%H", "--", "tests/slice.txt")
    before = [commit for commit in raises if commit != _git("rev-parse", "HEAD")[0]]
    return before[0] if before else _git("rev-list", f"-{COMMITS}", "HEAD")[-1]


def main() -> None:
    number = int((TESTS / "slice.txt").read_text())
    folders = touched_folders(_git("diff", "--name-only", find_base()))
    if len(folders) > MOST_FOLDERS:
        print(f"{len(folders)} folders are touched, more than {MOST_FOLDERS}: run .ci/run --all", file=sys.stderr)
        folders = set()
    print(f"--slice={number % SLICES}/{SLICES} --touched={','.join(sorted(folders))}")


if __name__ == "__main__":
    main()
