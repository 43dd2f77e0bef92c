"""Parameters by path: parameter groups, trained parameters and the matrices of Muon, from the text of settings."""

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from flax import nnx
from flax.nnx.filterlib import Filter
from flax.typing import PathParts

from flax_mesh.tree import path_of

FACTOR = re.compile(r"(learning_rate|weight_decay)\*(.+)")
DIMS = re.compile(r"([0-9](?:,[0-9])*)>([0-9](?:,[0-9])*)")


class Group(NamedTuple):
    """The parameters in whose path `pattern` is found, and the factors of their learning rate and weight decay."""

    pattern: str
    learning_rate: float = 1.0
    weight_decay: float = 1.0
    is_frozen: bool = False


class Matrices(NamedTuple):
    """Parameters that are matrices: their input and output dims; (0, 1) if both are ()."""

    pattern: str
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()


_Row = TypeVar("_Row", Group, Matrices)


def pattern_problem(pattern: str) -> str:
    """Why a text is not a pattern of paths, "" if it is one."""
    try:
        with warnings.catch_warnings(action="error", category=FutureWarning):  # such as "possible nested set"
            re.compile(pattern)
    except (re.error, FutureWarning) as error:
        return f"{pattern!r} must be a regular expression, but {error}"
    return ""


def parse_groups(text: str) -> tuple[list[Group], list[str]]:
    """The groups of `optimizer.groups`, and one line for every mistake."""
    groups: list[Group] = []
    problems: list[str] = []
    for part in filter(None, map(str.strip, text.split(";"))):
        pattern, *words = part.split()
        factors: dict[str, float] = {}
        wrong = [] if words else [f"{pattern!r} has no words"]
        if words.count("frozen") > 1:
            wrong.append(f"{pattern!r} has 'frozen' twice")
        for word in [word for word in words if word != "frozen"]:
            factor = FACTOR.fullmatch(word)
            value = _factor(factor[2]) if factor else None
            if factor is None or value is None:
                wrong.append(f"{word!r} of {pattern!r} is neither frozen nor a factor that is at least 0")
            elif factor[1] in factors:
                wrong.append(f"{pattern!r} has {word!r} twice or after another value")
            else:
                factors[factor[1]] = value
        if factors and "frozen" in words:
            wrong.append(f"{pattern!r} is frozen, so its factors have no effect")
        if problem := pattern_problem(pattern):
            wrong.append(problem)
        problems += [
            f"optimizer.groups: {line}; write PATTERN WORDS; PATTERN WORDS with the words learning_rate*0.1, "
            "weight_decay*0 or frozen"
            for line in wrong
        ]
        groups.append(Group(pattern, **factors, is_frozen="frozen" in words))
    return groups, problems


def _factor(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < float("inf") else None


def parse_matrices(text: str) -> tuple[list[Matrices], list[str]]:
    """The matrices of `optimizer.matrices`, and one line for every mistake."""
    rows: list[Matrices] = []
    problems: list[str] = []
    for part in filter(None, map(str.strip, text.split(";"))):
        pattern, *words = part.split()
        dims = DIMS.fullmatch(words[0]) if len(words) == 1 else None
        inputs, outputs = (tuple(map(int, side.split(","))) for side in dims.groups()) if dims else ((), ())
        problem = pattern_problem(pattern)
        if words and (dims is None or len({*inputs, *outputs}) < len(inputs + outputs)):
            problem = f"{' '.join(words)!r} of {pattern!r} must be input and output dims, each once, such as 0>1,2"
        if problem:
            problems.append(f"optimizer.matrices: {problem}")
        rows.append(Matrices(pattern, inputs, outputs))
    return rows, problems


def first_match(path: str, rows: Sequence[_Row]) -> _Row | None:
    """The first of `rows` whose pattern is found in the path, None without one."""
    return next((row for row in rows if re.search(row.pattern, path)), None)


@dataclass(frozen=True)
class Trained:
    """Filter of NNX: variables that `wrt` selects and that are in no frozen group."""

    wrt: Filter
    groups: tuple[Group, ...]

    def __call__(self, path: PathParts, value: object) -> bool:
        group = first_match(path_of(path), self.groups)
        return nnx.filterlib.to_predicate(self.wrt)(tuple(path), value) and not (group and group.is_frozen)

    def __str__(self) -> str:
        return f"{getattr(self.wrt, '__name__', self.wrt)} without the frozen groups of optimizer.groups"


def trained_filter(wrt: Filter, text: str) -> Filter:
    """The filter of the trained parameters: `wrt` without the frozen groups of `optimizer.groups`."""
    groups = tuple(parse_groups(text)[0])
    return Trained(wrt, groups) if any(group.is_frozen for group in groups) else wrt
