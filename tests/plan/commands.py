"""The `flax-mesh plan` commands in the docstring of a recipe."""

import ast
import shlex
from pathlib import Path


def plan_commands(path: Path) -> list[list[str]]:
    """The words of every command after `flax-mesh`."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("flax-mesh plan ")]
