"""The floors of docs/design.md: a file imports only from floors below its own, at the head of the file."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "flax_mesh"
FLOORS = (
    ("axes", "errors", "hardware", "jax_compat", "svg", "text", "tree"),
    ("mesh", "processes"),
    ("sharding",),
    ("step",),
    ("mpmd",),
    ("checkpoint",),
    ("models", "train"),
    ("plan",),
    ("cli",),
)
RANK = {name: rank for rank, names in enumerate(FLOORS) for name in names}
WITHOUT_JAX = ("mesh/torus/torus.py", "mpmd/schedules/schedule.py")
WHERE_USED = {"orbax", "tensorstore", "rich", "xxhash"}  # heavy or optional: imported inside functions
HEAVY = "flax_mesh.checkpoint.orbax"  # subclasses of Orbax's: imports it at its head, and is itself such an import
JAX_WORLD = {"jax", "jaxlib", "flax", "optax"}


def imports(path: Path) -> list[tuple[str, bool]]:
    """(dotted name, whether it stands at the head of the file) for every import in the file."""
    tree = ast.parse(path.read_text())
    head = {id(node) for node in tree.body}
    for node in tree.body:  # `if TYPE_CHECKING:` is part of the head
        if isinstance(node, ast.If):
            head |= {id(child) for child in node.body}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in head) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [(name, id(node) in head) for name in names]
    return found


def floor_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


def test_every_file_imports_only_from_its_own_floor_or_below():
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        here = floor_of(path)
        if here == "__init__":
            continue
        for name, _ in imports(path):
            if name.startswith("flax_mesh."):
                there = name.split(".")[1]
                if RANK[there] > RANK[here] or (RANK[there] == RANK[here] and there != here and RANK[here] > 0):
                    wrong.append(f"{path.relative_to(PACKAGE)} ({here}) imports {name} ({there})")
    assert not wrong, "\n".join(wrong)


def test_imports_stand_at_the_head_of_the_file():
    wrong = [
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for name, at_head in imports(path)
        if at_head == (name.split(".")[0] in WHERE_USED or name.startswith(HEAVY)) and module_of(path) != HEAVY
    ]
    assert not wrong, "\n".join(wrong)


def test_pure_files_import_no_jax():
    for relative in WITHOUT_JAX:
        path = PACKAGE / relative
        if path.exists():
            assert not [name for name, _ in imports(path) if name.split(".")[0] in JAX_WORLD | {"flax_mesh"}], relative


def test_the_walk_sees_a_forbidden_import(tmp_path):
    file = tmp_path / "bad.py"
    file.write_text("import jax\ndef f():\n    from flax_mesh.cli import main\n")
    assert imports(file) == [("jax", True), ("flax_mesh.cli.main", False)]
