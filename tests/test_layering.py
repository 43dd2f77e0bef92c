"""Rules for the imports of every file: the floors of docs/design.md, and the names that are private to each."""

import sys
from functools import cache
from pathlib import Path

import pytest

from tests.suite.syntax import PACKAGE, Import, read_imports

TESTS = Path(__file__).parent
NAME = PACKAGE.name

# Lowest first. A file imports only from its own floor and from lower ones; floors in one row do not import each other.
FLOORS = (
    ("",),  # the files of flax_mesh/ itself
    ("mesh.torus",),
    ("mesh", "processes"),
    ("sharding",),
    ("sharding.report",),
    ("step",),
    ("mpmd",),
    ("mpmd.schedules",),
    ("mpmd.split",),
    ("mpmd.transport",),
    ("mpmd.runtime",),
    ("checkpoint.hf",),
    ("checkpoint",),
    ("models", "train.data", "train.optimizers", "train.hooks"),
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
PURE = {"errors.py": set(), "hardware.py": set(), "settings.py": set(), "svg.py": set(), "text.py": set()}
PURE |= {"mesh/torus/*.py": {"numpy"}, "mpmd/schedules/*.py": set()}
WHERE_USED = {
    "orbax",
    "tensorstore",
    "rich",
    "xxhash",
    "tensorboardX",
    "tokenizers",
}  # heavy or optional: imported inside functions
ORBAX = (
    f"{NAME}.checkpoint.orbax"  # subclasses Orbax classes: imports Orbax at its head, and is imported inside functions
)


# Modules that other folders import although no name of them is public.
SHARED = {
    "checkpoint.checksums",  # damage of a step, for `flax-mesh checkpoint verify`
    "checkpoint.diff",
    "checkpoint.find",  # the folders of steps
    "checkpoint.hf.kept",  # the tokenizer and other files of an imported model
    "checkpoint.hf.safetensors",
    "checkpoint.read",
    "inference.evaluate",  # for `flax-mesh evaluate`
    "inference.memory",  # for `flax-mesh generate`
    "inference.open",  # trained decoders, for both commands
    "inference.prompts",
    "inference.source",
    "inference.tokenizer",
    "mesh.shape",  # axis sizes from and to text
    "mesh.torus.assign",  # axes over a torus, for plans without devices
    "mesh.torus.torus",
    "models.cache",  # the dims of the cache, for the check of its size
    "models.kernels",  # the lengths that splash attention divides, for evaluation
    "mpmd.schedules.file",  # schedules as text files, for recipes and `flax-mesh schedule`
    "mpmd.runtime.placement",  # bytes of every group, for `explain` of a recipe
    "mpmd.runtime.search",  # pipeline.schedule=search
    "mpmd.runtime.compile",  # the programs of stages, for plans
    "mpmd.split.jaxpr",  # traces and their FLOPs, for plans
    "mpmd.split.remat",  # the values of `pipeline.remat`
    "mpmd.transport.ordered",  # the values of `pipeline.transport`
    "plan.calibrate",  # measured figures, for `flax-mesh plan --calibrate`
    "plan.topology",  # hardware from text and from devices, for the commands
    "plan.compile.target",  # what must be installed to compile, likewise
    "plan.search.chips",
    "plan.search.confirm",
    "plan.search.report",  # the text of a search, for the command
    "plan.search.space",  # the settings that are searched, likewise
    "plan.report",  # lines of a plan, for `train` and `plan`
    "processes.launch",
    "processes.output",  # standard output that never ends a process
    "processes.store",  # the key-value store of jax.distributed
    "sharding.annotations",
    "sharding.memory",  # which arrays are in the memory of the host
    "sharding.report.hlo",  # the parser of compiled programs, for plans
    "sharding.report.html",  # tables of an HTML page, for plans
    "sharding.explicit",  # Explicit axes of models, steps and pipelines
    "step.batch",  # microbatches of a batch, likewise
    "step.loss",  # one loss and one update for the plain step and the pipeline
    "step.parameter_flow",  # which parameters a call changes, likewise
    "train.checks",
    "train.explain",
    "train.data.own",  # the shapes of a batch, for plans
    "train.export",
    "train.metadata",
    "train.metrics",
    "train.optimizers.groups",  # the filter of what is trained, for plans
    "train.warm_start",  # which folders are those of Hugging Face
    "train.run_folder",  # the names of the files in it
}


@cache
def package() -> dict[str, list[Import]]:
    """The dotted name of every module -> its imports. Each file is parsed once."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        found[module] = read_imports(path.read_text())
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
    shared = {f"{NAME}.{module}" for module in SHARED}
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
        if item.at_head == (item.name.split(".")[0] in WHERE_USED or item.name.startswith(ORBAX)) and here != ORBAX
    ]
    assert not wrong, "\n".join(wrong)


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
