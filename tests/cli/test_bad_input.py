"""The invalid commands of bad_input.py: the exit code, one short error without a traceback, and no changed file."""

import re
import shlex
import stat
from pathlib import Path

import jax
import pytest

from flax_mesh.cli import main
from flax_mesh.cli.common import BAD_INPUT, DONE
from flax_mesh.cli.main import COMMANDS as SUBCOMMANDS
from tests.cli.bad_input import COMMANDS, SLOW_COMMANDS, read, write_files, write_recipe

MOST_LINES, LONGEST_LINE = 30, 1000
INVALID = [pytest.param(*case, id=case[1]) for case in read(COMMANDS)]
INVALID += [pytest.param(*case, id=case[1], marks=pytest.mark.slow) for case in read(SLOW_COMMANDS)]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    """Name -> path of the files that the commands name, among them the folder of a run of two steps."""
    if jax.default_backend() != "cpu":
        pytest.skip("the recipe requires CPU devices")
    root = tmp_path_factory.mktemp("files")
    recipe, run = write_recipe(root), root / "run"
    settings = ("run.steps=2", "checkpoint.every=1", "run.eval_every=0", "run.sample_tokens=0")
    assert main(["train", str(recipe), f"run.folder={run}", *settings]) == DONE
    write_files(root, run)
    named = {path.stem: str(path) for path in root.iterdir()}
    missing = {"out": str(root / "out"), "nothing": str(root / "nothing"), "long": str(root / ("x/" * 2500))}
    return named | missing | {"root": str(root)}


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Relative path -> (size, time of the last change) of every file below `folder`, (0, 0) for a folder."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if "__pycache__" not in path.parts}
    stats = {name: path.lstat() for name, path in found.items()}
    return {n: (0, 0) if stat.S_ISDIR(s.st_mode) else (s.st_size, s.st_mtime_ns) for n, s in stats.items()}


@pytest.fixture(scope="module")
def listed(files) -> dict[str, tuple[int, int]]:
    return listing(Path(files["root"]))


@pytest.mark.parametrize(("code", "command", "text"), INVALID)
def test_an_invalid_command_ends_with_one_short_error_and_changes_no_file(
    files, listed, code, command, text, capfd, monkeypatch
):
    root = Path(files["root"])
    monkeypatch.chdir(root)
    argv = [re.sub(r"\{(\w+)\}", lambda name: files[name[1]], word) for word in shlex.split(command)]
    got = main(argv)
    out, err = capfd.readouterr()
    assert "Traceback" not in err, err
    assert got == code, err or out
    assert text and text in (err or out)  # `checkpoint list` and `verify` print damage on standard output
    assert err or code != BAD_INPUT
    assert not out or code != BAD_INPUT or argv[0] == "train", out
    lines = err.splitlines()
    longest = LONGEST_LINE + max(map(len, argv), default=0)
    assert all(line.startswith("flax-mesh: ") and len(line) < longest for line in lines), err
    assert len(lines) <= MOST_LINES
    assert listing(root) == listed


def test_every_subcommand_has_invalid_commands_and_every_file_is_in_one(files):
    invalid = [command for _, command, _ in read(COMMANDS + SLOW_COMMANDS.lstrip())]
    assert len(set(invalid)) == len(invalid)
    assert {command.partition(" ")[0] for command in invalid} > SUBCOMMANDS.keys()
    assert set(re.findall(r"\{(\w+)\}", " ".join(invalid))) == files.keys() - {"root"}
