"""Rules for the imports of every file: the floors of docs/design.md, and the names that are private to each."""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.suite.syntax import PACKAGE, Import, read_imports, statements

TESTS = Path(__file__).parent
NAME = PACKAGE.name

# Lowest first. A file imports only from the same floor and from lower ones; floors in one row do not import each other.
FLOORS = (
    ("",),  # the files of flax_mesh/ itself
    ("mesh.torus", "program"),
    ("mesh", "processes", "hlo"),
    ("sharding.initialize",),
    ("sharding",),
    ("sharding.report",),
    ("blockwise.traced",),
    ("blockwise.masks",),
    ("blockwise",),
    ("step",),
    ("mpmd",),
    ("mpmd.schedules",),
    ("mpmd.split",),
    ("mpmd.split.stages",),
    ("mpmd.transport",),
    ("mpmd.runtime",),
    ("checkpoint.hf",),
    ("checkpoint",),
    ("models.ops", "models.settings"),
    ("data.rows", "data.streams", "data.tokenizers"),
    ("models", "data", "lora", "recipe.optimizers"),
    ("models.generation",),
    ("recipe",),
    ("train.hooks", "train.stores"),
    ("train",),
    ("inference",),
    ("plan.program",),
    ("plan",),
    ("plan.compile",),
    ("plan.search",),
    ("cli.text",),
    ("cli",),
)
RANK = {floor: rank for rank, floors in enumerate(FLOORS) for floor in floors}
# Files without JAX -> the packages that they import besides the standard library, each other and WHERE_USED.
PURE = {f"{name}.py": set() for name in ("errors", "hardware", "html", "fields", "text")}
PURE |= {"__init__.py": set(), "cli/text/arguments.py": set()}
PURE |= {"mesh/torus/*.py": {"numpy"}, "mpmd/schedules/*.py": set()}
# Heavy or optional: imported inside functions.
WHERE_USED = {"orbax", "tensorstore", "rich", "xxhash", "tensorboardX", "tokenizers", "transformers", "jinja2", "grain"}
WHERE_USED |= {"ray", "huggingface_hub", "pyarrow", "datasets", "wandb", "trackio", "lm_eval"}
PALLAS = "jax.experimental.pallas"  # a quarter of the time to import flax_mesh.models, for kernels of TPUs alone
ORBAX = f"{NAME}.checkpoint.orbax"  # it subclasses classes of Orbax, which it imports at its head
LM = f"{NAME}.inference.lm"  # it subclasses a class of lm_eval
MAIN = f"{NAME}.cli.main"  # it prints help without JAX, and imports the rest in functions

# Modules that other folders import although no name of them is public.
SHARED = """
    blockwise.loops checkpoint.base checkpoint.checksums checkpoint.diff checkpoint.find checkpoint.hf.kept
    checkpoint.hf.peft checkpoint.hf.safetensors checkpoint.layout checkpoint.read data.rows.tokens data.corpus
    data.run_data data.tokenizers.chat data.tokenizers.process hlo.collectives hlo.program inference.prompts
    inference.source inference.tokenizer mesh.shape mesh.torus.assign mesh.torus.shapes mesh.torus.torus
    models.generation.memory mpmd.runtime.compile mpmd.runtime.search plan.calibrate plan.report processes.launch
    processes.output program.follow program.program program.rewrite recipe.checks recipe.optimizers.schedule_free
    recipe.saved sharding.annotations sharding.explicit sharding.memory step.callbacks step.divided step.loss
    step.optimizer train.export
"""


@cache
def package() -> dict[str, list[Import]]:
    """The dotted name of every module -> its imports. Each file is parsed once."""
    found = {}
    for path in sorted([*PACKAGE.rglob("*.py"), PACKAGE / "__init__.pyi"]):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        found[module] = found.get(module, []) + read_imports(path.read_text())
    return found


def module_of(item: Import) -> str | None:
    """The imported module of the package, which is the `__init__` for names of a folder; None for other packages."""
    if item.name.split(".")[0] != NAME:
        return None
    candidates = (item.name, item.source, f"{item.source}.__init__", f"{item.name}.__init__")
    return next(name for name in candidates if name in package())


def folder_of(module: str) -> str:
    """`mpmd.split` for `flax_mesh.mpmd.split.trace` and for `flax_mesh.mpmd.split.__init__`."""
    return ".".join(module.split(".")[1:-1])


def floor_of(module: str) -> int:
    """The rank of a module; the `__init__` of a folder ranks above all modules in it."""
    folder = folder_of(module)
    if module.endswith(".__init__"):
        return max(rank for floor, rank in RANK.items() if f"{floor}.".startswith(f"{folder}.") or not folder)
    return RANK[folder]


def own_imports() -> list[tuple[str, str]]:
    """(module, imported module) for all imports within the package."""
    return [(here, there) for here, imports in package().items() for item in imports if (there := module_of(item))]


def test_every_folder_has_a_floor():
    assert {folder_of(module) for module in package()} == set(RANK)


def test_every_file_imports_only_from_its_own_floor_or_below():
    wrong = [
        f"{here} imports {there}"
        for here, there in own_imports()
        if floor_of(there) > floor_of(here)
        or (floor_of(there) == floor_of(here) and folder_of(there) != folder_of(here) and "__init__" not in here)
    ]
    assert not wrong, "\n".join(wrong)


def test_there_are_no_circular_imports():
    graph: dict[str, set[str]] = {module: set() for module in package()}
    for here, there in own_imports():
        graph[here].add(there)
    while ends := {module for module, targets in graph.items() if not targets}:
        graph = {module: targets - ends for module, targets in graph.items() if module not in ends}
    assert not graph, graph


def test_only_public_and_shared_modules_are_imported_from_another_folder():
    """A module is public if an `__init__` exports a name of it; the others that may be imported are in SHARED."""
    top = lambda module: folder_of(module).split(".")[0]  # noqa: E731
    public = {there for here, there in own_imports() if here.endswith(".__init__")}
    across = {
        (here, there)
        for here, there in own_imports()
        if not here.endswith(".__init__") and top(there) not in ("", top(here)) and not there.endswith(".__init__")
    }
    shared = {f"{NAME}.{module}" for module in SHARED.split()}
    wrong = {f"{here} imports from {there}" for here, there in across if there not in public | shared}
    assert not wrong, "\n".join(sorted(wrong))
    assert shared == {there for _, there in across} - public, "SHARED lists a module that need not be in it"


def test_private_names_are_not_imported_from_another_file():
    wrong = [
        f"{here} imports {item.name}"
        for here, imports in package().items()
        for item in imports
        if module_of(item) and any(part.startswith("_") and part != "__init__" for part in item.name.split("."))
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_are_at_the_head_of_the_file():
    wrong = [
        f"{here}: {item.name}"
        for here, imports in package().items()
        for item in imports
        if item.at_head == (item.name.split(".")[0] in WHERE_USED or item.name.startswith((ORBAX, PALLAS, f"{LM}.")))
        and here not in (ORBAX, LM, MAIN)
    ]
    assert not wrong, "\n".join(wrong)


# Folders whose functions may take a TrainConfig, besides `recipe`, and functions of other modules that may: the doors,
# which pass it to `resolve`, and comparisons of settings with saved ones.
OF_SETTINGS = ("plan.search", "cli")
DOORS = """
    plan.recipe.plan plan.recipe.plan_for plan.recipe._hardware
    train.loop.train train.export.reshard train.metadata.check_resume
    train.metadata.repeats_rows train.ray.ray_trainer train.ray._work train.warm_start.check_start_settings
"""
# Functions that read the settings of a resolved recipe: they record them, compare them with saved ones, or pass them to
# functions of the user.
READERS = {"recipe.resolve.retarget", "train.checks.changes_since", "train.loop._begin", "train.metadata.run_record"}
READERS |= {"train.steps.run_steps", "cli.text.start.facts_of"}


def test_only_doors_take_the_settings_and_all_other_functions_take_parts_of_a_recipe():
    takes, reads = set(), set()
    codes = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    for path in (path for path, code in codes.items() if "TrainConfig" in code or "recipe.config" in code):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for function in statements(ast.parse(codes[path])):
            if not isinstance(function, ast.FunctionDef):
                continue
            arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            if any(x.annotation is not None and "TrainConfig" in ast.unparse(x.annotation) for x in arguments):
                takes.add(f"{module}.{function.name}")
            attributes = [x for x in ast.walk(function) if isinstance(x, ast.Attribute) and x.attr == "config"]
            if any(re.search(r"\brecipe\.config$", ast.unparse(x)) for x in attributes):
                reads.add(f"{module}.{function.name}")
    takes = {name for name in takes if not name.startswith(("recipe.", *(f"{folder}." for folder in OF_SETTINGS)))}
    assert takes == {*DOORS.split()}
    assert reads == READERS


# These search for the codes that tensorstore and libtpu write into the texts of their errors.
OF_OTHER_LIBRARIES = {"checkpoint/checksums.py", "plan/compile/worker.py"}
READS = """
try: pass
except ValueError as e:
    "a" in str(e); str(e).split(); f"{e}".removesuffix("."); str(e) == "a"
    re.search("a", str(e)); PATTERN.match(f"{e}")
    print(str(e).strip(), f"{e}", first_line(e))
"""


def reads_of_errors(code: str) -> list[str]:
    """The expressions that compare, edit or search the text of an error that an `except` clause has caught."""
    names = set(re.findall(r"\bas (\w+):", code))
    texts = {text for name in names for text in (f"str({name})", f"f'{{{name}}}'")}
    if not any(text in code.replace('f"', "f'").replace('}"', "}'") for text in texts):  # no need to parse it
        return []
    tree = ast.parse(code)
    found = []
    for x in ast.walk(tree):
        parts: list[ast.expr] = []
        if isinstance(x, ast.Compare):
            parts = [x.left, *x.comparators]
        elif isinstance(x, ast.Attribute) and x.attr != "strip":
            parts = [x.value]
        elif isinstance(x, ast.Call) and re.search(r"\b(search|match|fullmatch|findall)$", ast.unparse(x.func)):
            parts = x.args
        if any(ast.unparse(part) in texts for part in parts):
            found.append(ast.unparse(x))
    return found


def test_no_code_reads_the_text_of_an_error():
    """It may show the text. Errors of JAX and Flax are recognized by `text.says`."""
    assert len(reads_of_errors(READS)) == 6
    found = {path.relative_to(PACKAGE).as_posix(): reads_of_errors(path.read_text()) for path in PACKAGE.rglob("*.py")}
    wrong = {path: reads for path, reads in found.items() if reads and path not in OF_OTHER_LIBRARIES | {"text.py"}}
    assert not wrong


def test_no_test_file_imports_from_another():
    imported = re.compile(r"^ *(?:from|import) tests\b.*\btest_\w+", re.MULTILINE)
    assert (
        len(imported.findall("import tests.test_a\n    from tests.a.test_b import c\nfrom tests.a import test_c")) == 3
    )
    found = {str(path): imported.findall(path.read_text()) for path in TESTS.rglob("*.py")}
    assert len(found) > 200 and not {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize("pattern", PURE)
def test_pure_files_import_no_jax(pattern):
    known = {NAME, *sys.stdlib_module_names, *WHERE_USED, *PURE[pattern]}
    pure = {path for other in PURE for path in PACKAGE.glob(other)}
    paths = list(PACKAGE.glob(pattern))
    assert paths
    for path in paths:
        for item in read_imports(path.read_text()):
            assert item.name.split(".")[0] in known, f"{path}: {item.name}"
            if own := module_of(item):
                assert PACKAGE.parent.joinpath(*own.split(".")).with_suffix(".py") in pure, f"{path}: {item.name}"


@pytest.mark.parametrize(("root", "most"), [(PACKAGE, 12), (TESTS, 20)], ids=["package", "tests"])
def test_no_folder_has_too_many_files(root, most):
    folders = {path.parent for path in root.rglob("*.py")}
    sizes = {folder: sum(path.name != "__init__.py" for path in folder.glob("*.py")) for folder in folders}
    assert not {str(folder): size for folder, size in sizes.items() if size > most}
