"""Figures of the code that only fall: tests/ratchet.txt has the limit of each.

    python -m tests.suite.ratchet    # lowers every limit to the figure of today

A line of the file is a figure and its limit. Below a number of lines, and only there, further lines may raise the
limit: each has a number and the feature that needs these lines.
"""

import ast
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.suite.syntax import PACKAGE, statements

TESTS = Path(__file__).parents[1]
FILE = TESTS / "ratchet.txt"
FUNCTION, MODULE = 60, 400  # lines
CODE, CODE_OF_TESTS = "lines of flax_mesh", "lines of tests"
TEXTS = ("str", "repr")


class Limit(NamedTuple):
    base: int
    rises: tuple[str, ...] = ()  # such as "+300 kernels for the attention of any model"

    @property
    def value(self) -> int:
        return self.base + sum(int(text.partition(" ")[0]) for text in self.rises)


def read(text: str) -> dict[str, Limit]:
    """The limits. Raises ValueError for a line that is neither a figure nor a rise with its reason."""
    limits: dict[str, Limit] = {}
    for line in text.splitlines():
        name, _, number = line.rpartition(" ")
        if line.startswith("    +") and limits:
            name, rise = [*limits][-1], line.strip()
            if name not in (CODE, CODE_OF_TESTS):
                raise ValueError(f"{line!r} raises {name!r}, which may only fall")
            if not rise[1:].partition(" ")[0].isdigit() or not rise.partition(" ")[2]:
                raise ValueError(f"{line!r} must be a number and a reason, such as '    +300 kernels for attention'")
            limits[name] = Limit(limits[name].base, (*limits[name].rises, rise))
        elif name and number.isdigit() and name not in limits:
            limits[name] = Limit(int(number))
        else:
            raise ValueError(f"{line!r} must be a figure and its limit, such as 'lines of tests 42800'")
    return limits


def write(limits: Mapping[str, Limit]) -> str:
    lines = [
        f"{name} {limit.base}" + "".join(f"\n    {rise}" for rise in limit.rises) for name, limit in limits.items()
    ]
    return "\n".join(lines) + "\n"


def lowered(limits: Mapping[str, Limit], figures: Mapping[str, int]) -> dict[str, Limit]:
    """The limits, none above its figure. A limit that is lowered contains the rises before it."""
    old = {name: limits.get(name, Limit(figure)) for name, figure in figures.items()}
    return {name: Limit(figure) if figure < old[name].value else old[name] for name, figure in figures.items()}


def problems(limits: Mapping[str, Limit], figures: Mapping[str, int]) -> list[str]:
    """The figures that are above their limits, and those without one."""
    limit_of = {name: limits[name].value if name in limits else None for name in figures}
    above = {name: limit for name, limit in limit_of.items() if limit is None or figures[name] > limit}
    return [f"{name}: {figures[name]}, limit {limit}" for name, limit in above.items()]


def measure() -> dict[str, int]:
    """Every figure of the files as they are."""
    code = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    nodes = [node for text in code.values() for node in statements(ast.parse(text))]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    handlers = [handler for node in nodes if isinstance(node, ast.Try | ast.TryStar) for handler in node.handlers]
    return {
        CODE: sum(map(_num_lines, code.values())),
        CODE_OF_TESTS: sum(_num_lines(path.read_text()) for path in TESTS.rglob("*.py")),
        "Any": sum(len(re.findall(r"\bAny\b", text)) for text in code.values()),
        "modules in SHARED": len(
            (TESTS / "test_layering.py").read_text().split('SHARED = """')[1].split('"""')[0].split()
        ),
        "files that are not checked strictly": len(code.keys() - strict_files(code)),
        f"functions above {FUNCTION} lines": sum((f.end_lineno or 0) - f.lineno >= FUNCTION for f in functions),
        f"files above {MODULE} lines": sum(_num_lines(text) > MODULE for text in code.values()),
        "broad excepts": sum(map(_is_broad, handlers)),
        "reads of the text of errors": sum(map(_text_reads, handlers)),
    }


def _num_lines(text: str) -> int:
    return text.count("\n")


def strict_files(paths: Iterable[Path]) -> set[Path]:
    """The files that the table of basedpyright in pyproject.toml names, or whose folder it names."""
    root = PACKAGE.parent
    entries = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["basedpyright"]["strict"]
    return {path for path in paths if any(path.is_relative_to(root / entry) for entry in entries)}


def _is_broad(handler: ast.ExceptHandler) -> bool:
    return any(name in ("Exception", "BaseException") for name in _names(handler.type)) or handler.type is None


def _names(node: ast.AST | None) -> list[str]:
    return [each.id for each in ast.walk(node) if isinstance(each, ast.Name)] if node else []


def _text_reads(handler: ast.ExceptHandler) -> int:
    """How often the text of the caught exception is compared, searched or cut, which another release may change."""
    inside = [node for statement in handler.body for node in ast.walk(statement)]
    calls = [node for node in inside if isinstance(node, ast.Call) and ast.unparse(node.func) in TEXTS]
    texts = [call for call in calls if (handler.name or "") in map(ast.unparse, call.args)]
    arguments = [node for node in inside if isinstance(node, ast.Attribute) and node.attr == "args"]
    return len(texts) + sum(ast.unparse(node.value) == handler.name for node in arguments)


def main() -> None:
    limits, figures = read(FILE.read_text()), measure()
    FILE.write_text(write(lowered(limits, figures)))
    print("\n".join(f"{name}: {figure}, limit {limits[name].value}" for name, figure in figures.items()))


if __name__ == "__main__":
    main()
