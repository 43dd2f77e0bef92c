"""The table of versions in the docs, the bounds of pyproject.toml, and the versions that pip installs."""

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import flax_mesh as fm
from flax_mesh import jax_compat

ROOT = Path(__file__).parent.parent
PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

Version = tuple[int, ...]


def version(text: str) -> Version:
    return tuple(map(int, text.split(".")[:3]))


def table() -> dict[str, dict[str, Version]]:
    """Row -> column -> version."""
    text = (ROOT / "docs" / "quickstart.md").read_text()
    rows = re.findall(r"^\| (?:\| Python|oldest|newest).*$", text, re.MULTILINE)
    lines = [row.strip("| ").split(" | ") for row in rows]
    heads = lines[0] if lines[0][0] == "Python" else lines[0][1:]
    return {name: dict(zip(heads, map(version, cells), strict=True)) for name, *cells in lines[1:]}


def bound(package: str, sign: str, when: str = "") -> Version:
    """The bound of a dependency; `when` is a part of its marker."""
    pattern = rf"{package}[^;]*{sign}([\d.]+)[^;]*(;.*{re.escape(when)}.*)?"
    (found,) = (match[1] for text in PROJECT["dependencies"] if (match := re.fullmatch(pattern, text)) and when in text)
    return version(found)


def test_pyproject_has_the_bounds_of_the_table():
    oldest, newest = table()["oldest"], table()["newest"]
    assert version(PROJECT["requires-python"].removeprefix(">=")) == oldest["Python"]
    assert bound("jax", ">=") == oldest["jax"]
    assert bound("jax", "<") == (newest["jax"][0], newest["jax"][1] + 1)
    assert bound("flax", ">=", "<") == oldest["flax"]
    assert bound("flax", ">=", ">= '3.12'") == newest["flax"]
    for package in ("optax", "orbax-checkpoint"):
        assert bound(package, ">=") <= oldest[package] <= newest[package]


def test_every_python_of_the_classifiers_is_in_the_table():
    named = [version(text.rpartition(" ")[2]) for text in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", text)]
    assert (min(named), max(named)) == (table()["oldest"]["Python"], table()["newest"]["Python"])


def test_private_names_were_tested_with_both_ends():
    for package, tested in jax_compat.TESTED.items():
        assert tuple(map(version, tested)) == (table()["oldest"][package], table()["newest"][package])


def test_the_package_has_the_version_of_its_metadata():
    assert fm.__version__ == PROJECT["version"] == metadata.version("flax-mesh")
    with pytest.raises(AttributeError, match="module 'flax_mesh' has no attribute '__versions__'"):
        getattr(fm, "__versions__")  # noqa: B009 (not in the types of the package)


@pytest.mark.parametrize("package", PACKAGES)
def test_pip_installs_the_versions_of_the_row_or_later_releases(package):
    """The newest JAX and Flax for Python 3.11 do not change any more."""
    rows, found = table(), version(metadata.version(package))
    row = next((row for row in rows.values() if row["Python"] == sys.version_info[:2]), rows["oldest"])
    assert found >= row[package]
    if row is rows["oldest"] and sys.version_info[:2] == row["Python"] and package in ("jax", "flax"):
        assert found == row[package]
