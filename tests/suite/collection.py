"""The ids of the tests and their order depend on the files alone: two processes collect them in different places.

    python -m tests.suite.collection            # all tests
    python -m tests.suite.collection FOLDER

The processes of pytest-xdist collect the tests on their own, and end with "Different tests were collected" where an id
contains the time, an address or the order of a set. Two processes that start in the same second on one machine do not
notice it, so these differ in the hash seed, time, time zone, locale, variables, current folder and order of folders.
"""

import datetime
import difflib
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
HERE = {"PYTHONHASHSEED": "1", "TZ": "UTC", "LC_ALL": "C.UTF-8", "COLUMNS": "80", "USER": "one"}
ELSEWHERE = {"PYTHONHASHSEED": "2", "TZ": "Asia/Tokyo", "LC_ALL": "C", "COLUMNS": "200", "USER": "two"}
DAY = 24 * 3600
MOST_LINES = 40
CODE = """
import sys
_, root, folder, output, seconds = sys.argv
sys.path.insert(0, root)
from tests.suite.collection import collect
sys.exit(collect(folder, output, int(seconds)))
"""


def shift_clock(seconds: int) -> None:
    """Let `time` and `datetime` of this process be ahead by `seconds`."""
    now, now_ns, localtime, gmtime, strftime = time.time, time.time_ns, time.localtime, time.gmtime, time.strftime

    class Date(datetime.date):
        @classmethod
        def today(cls) -> datetime.date:
            return cls.fromtimestamp(time.time())

    class DateTime(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return cls.fromtimestamp(time.time(), tz)

    replaced: dict[str, Any] = {
        "time": lambda: now() + seconds,
        "time_ns": lambda: now_ns() + seconds * 10**9,
        "localtime": lambda at=None: localtime(time.time() if at is None else at),
        "gmtime": lambda at=None: gmtime(time.time() if at is None else at),
        "strftime": lambda text, at=None: strftime(text, time.localtime() if at is None else at),
    }
    for name, function in replaced.items():
        setattr(time, name, function)
    datetime.date, datetime.datetime = Date, DateTime  # pyright: ignore[reportAttributeAccessIssue]


def sort_folders(*, reverse: bool) -> None:
    """Let this process list the files of every folder by name."""
    listdir, scandir = os.listdir, os.scandir

    class Entries:
        def __init__(self, path: Any = "."):
            with scandir(path) as entries:
                self._entries = iter(sorted(entries, key=lambda entry: entry.name, reverse=reverse))

        def __next__(self) -> os.DirEntry[Any]:
            return next(self._entries)

        def __iter__(self) -> "Entries":
            return self

        __enter__ = __iter__

        def __exit__(self, *error: object) -> None:
            self.close()

        def close(self) -> None:
            self._entries = iter(())

    os.listdir = lambda path=".": sorted(listdir(path), reverse=reverse)
    os.scandir = Entries  # pyright: ignore[reportAttributeAccessIssue]


def collect(folder: str, output: str, seconds: int) -> int:
    """Write the ids of all tests to `output`. If the clock is ahead, by `seconds`, folders are in reverse order."""
    shift_clock(seconds)
    sort_folders(reverse=seconds > 0)  # before pathlib is imported, which keeps os.scandir
    import pytest

    class Ids:
        def pytest_collection_finish(self, session: pytest.Session) -> None:
            with open(output, "w", encoding="utf-8") as file:
                file.writelines(f"{item.nodeid}\n" for item in session.items)

    settings = ("-c", f"{ROOT}/pyproject.toml", f"--rootdir={os.path.dirname(folder)}", "-p", "no:cacheprovider")
    return pytest.main([folder, *settings, "--collect-only", "-qq", "-n", "0", "-m", ""], plugins=[Ids()])


def differences(folder: str) -> list[str]:
    """The ids that only one of two processes collects, or that they collect in another order."""
    with tempfile.TemporaryDirectory() as other:
        ids = []
        for place, variables, seconds in ((ROOT, HERE, 0), (other, ELSEWHERE, DAY)):
            output = os.path.join(other, "ids.txt")
            command = [sys.executable, "-c", CODE, ROOT, folder, output, str(seconds)]
            environment = os.environ | variables
            done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
            if done.returncode:
                return [f"in {place} with {variables}:", *(done.stdout + done.stderr).splitlines()]
            with open(output, encoding="utf-8") as file:
                ids.append(file.read().splitlines())
    return [line for line in difflib.unified_diff(*ids, n=0, lineterm="") if line[:3] not in ("---", "+++", "@@ ")]


def main() -> int:
    folder = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else f"{ROOT}/tests")
    lines = differences(folder)
    print("\n".join(lines[:MOST_LINES]))
    if lines:
        print(
            f"{len(lines)} ids of tests depend on more than the files; make the values in the tests, or name the cases"
        )
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
