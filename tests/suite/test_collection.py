"""The comparison of two collections finds every id that depends on more than the files."""

import re

from tests.suite.collection import differences

IMPURE = """
import datetime, glob, gzip, locale, os, pathlib, random, time
import pytest

HERE = pathlib.Path(__file__).parent
VALUES = {
    "archive": repr(gzip.compress(b"{}")),
    "time": time.strftime("%j"),
    "nanoseconds": str(time.time_ns()),
    "date": str(datetime.date.today()),
    "moment": str(datetime.datetime.now()),
    "zone": time.tzname[0],
    "hash": str(hash("a")),
    "set": "".join(set("abcdefgh")),
    "address": str(object()),
    "random": str(random.random()),
    "listdir": str(os.listdir(HERE)),
    "iterdir": str([path.name for path in HERE.iterdir()]),
    "glob": str([path.name for path in HERE.glob("*.txt")]),
    "names": str(glob.glob("*.txt", root_dir=HERE)),
    "walk": str([files for _, _, files in os.walk(HERE)]),
    "folder": os.getcwd(),
    "locale": locale.setlocale(locale.LC_ALL, ""),
    "variable": os.environ["USER"],
}


@pytest.mark.parametrize("value", VALUES.values(), ids=[f"{name}: {value}" for name, value in VALUES.items()])
def test_impure(value):
    pass


@pytest.mark.parametrize("value", [{3, 4}, b"bytes", "text", 1.5, object(), max])
def test_pure(value):
    pass
"""


def test_ids_that_depend_on_the_time_the_place_or_an_order_are_found(tmp_path):
    folder = tmp_path / "tests"
    folder.mkdir()
    for name in ("a.txt", "b.txt"):
        (folder / name).touch()
    (folder / "test_impure.py").write_text(IMPURE)
    lines = differences(str(folder))
    names = [
        re.findall(rf"^[{sign}]tests/test_impure.py::test_impure\[(\w+):", "\n".join(lines), re.M)
        for sign in ("-", "+")
    ]
    assert names == [re.findall(r'^    "(\w+)":', IMPURE, re.M)] * 2
    assert len(lines) == 2 * len(names[0])
