"""Hooks of a run: found by name or dotted path before it starts, and called with every row of metrics."""

import difflib
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from flax_mesh.checkpoint.read import plain
from flax_mesh.errors import ConfigError, Mistakes
from flax_mesh.user_code import check_arguments, joined, place_of, user_code

_Result = TypeVar("_Result")
Row = dict[str, Any]  # of metrics
Hook = Callable[[Row], object]
Factory = Callable[[Path, Any, int], Hook]
NAMES = {
    "tensorboard": "flax_mesh.train.hooks.tensorboard:TensorBoard",
    "wandb": "flax_mesh.train.hooks.trackers:wandb_hook",
    "trackio": "flax_mesh.train.hooks.trackers:trackio_hook",
}
REQUIRED = {name: name for name in NAMES} | {"tensorboard": "tensorboardX"}  # the package of the extra of this name
FAILED = object()  # in place of the value of a function that raised an exception


def numbers(row: Row) -> dict[str, int | float]:
    """The numbers of a row, without its step."""
    kinds = {name: value for name, value in row.items() if isinstance(value, int | float) and name != "step"}
    return {name: value for name, value in kinds.items() if not isinstance(value, bool)}


def find_hooks(text: str, of_recipe: Sequence[Any]) -> list[tuple[str, Factory]]:
    """(name, factory) of the hooks in `run.hooks`, then of the recipe's own. One ConfigError with all mistakes."""
    factories, mistakes = [], Mistakes()
    names = [*filter(None, map(str.strip, text.split(",")))]
    mistakes.problems += [
        f"run.hooks: {name!r} is there twice; once is enough" for name in sorted({*names}) if names.count(name) > 1
    ]
    for name in dict.fromkeys(names):
        with mistakes:
            factories.append((f"run.hooks={name}", _import(name)))
    factories += [(f"hooks[{at}] of the recipe", factory) for at, factory in enumerate(of_recipe)]
    for name, factory in factories:
        with mistakes:
            if not callable(factory):
                raise ConfigError(f"{name} must be a function (folder, config, start) -> hook, got {factory!r}")
            check_arguments(name, factory, "folder", "config", "start")
    mistakes.raise_if_any()
    return factories


def _import(name: str) -> Any:
    if name in REQUIRED and importlib.util.find_spec(REQUIRED[name]) is None:
        raise ConfigError(
            f"run.hooks={name} requires the package {REQUIRED[name]}, which is not installed: "
            f"pip install 'flax-mesh[{name}]'"
        )
    path = NAMES.get(name, name)
    module, separator, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if not (separator and module and attribute):
        near = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"run.hooks: {name!r} must be {', '.join(NAMES)}, or package.module.function of a function that makes a "
            f"hook{hint}"
        )
    with user_code(f"run.hooks={name}"):
        try:
            imported = importlib.import_module(module)
        except (ModuleNotFoundError, ValueError, TypeError) as error:  # ValueError, TypeError: names such as ".x"
            if isinstance(error, ModuleNotFoundError) and error.name and not f"{module}.".startswith(f"{error.name}."):
                raise  # a module that the hook's own module imports
            raise ConfigError(
                f"run.hooks: {name!r} cannot be imported: {module!r} does not exist. Install it, or set PYTHONPATH "
                "to the folder that contains it"
            ) from error
    if not hasattr(imported, attribute):
        raise ConfigError(f"run.hooks: {name!r} cannot be imported: {module} has no {attribute!r}")
    return getattr(imported, attribute)


class Hooks:
    """Makes the hooks with the first row, and calls each with every row. A hook that fails is not called again.

    The failure is reported in one line. It does not stop the run: the rows are in metrics.jsonl in any case.
    """

    def __init__(
        self,
        factories: Sequence[tuple[str, Factory]],
        folder: Path,
        config: object,
        start: int,
        say: Callable[[str], None],
    ):
        self._waiting = list(factories)
        self._arguments = folder, config, start
        self._say = say
        self._hooks: dict[str, Hook] = {}

    def __call__(self, row: Row) -> None:
        while self._waiting:
            name, factory = self._waiting.pop(0)
            hook = self._guarded(name, factory, *self._arguments)
            if callable(hook):
                self._hooks[name] = hook
            elif hook is not FAILED:
                problem = f"it must return a function of a row, got {hook!r}"
                self._say(f"warning: {joined(name, place_of(factory), problem)}")
        for name, hook in list(self._hooks.items()):
            self._guarded(name, hook, dict(row))

    def close(self) -> None:
        for name, hook in list(self._hooks.items()):
            self._guarded(name, getattr(hook, "close", lambda: None))
        self._hooks.clear()

    def _guarded(self, name: str, function: Callable[..., _Result], *arguments: object) -> _Result | object:
        try:
            with user_code(name, place_of(function)):
                return function(*arguments)
        except Exception as error:  # code of a user may raise anything
            hook = self._hooks.pop(name, None)
            text = str(error) if isinstance(error, ConfigError) else f"{name}: {type(error).__name__}: {error}"
            self._say(f"warning: {plain(' '.join(text.split()))}; this hook is not called again")
            with suppress(Exception):
                getattr(hook, "close", lambda: None)()
            return FAILED
