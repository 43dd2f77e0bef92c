"""Reward functions of a Python file, and the check of what they return."""

import runpy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from flax_mesh.errors import ConfigError, Problem
from flax_mesh.fields import check_types, path_problem, user_path
from flax_mesh.text import at_most, shown
from flax_mesh.user_code import check_arguments, place_of, user_code

SETTING = "data.rewards"
ARGUMENTS = ("prompts", "completions", "rows")


class Rewards(NamedTuple):
    """Functions and their weights by name, as `read_rewards` returns them."""

    functions: Mapping[str, Callable[..., Any]]
    weights: Mapping[str, float]

    def __call__(
        self, prompts: Sequence[object], completions: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> dict[str, np.ndarray]:
        """The rewards of all completions by the name of the function, (N,) float32.

        Raises a ConfigError with a line for every function that does not return a finite number for each.
        """
        rewards: dict[str, np.ndarray] = {}
        problems: list[str] = []
        for name, function in self.functions.items():
            with user_code(f"reward {name}", place_of(function)):
                result = function(list(prompts), list(completions), list(rows))
            values = _numbers(result)
            if values is None or len(values) != len(completions):
                got = shown(result) if values is None else f"{len(values)} of them"
                problems.append(f"reward {name} must return a list of {len(completions)} floats, got {got}")
            elif len(wrong := np.flatnonzero(~np.isfinite(values))):
                others = f", and {len(wrong) - 1} more that are not" * (len(wrong) > 1)
                which = f"{values[wrong[0]]} for {completions[wrong[0]][:60]!r}{others}"
                problems.append(f"reward {name} must return finite floats, got {which}")
            else:
                rewards[name] = values
        if problems:
            raise ConfigError(problems)
        return rewards


@check_types
def read_rewards(text: str) -> Rewards:
    """Reward functions of a Python file, such as "rewards.py:correct*1,short*0.2": their names and weights, 1 without.

    A function is called as `function(prompts, completions, rows)` with lists: the prompts as in the file, the texts of
    their completions, and the JSON objects of the file. It returns a finite float for every completion. Raises a
    ConfigError with a line for every mistake.
    """
    file, _, names = text.rpartition(":")
    path = user_path(file) if file and not path_problem(file) else None
    if path is None or not path.is_file():
        reason = "must be FILE.py:NAME*WEIGHT,NAME*WEIGHT with the path of a Python file"
        raise ConfigError(Problem(SETTING, reason, value=text or "''"))
    with user_code(SETTING, str(path)):
        found = runpy.run_path(str(path))
    functions: dict[str, Callable[..., Any]] = {}
    weights: dict[str, float] = {}
    problems: list[object] = []
    for part in names.split(","):
        name, _, weight = (x.strip() for x in part.partition("*"))
        try:
            check_arguments(f"reward {name}", found[name], *ARGUMENTS)
            functions[name], weights[name] = found[name], float(weight or 1)
        except KeyError:
            known = [name for name, x in found.items() if callable(x) and not name.startswith("_")]
            problems.append(
                f"{SETTING}: {path} has no function {name!r}; it has {', '.join(at_most(known, 8)) or 'none'}"
            )
        except ValueError:
            problems.append(f"{SETTING}: the weight of {name} must be a number, got {weight!r}")
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return Rewards(functions, weights)


def _numbers(result: object) -> np.ndarray | None:
    """(N,) float32; None if it is another value, such as one number or texts."""
    try:
        values = np.asarray(result)
    except ValueError:  # NumPy's, for nested lists of unequal lengths
        return None
    is_numeric = values.dtype.kind in "fiub" and values.ndim == 1
    return values.astype(np.float32) if is_numeric else None
