"""Loading recipes by name, and mistakes in their code: one line with file and line number, before a run starts."""

import re
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_mesh.cli import main
from flax_mesh.cli.common import BAD_INPUT, DONE
from flax_mesh.errors import ConfigError
from flax_mesh.recipe.compiler_options import options_text, parse_compiler_options
from flax_mesh.recipe.overrides import to_lines
from flax_mesh.train import apply_overrides, build_program, load_recipe, train
from flax_mesh.user_code import user_code

TINY = str(Path(__file__).parents[2] / "recipes" / "tiny.py")
HEAD = """import dataclasses
import tests.train.bigram as bigram


def recipe(**changes):
    return dataclasses.replace(bigram.recipe(), **changes)


"""
LINE = HEAD.count("\n") + 1  # of the first line after the head

# Text after the head -> line of the mistake, and the text of the error after the line.
WRONG_RECIPES = [
    ("def recipe(:\n    return 3\n", LINE, "SyntaxError: invalid syntax"),
    ("def recipe():\n  return 3\n return 4\n", LINE + 2, "IndentationError: unindent does not match .*"),
    ("import no_such_module\n", LINE, "ModuleNotFoundError: No module named 'no_such_module'"),
    ("from dataclasses import nothing\n", LINE, "ImportError: cannot import name 'nothing' from 'dataclasses' .*"),
    ("wrong = undefined\n", LINE, "NameError: name 'undefined' is not defined"),
    ("def recipe():\n    return bigram.no_recipe()\n", LINE + 1, "AttributeError: module .* has no attribute .*"),
    ("def recipe():\n    raise ValueError('two\\nlines')\n", LINE + 1, "ValueError: two"),
    ("def recipe():\n    raise ValueError\n", LINE + 1, "ValueError"),
    ("def recipe():\n    return recipe()\n", LINE + 1, "RecursionError: maximum recursion depth exceeded.*"),
    ("import sys\nsys.exit(3)\n", LINE + 1, "SystemExit: 3"),
    ("def recipe():\n    raise SystemExit\n", LINE + 1, "SystemExit"),
    ("def recipe():\n    return bigram.RunConfig(step=3)\n", LINE + 1, "TypeError: .*unexpected keyword argument .*"),
    ("def recipe():\n    return 3\n", LINE, r"recipe\(\) must return a TrainConfig, got int"),
    ("def recipe():\n    pass\n", LINE, r"recipe\(\) must return a TrainConfig, got NoneType"),
    ("def recipe():\n    return bigram.TrainConfig\n", LINE, r"recipe\(\) must return .*, got the class .* itself"),
    ("class recipe:\n    pass\n", LINE, r"recipe\(\) must return a TrainConfig, got recipe"),
    ("def recipe(size):\n    return 3\n", LINE, "it must not need arguments: missing a required argument: 'size'"),
]


def write(folder: Path, text: str) -> str:
    path = folder / "own.py"
    path.write_text(text)
    return str(path)


def error_line(capsys, *argv: str) -> str:
    """Run a command that must fail, and return the only line of its error without the prefix."""
    assert main(argv) == BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("flax-mesh: ")


@pytest.mark.parametrize(("text", "line", "error"), WRONG_RECIPES, ids=range(len(WRONG_RECIPES)))
def test_a_mistake_in_a_recipe_is_one_line_in_every_command(text, line, error, tmp_path, capsys):
    recipe = write(tmp_path, HEAD + text)
    for command in (["train"], ["explain"], ["checkpoint", "reshard", "x", "y"]):
        found = error_line(capsys, *command, recipe)
        assert re.fullmatch(rf"recipe .*own\.py: {re.escape(recipe)}, line {line}: {error}", found), found


OWN = """
from __future__ import annotations
from dataclasses import dataclass
from flax_mesh.train import RunConfig, TrainConfig

@dataclass(frozen=True)
class Size:
    width: int = 3

def recipe():
    return TrainConfig(make_model=max, loss_fn=max, model=Size())

def long():
    return TrainConfig(make_model=max, loss_fn=max, model=Size(9), run=RunConfig(steps=9000))
"""


def test_fields_of_a_config_class_in_a_recipe_file_are_settings(tmp_path):
    own = write(tmp_path, OWN)
    assert load_recipe(own).run.steps == 1000 and load_recipe(f"{own}:long").run.steps == 9000
    assert to_lines(apply_overrides(load_recipe(own), ["model.width=5"]))[0] == "model.width=5"


def test_a_name_without_a_recipe_is_one_line(tmp_path, capsys):
    (tmp_path / "beside.py").write_text("x = 1\n")
    (tmp_path / "notes.txt").write_text("hello")
    own = write(tmp_path, OWN)
    for name, problem in (
        (own.replace("own", "owm"), r"recipe .*/owm\.py: no such file; found .*/own\.py"),
        ("nowhere/own.py", r"recipe nowhere/own\.py: no such file"),
        (f"{own}:short", r".*own\.py has no function 'short'; it defines recipe, long"),
        (str(tmp_path / "notes.txt"), r"recipe .*notes\.txt: not a Python file"),
        ("x" * 5000, ".* is too long for a path: 5000 bytes.*"),
        ("~no_such_user/x.py", ".* names a user without a home folder.*"),
    ):
        assert re.fullmatch(problem, found := error_line(capsys, "explain", name)), found
    for content in (b"\xff\xfe\x00", b"x = 1\0", b"# coding: nothing\n", b"(" * 3000, b"x = " + b"-" * 50_000 + b"1"):
        (tmp_path / "own.py").write_bytes(content)
        assert "own.py" in error_line(capsys, "explain", own)
    for text in ("", "recipe = 3\n"):
        assert "own.py has no function 'recipe'" in error_line(capsys, "explain", write(tmp_path, text))
    line = error_line(
        capsys, "explain", write(tmp_path, "def recipe():\n    raise ModuleNotFoundError(name='beside')\n")
    )
    assert line.endswith(f"It is in {tmp_path}, which Python does not search: set PYTHONPATH={tmp_path}")


def test_settings_without_a_recipe_are_one_line_that_names_the_recipe(capsys):
    for command in ("train", "explain"):
        line = error_line(capsys, command, "mesh.shape=fsdp:8", "run.steps=3")
        assert line == "the recipe is missing: mesh.shape=fsdp:8 is a setting; write RECIPE.py mesh.shape=fsdp:8"
    assert "the recipe is missing" in error_line(capsys, "explain", f"optimizer.groups={'x' * 300}")


def test_a_recipe_imports_the_modules_beside_it_and_not_those_of_another_recipe(tmp_path):
    text = OWN.replace("def recipe():", "import sizes_beside\ndef recipe():\n    import more_beside").replace(
        "Size())", "Size(sizes_beside.WIDTH))"
    )
    path = sys.path[:]
    for width in (5, 6, 5):
        folder = tmp_path / str(width)
        folder.mkdir(exist_ok=True)
        (folder / "sizes_beside.py").write_text(f"WIDTH = {width}\n")
        (folder / "more_beside.py").write_text("")
        assert load_recipe(write(folder, text)).model.width == width and sys.path == path
    load_recipe(write(tmp_path / "5", text + f"\nimport sys\nsys.path.append({str(tmp_path)!r})\n"))
    assert sys.path == [*path, str(tmp_path)]
    sys.path.remove(str(tmp_path))
    found = {name for name in sys.modules if name.endswith("_beside")}
    assert found == {"sizes_beside", "more_beside"}
    with pytest.raises(ConfigError, match="No module named 'sizes_beside'"):
        (tmp_path / "7").mkdir()
        load_recipe(write(tmp_path / "7", text))
    assert sys.path == path


NAMES = st.from_regex(r"xla_[a-z_]{1,12}", fullmatch=True)
VALUES = st.booleans() | st.integers(-9, 99) | st.from_regex(r"[A-Z]{0,5}(,[A-Z]{1,5}){0,2}", fullmatch=True)


@settings(max_examples=30)
@given(st.dictionaries(NAMES, VALUES, max_size=4))
def test_options_round_trip_through_text(options):
    assert parse_compiler_options(options_text(options)) == options


def test_the_check_of_the_functions_does_not_trace_the_loss_twice(tmp_path, text):
    own = write(
        tmp_path,
        f"{HEAD}CALLS = []\n\ndef loss(model, batch):\n    CALLS.append(model.dropout.deterministic)\n"
        "    return bigram.loss_fn(model, batch)\n\ndef counted():\n    return recipe(loss_fn=loss)\n",
    )
    config = apply_overrides(load_recipe(f"{own}:counted"), [f"data.source={text}"])
    config = apply_overrides(config, [f"run.folder={tmp_path / 'run'}", "run.steps=4"])
    calls = config.loss_fn.__globals__["CALLS"]
    build_program(config)
    assert sorted(calls) == [False, True]
    calls.clear()
    assert train(config).step == 4
    assert sorted(calls) == [False, True]


def test_an_error_without_code_of_the_user_is_raised_unchanged():
    wrapped = user_code("what", "place")  # as a decorator it leaves the frame of this test out of the traceback
    with pytest.raises(ZeroDivisionError):
        wrapped(Fraction)(1, 0)
    with pytest.raises(ConfigError, match=r"^what: place: Invalid literal for Fraction: 'x'"):
        wrapped(Fraction)("x")


# --- recipes of arrays: short, and they learn; test_resume.py has their runs on meshes ---


ARRAYS = [Path(TINY).with_name(f"{name}.py") for name in ("vit", "encoder_decoder")]
MOST_LINES = 40


@pytest.mark.parametrize("recipe", ARRAYS, ids=lambda path: path.stem)
def test_a_recipe_is_short(recipe):
    assert len(recipe.read_text().splitlines()) <= MOST_LINES


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("mesh", ["fsdp:4", "dp:2,fsdp:2", "pp:2,fsdp:2"])
@pytest.mark.parametrize("recipe", ARRAYS, ids=lambda path: path.stem)
def test_the_commands_work(recipe, mesh, capsys):
    settings = (f"mesh.shape={mesh}", "pipeline.num_microbatches=2")
    for command in (["explain"], ["plan", "--topology", "v5e:2x2"], ["train", "--print-config"]):
        assert main([*command[:1], str(recipe), *settings, *command[1:]]) == DONE, command
    assert "tok/s" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ARRAYS, ids=lambda path: path.stem)
def test_a_recipe_learns(recipe, tmp_path):
    config = apply_overrides(load_recipe(str(recipe)), [f"run.folder={tmp_path}"])
    assert train(config).last_row["held_out/accuracy"] > 0.95
