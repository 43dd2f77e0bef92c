"""The code of README and docs runs, its commands parse, and its list of public names is complete."""

import ast
import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

import flax_mesh
import flax_mesh.checkpoint
import flax_mesh.mesh
import flax_mesh.mpmd
import flax_mesh.mpmd.schedules
import flax_mesh.processes
import flax_mesh.train
from flax_mesh.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.name)
def test_the_code_of_a_page_runs_and_prints_what_the_page_shows(page, tmp_path, monkeypatch):
    """From top to bottom; a text block right behind one of code is what that prints."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__page__"}
    shown, printed = [], []
    pairs = re.findall(r"^```python\n(.*?)^```(?:\n\n```text\n(.*?)^```)?", page.read_text(), re.DOTALL | re.MULTILINE)
    for number, (code, text) in enumerate(pairs, start=1):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(code, f"{page.name}, block {number}", "exec"), namespace)
        if text:
            shown.append(text.strip())
            printed.append(out.getvalue().strip())
    assert len(shown) == len(blocks(page, "text"))
    assert printed == shown


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


MODULES = (
    flax_mesh,
    flax_mesh.mesh,
    flax_mesh.processes,
    flax_mesh.mpmd,
    flax_mesh.mpmd.schedules,
    flax_mesh.train,
    flax_mesh.checkpoint,
)


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_stands_in_the_api_page(module):
    page = (ROOT / "docs" / "api.md").read_text()
    names = getattr(module, "__all__", None) or [
        name for name, value in vars(module).items() if not name.startswith("_") and type(value).__name__ != "module"
    ]
    missing = [name for name in names if f"`{name}" not in page]
    assert not missing, f"docs/api.md lacks {missing} of {module.__name__}"


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_has_a_line_for_every_folder_and_each_says_itself_what_is_in_it():
    text = (ROOT / "README.md").read_text()
    for path in sorted((ROOT / "flax_mesh").rglob("__init__.py")):
        assert f"| `{path.parent.relative_to(ROOT).as_posix()}/` |" in text, path
        doc = ast.get_docstring(ast.parse(path.read_text()))
        assert doc and doc.splitlines()[0].endswith("."), path
