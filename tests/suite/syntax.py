"""The imports of a file of flax_mesh, from its syntax tree."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[2] / "flax_mesh"


class Import(NamedTuple):
    name: str  # dotted, including the imported name
    source: str  # the module that contains it
    at_head: bool


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """All statements of a tree, without a walk through their expressions, which takes ten times as long."""
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        nodes = getattr(tree, field, ())
        for node in nodes if isinstance(nodes, list) else ():
            if isinstance(node, ast.stmt):
                yield node
            yield from statements(node)


def read_imports(code: str) -> list[Import]:
    """Every import of a file, including those under `if TYPE_CHECKING:`, which count as at the head."""
    tree = ast.parse(code)
    head = {id(child) for node in tree.body for child in (node.body if isinstance(node, ast.If) else [node])}
    found = []
    for node in statements(tree):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, alias.name, id(node) in head) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "relative import"
            found += [Import(f"{node.module}.{alias.name}", node.module, id(node) in head) for alias in node.names]
    return found
