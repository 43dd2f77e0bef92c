"""Loading recipes by name, and settings whose text has a syntax of its own."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_mesh.errors import ConfigError
from flax_mesh.train import apply_overrides, load_recipe
from flax_mesh.train.config import options_text, parse_compiler_options
from flax_mesh.train.overrides import to_lines

RECIPE = """
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

def number():
    return 3
"""


@pytest.fixture
def recipe_file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(RECIPE)
    return path


def test_a_recipe_is_a_function_in_a_file(recipe_file):
    assert load_recipe(str(recipe_file)).run.steps == 1000
    assert load_recipe(f"{recipe_file}:long").run.steps == 9000


def test_fields_of_a_config_class_in_a_recipe_are_settings(recipe_file):
    config = apply_overrides(load_recipe(str(recipe_file)), ["model.width=5"])
    assert to_lines(config)[0] == "model.width=5"


def test_a_missing_recipe_is_reported_with_the_files_beside_it(recipe_file):
    with pytest.raises(ConfigError, match=r"recipe .*/owm\.py: no such file; found .*/own\.py$"):
        load_recipe(str(recipe_file.with_name("owm.py")))
    with pytest.raises(ConfigError, match=r"^recipe nowhere/own\.py: no such file$"):
        load_recipe("nowhere/own.py")


def test_a_missing_function_is_reported_with_the_defined_ones(recipe_file):
    with pytest.raises(ConfigError, match=r"own\.py has no function 'short'; it defines recipe, long, number$"):
        load_recipe(f"{recipe_file}:short")


def test_a_recipe_must_return_a_train_config(recipe_file):
    with pytest.raises(ConfigError, match=r"own\.py, line 16: number\(\) must return a TrainConfig, got int$"):
        load_recipe(f"{recipe_file}:number")


def test_a_recipe_must_be_python(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(ConfigError, match=r"recipe .*notes\.txt: not a Python file$"):
        load_recipe(str(path))


NAMES = st.from_regex(r"xla_[a-z_]{1,12}", fullmatch=True)
VALUES = st.booleans() | st.integers(-9, 99) | st.from_regex(r"[A-Z]{0,5}(,[A-Z]{1,5}){0,2}", fullmatch=True)


@settings(max_examples=30)
@given(st.dictionaries(NAMES, VALUES, max_size=4))
def test_options_round_trip_through_text(options):
    assert parse_compiler_options(options_text(options)) == options
