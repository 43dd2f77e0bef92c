"""Loads a recipe: a Python file with a function that returns a TrainConfig."""

import importlib.util
import os
import re
import sys
import types
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from flax_mesh.errors import ConfigError
from flax_mesh.fields import check_types, path_problem
from flax_mesh.recipe.config import TrainConfig
from flax_mesh.text import at_most, listed
from flax_mesh.user_code import check_arguments, place_of, user_code

SETTING = re.compile(r"[a-z_]+\.[\w.]+=")
_FOLDERS: dict[str, str] = {}  # module that a recipe has imported from beside itself -> the folder


@check_types
def load_recipe(name: str) -> TrainConfig:
    """Run a recipe and return its config.

    A recipe is a Python file with a function without arguments that returns a `TrainConfig`. The file is executed as a
    module. It may import modules beside it: its folder is the first of `sys.path` meanwhile.

    Args:
        name: "FILE.py", for its function `recipe`, or "FILE.py:function".

    Returns:
        The recipe's config, without overrides.

    Raises:
        ConfigError: The file does not exist or is not a Python file, the function does not exist or needs arguments, it
            does not return a `TrainConfig`, or the code raises an exception, whose file and line are reported.

    Example:
        >>> from flax_mesh.train import apply_overrides, load_recipe
        >>> config = apply_overrides(load_recipe("recipes/tiny.py"), ["run.steps=20", "mesh.shape=fsdp:8"])
        >>> config.mesh.shape, config.run.steps
        ('fsdp:8', 20)
    """
    file, _, function = os.path.expanduser(name).partition(":")
    function = function or "recipe"
    if SETTING.match(name) and not os.path.exists(file):
        raise ConfigError(f"the recipe is missing: {name} is a setting; write RECIPE.py {name}")
    if problem := path_problem(name):
        raise ConfigError(f"recipe {name[:80]}: this text {problem}")
    with _modules_beside(file):
        make = _function_of_file(file, function)
        place = place_of(make) or file
        check_arguments(f"recipe {name}", make)
        with user_code(f"recipe {name}", place):
            config = make()
    if not isinstance(config, TrainConfig):
        got = "the class TrainConfig itself" if config is TrainConfig else type(config).__name__
        raise ConfigError(f"recipe {name}: {place}: {function}() must return a TrainConfig, got {got}")
    return config


@contextmanager
def _modules_beside(file: str) -> Generator[None]:
    """Let a recipe import modules of its folder; they replace modules of equal names beside another recipe."""
    folder = os.path.dirname(os.path.abspath(file))
    for name, other in list(_FOLDERS.items()):
        if other != folder:
            del _FOLDERS[name]
            sys.modules.pop(name, None)
    before, path = set(sys.modules), sys.path[:]
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:  # once: the recipe may have added folders
            sys.path.remove(folder)
        for name in sys.modules.keys() - before if folder not in path else ():
            package = name.partition(".")[0]  # of which no part was imported before, so that it is of this recipe only
            places = tuple(os.path.join(folder, package) + end for end in (".", os.sep))
            if package not in before and (getattr(sys.modules[name], "__file__", None) or "").startswith(places):
                _FOLDERS[name] = folder


def _function_of_file(file: str, function: str) -> Callable[[], object]:
    """Execute a file as a module and return one of its functions."""
    path = Path(file)
    if not os.path.isfile(path):
        siblings = sorted(str(p) for p in path.parent.glob("*.py")) if os.path.isdir(path.parent) else []
        raise ConfigError(
            f"recipe {file}: no such file" + (f"; found {listed(at_most(siblings, 5))}" if siblings else "")
        )
    spec = importlib.util.spec_from_file_location(f"flax_mesh_recipe_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"recipe {file}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses resolve the annotations of a recipe's own config there
    with user_code(f"recipe {file}", place=file):
        spec.loader.exec_module(module)
    make = getattr(module, function, None)
    if not callable(make):
        functions = [
            k for k, v in vars(module).items() if isinstance(v, types.FunctionType) and v.__module__ == spec.name
        ]
        raise ConfigError(f"recipe {file} has no function {function!r}; it defines {', '.join(functions) or 'none'}")
    return make
