"""The code of README and docs runs, its commands parse, its links resolve, and the API pages list every public name."""

import ast
import doctest
import importlib
import inspect
import io
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import flax_mesh as fm
from flax_mesh.cli import main
from tests.run_page import main as run_page
from tests.run_page import text_of
from tests.suite.syntax import read_imports

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "docs").glob("*.ipynb"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(page), re.DOTALL | re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_the_code_of_a_page_prints_the_output_on_the_page(page, tmp_path):
    """In a fresh process: a reader's machine has one device, unless the page itself asks for more."""
    command = [sys.executable, str(ROOT / "tests" / "run_page.py"), str(page)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-4000:]


def test_a_page_that_shows_something_else_is_found(tmp_path):
    page = tmp_path / "page.md"
    for between, shown, found in (("\n", "1", ""), ("\n", "2", "-2\n+1"), ("words\n", "1", "does not follow")):
        page.write_text(f"```python\nprint(1)\n```\n{between}```text\n{shown}\n```\n")
        assert found in run_page(page) and bool(found) == bool(run_page(page))


# Heading of docs/tasks.md -> lines of code that the task takes.
TASKS = {
    "Shard a model": 3,
    "Train it in a loop of your own": 6,
    "Train it as a pipeline": 4,
    "Save it, and restore it into another layout": 3,
    "Load a decoder from Hugging Face": 1,
}


def test_each_task_takes_as_few_lines_as_promised():
    text = (ROOT / "docs" / "tasks.md").read_text()
    sections = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))
    assert sections.keys() == TASKS.keys()
    for title, most in TASKS.items():
        code = re.findall(r"^```python\n(.*?)^```", sections[title], re.DOTALL | re.MULTILINE)
        task = code[1] if title == "Load a decoder from Hugging Face" else code[0]  # that one makes a folder first
        statements = [line for line in task.splitlines() if line.strip()]
        assert len(statements) == most, f"{title}: {statements}"
        assert ";" not in task and max(map(len, statements)) <= 120


def commands() -> list[tuple[str, list[str]]]:
    lines = [(p.name, line) for p in PAGES for block in blocks(p, "sh") for line in block.splitlines()]
    found = [(page, line[line.index("flax-mesh ") :]) for page, line in lines if "flax-mesh " in line]
    return [(page, shlex.split(line, comments=True)[1:]) for page, line in found]


def test_the_commands_of_the_docs_are_accepted(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    trains = [(page, words) for page, words in commands() if words[0] == "train"]
    assert len(trains) > 5
    for page, words in trains:
        assert main([*words, "--print-config"]) == 0, f"{page}: {words}"
    explains = [words for _, words in commands() if words[0] == "explain" and "--html" not in words]
    assert explains and all(main(words) in (0, 3) for words in explains)
    assert main(["train", "recipes/tiny.py", "--no-such-flag"]) == 2  # this test can fail
    capsys.readouterr()


# A public name is one that the `__init__` of one of these exports.
PACKAGES = """
    flax_mesh flax_mesh.sharding flax_mesh.mesh flax_mesh.train flax_mesh.recipe flax_mesh.mpmd flax_mesh.mpmd.schedules
    flax_mesh.checkpoint flax_mesh.models flax_mesh.plan flax_mesh.plan.compile flax_mesh.plan.search
    flax_mesh.lora flax_mesh.inference flax_mesh.processes flax_mesh.cli
"""
PUBLIC = tuple(PACKAGES.split())
# Names that other libraries of the field already use; they do not count towards MOST_NAMES.
CONTRACT = {
    "flax_mesh": """
        create_mesh create_cpu_mesh force_cpu cpu_context parse_mesh_from_string calculate_host_mesh_shape
        create_device_mesh create_hybrid_device_mesh PartitionAxis PartitionRules match_partition_rules
        make_shard_and_gather_fns shard gather with_sharding_constraint analyze_sharding_strategy ShardingReport
        create_pattern_based_partition_spec extract_sharding_structure get_shardings_with_structure extract_shardings
        get_partition_spec get_names_from_partition_spec names_in_current_mesh get_incontext_mesh get_axes_size_in_mesh
        get_mesh_axis_names get_mesh_axis_size get_submesh_device_index
    """,
    "flax_mesh.mpmd": """
        MpmdMesh MpmdArray is_local_device is_fully_remote_sharding is_fully_local_sharding is_fully_remote_array
        as_jax_array device_put jit
    """,
}
MOST_NAMES = 136
# Documented in full, with Args, Returns, Raises and an example.
ENTRY_POINTS = {
    "flax_mesh": """
        create_mesh PartitionAxis PartitionRules abstract_state init_model make_shard_and_gather_fns constrain
        explain_sharding analyze_sharding_strategy
    """,
    "flax_mesh.train": "init_train_state make_train_step train",
    "flax_mesh.mpmd": "MpmdMesh split_stages Pipeline",
    "flax_mesh.mpmd.schedules": "make_schedule search_schedule",
    "flax_mesh.checkpoint": "Checkpointer",
    "flax_mesh.models": "load_decoder generate",
    "flax_mesh.inference": "open_trained",
    "flax_mesh.lora": "add_lora",
    "flax_mesh.plan": "plan",
    "flax_mesh.plan.compile": "compile_recipe",
    "flax_mesh.plan.search": "search_layouts",
}


def full_names(table: dict[str, str]) -> list[str]:
    return [f"{package}.{name}" for package, names in table.items() for name in names.split()]


def exported(package: str) -> list[str]:
    """The names that the `__init__` of a package imports: all that it may contain beside its docstring."""
    is_root = package == "flax_mesh"  # whose names are imported when they are used, and are listed for type checkers
    path = ROOT.joinpath(*package.split("."), "__init__.pyi" if is_root else "__init__.py")
    _, *nodes = ast.parse(path.read_text()).body
    code = [ast.unparse(node) for node in nodes if not isinstance(node, ast.ImportFrom)]
    assert code == ["__version__: str"] * is_root, f"{path} does more than import public names"
    return [alias.asname or alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]


# Names of other packages that the root has too, beside those that are used with them.
ALSO_IN_ROOT: dict[str, str] = dict.fromkeys(("init_train_state", "make_train_step"), "flax_mesh.train")


EXPORTED = {package: exported(package) for package in PUBLIC}
NAMES = [f"{package}.{name}" for package, names in EXPORTED.items() for name in names]


def public(name: str) -> Any:
    package, _, short = name.rpartition(".")
    return getattr(importlib.import_module(package), short)


def test_the_root_exports_the_names_of_its_stub():
    assert fm.__all__ == EXPORTED["flax_mesh"]  # pyright: ignore[reportAttributeAccessIssue]
    assert {*fm.__all__, "__version__"} <= {*dir(fm)}  # pyright: ignore[reportAttributeAccessIssue]
    names: dict[str, object] = {}
    exec("from flax_mesh import *", names)
    for item in read_imports((ROOT / "flax_mesh" / "__init__.pyi").read_text()):
        short = item.name.rpartition(".")[2]
        assert names[short] is getattr(fm, short) is getattr(importlib.import_module(item.source), short)


def test_only_public_packages_export_names():
    folders = [path.parent.relative_to(ROOT) for path in (ROOT / "flax_mesh").rglob("__init__.py")]
    packages = {".".join(folder.parts) for folder in folders}
    assert not {package for package in packages - set(PUBLIC) if exported(package)}


def test_the_api_pages_list_the_names_that_are_exported():
    """Both ways, each name once: `.. currentmodule::` and the names of the tables below it."""
    listed = []
    for block in blocks(ROOT / "docs" / "api.md", "{eval-rst}"):
        package = re.search(r"^\.\. currentmodule:: (\S+)$", block, re.MULTILINE)
        assert package, block
        listed += [f"{package[1]}.{name}" for name in re.findall(r"^ +(\w+)$", block, re.MULTILINE)]
    assert sorted(listed) == sorted(NAMES)


def test_every_public_name_has_one_home():
    homes: dict[object, set[str]] = {}
    for name in NAMES:
        package, _, short = name.rpartition(".")
        if package == "flax_mesh" and (home := ALSO_IN_ROOT.get(short)):
            assert public(name) is public(f"{home}.{short}")
            package = home
        homes.setdefault(short, set()).add(package)
        homes.setdefault(id(public(name)), set()).add(package)
    assert not {name: packages for name, packages in homes.items() if len(packages) > 1}


def test_the_public_names_are_few():
    contract = set(full_names(CONTRACT))
    assert contract <= set(NAMES)
    assert len(set(NAMES) - contract) <= MOST_NAMES


def foreign_names(code: str) -> list[str]:
    """Names of flax_mesh in `code` that no public package exports: imported, or attributes of `fm`."""
    names = [item.name for item in read_imports(code)]
    names += [f"flax_mesh.{name}" for name in re.findall(r"\bfm\.(\w+)", code)]
    return [name for name in names if name.split(".")[0] == "flax_mesh" and name not in {*PUBLIC, *NAMES}]


def test_code_that_users_read_takes_public_names_alone():
    codes = {page.name: "\n".join(blocks(page, "python")) for page in PAGES}
    assert foreign_names(codes.pop("programs.md"))  # for contributors
    codes |= {path.name: path.read_text() for path in (ROOT / "recipes").glob("*.py")}
    assert not {name: found for name, code in codes.items() if (found := foreign_names(code))}
    deep = "import flax_mesh as fm\nfrom flax_mesh.tree import map_named\nfm.tree.path_of\nfm.shard"
    assert foreign_names(deep) == ["flax_mesh.tree.map_named", "flax_mesh.tree"]


def test_the_default_values_of_a_signature_are_short():
    functions = {name: public(name) for name in NAMES if callable(public(name))}
    for name, kind in [*functions.items()]:
        functions |= {f"{name}.{k}": x for k, x in vars(kind).items() if inspect.isclass(kind) and inspect.isroutine(x)}
    lengths = {name: sum(map(len, default_texts(function))) for name, function in functions.items()}
    assert len(lengths) > 200 and not {name: length for name, length in lengths.items() if length > 300}


def default_texts(function: Any) -> list[str]:
    """As `help` shows them; [] for a function in C without a signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [repr(x.default) for x in parameters if x.default is not x.empty]


@pytest.mark.parametrize("name", full_names(ENTRY_POINTS))
def test_every_entry_point_has_a_complete_docstring(name):
    thing = public(name)
    doc = inspect.getdoc(thing) or ""
    heads = set(re.findall(r"^(\w+):$", doc, re.MULTILINE))
    assert heads & {"Args", "Attributes"}, "no Args: or Attributes:"
    assert inspect.isclass(thing) or "Returns" in heads, "no Returns:"
    assert "Raises" in heads, "no Raises:"
    assert heads & {"Example", "Examples"} and ">>> " in doc, "no Example: with >>> lines"


def examples() -> list[doctest.DocTest]:
    """The `>>>` examples of all public names and of the methods of public classes."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    return [example for name in NAMES for example in finder.find(public(name), name) if example.examples]


SLOW_EXAMPLES = """
    flax_mesh.train.train flax_mesh.mpmd.Pipeline flax_mesh.checkpoint.Checkpointer flax_mesh.models.generate
    flax_mesh.models.load_decoder flax_mesh.plan.plan flax_mesh.plan.compile.compile_recipe
    flax_mesh.plan.search.search_layouts flax_mesh.inference.open_trained flax_mesh.mpmd.trace_step
    flax_mesh.mpmd.measure_costs flax_mesh.models.sample flax_mesh.models.next_token_loss flax_mesh.train.build_program
    flax_mesh.checkpoint.save_safetensors flax_mesh.train.map_rows
"""  # 1 to 10 s each
# Functions that need a tokenizer, Ray, or a text that their pages explain.
WITHOUT_EXAMPLE = {f"flax_mesh.train.{name}" for name in ("read_chats", "read_preferences", "ray_trainer")}
WITHOUT_EXAMPLE |= {"flax_mesh.train.read_prompts", "flax_mesh.inference.evaluate_tasks"}
WITHOUT_EXAMPLE |= {"flax_mesh.plan.parse_topology"}


def test_every_public_function_has_an_example():
    functions = {name for name in NAMES if inspect.isroutine(public(name))}
    assert {name for name in functions if ">>> " not in (inspect.getdoc(public(name)) or "")} == WITHOUT_EXAMPLE


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(example, id=example.name, marks=pytest.mark.slow if example.name in SLOW_EXAMPLES.split() else ())
        for example in examples()
    ],
)
def test_the_example_of_a_docstring_runs(example, tmp_path, monkeypatch):
    """With the imports that every page of the docs begins with, and the module's unless it is an entry point."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    own = {} if example.name in full_names(ENTRY_POINTS) else example.globs
    example.globs = own | {"jax": jax, "jnp": jnp, "np": np, "optax": optax, "nnx": nnx, "fm": fm}
    report = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, verbose=False)
    assert runner.run(example, out=report.write).failed == 0, report.getvalue()


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as in a repository and on the site."""
    text = re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    titles = [title.lower().strip() for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text_of(page)):
            if "://" not in target:
                other = page.parent / target if target else page
                assert other.exists(), f"{page.name} links to {target}"
                assert not anchor or anchor in anchors(other), f"{page.name} links to {target}#{anchor}"


def test_citation_and_changelog_have_the_version_of_the_package():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    newest, *_ = re.findall(r"^## ([\d.]+)", (ROOT / "docs" / "changelog.md").read_text(), re.MULTILINE)
    assert newest == version


def test_the_table_of_tests_names_every_folder():
    table = re.findall(r"^\| (`.*?`) \|", (ROOT / "tests" / "README.md").read_text(), re.MULTILINE)
    named = [name for cell in table for name in re.findall(r"`([\w/]+)`", cell)]
    folders = {path.parent.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    assert sorted(named) == sorted(folders - {"."})


def test_the_readme_and_a_docstring_describe_every_folder():
    text = (ROOT / "README.md").read_text()
    for path in sorted((ROOT / "flax_mesh").rglob("__init__.py")):
        assert f"| `{path.parent.relative_to(ROOT).as_posix()}/` |" in text, path
        doc = ast.get_docstring(ast.parse(path.read_text()))
        assert doc and doc.splitlines()[0].endswith("."), path
